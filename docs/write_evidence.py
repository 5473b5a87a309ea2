"""Writes docs/evidence.md from the records of GPU runs in docs/evidence/.

Tests and benchmarks leave JSON files of figures, and pytest JUnit files, in
``INKLING_SCONV_LOGS``; what is taken from there into docs/evidence/ is what the page says.

    python docs/write_evidence.py [OUT.md]
    python docs/write_evidence.py --take DIR    # every .json and .xml in DIR and below
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "evidence"

SERVERS = {
    "mtp-plugin": "crashing fork, plugin, MTP",
    "mtp-applied": "crashing fork after `inkling-sconv apply`, plugin off, MTP",
    "mtp-installed": "as published, plugin, MTP",
    "mtp-lazy": "as published, plugin, MTP, `extra_buffer_lazy`",
    "mtp-fast": "as published, `INKLING_SCONV=fast`, MTP",
    "prefill-extra-buffer": "as published, plugin, full prefill graph",
    "prefill-extra-buffer-lazy": "as published, plugin, full prefill graph, `extra_buffer_lazy`",
    "prefill-ngram": "as published, plugin, full prefill graph, NGRAM",
    "prefill-plugin": "crashing fork, plugin, full prefill graph",
    "prefill-without-fixes": "as published, `INKLING_SCONV_FIXES=none`, full prefill graph",
    "prefill-ngram-without-fixes": "as published, `INKLING_SCONV_FIXES=none`, the same, NGRAM",
}
STEPS_OF = {
    "mtp-without-fixes": "as published, no fix",
    "mtp-applied": "crashing fork after `apply`, plugin off",
    "mtp-without-draft-window": "as published, `draft-checkpoint`: what SGLang keeps since 0.5.22",
    "mtp-zeroed-draft-state": "as published, both, with zeros for the checkpoint",
    "mtp-installed": "as published, plugin",
    "mtp-lazy": "as published, plugin, `extra_buffer_lazy`",
    "mtp-plugin": "crashing fork, plugin",
    "mtp-fast": "as published, `INKLING_SCONV=fast`, both",
}
FIXED = {
    "`prefill-rows`": ("prefill-without-fixes", "prefill-extra-buffer"),
    "`prefill-tracking`, with `prefill-rows`": ("prefill-ngram-without-fixes", "prefill-ngram"),
}
FACTS = {
    "accept length": "accept length (bonus token counted)",
    "distinct tokens in 300": "distinct tokens in 300",
    "captured": "decode sizes captured",
    "kl_test_utils": "SGLang's `kl_test_utils`",
    "kl_multiturn_utils": "SGLang's `kl_multiturn_utils`",
}
NOT_RUN = (
    "Every other SGLang than the one above. `TestInstalled` and `TestFast` run on any.",
    "B200, four GPUs, tensor parallelism: the fused all-reduce path reads the same indices.",
    "SGLang's own Inkling suites: another server answered on their port, so nothing of it counts.",
    "`bench_server.py` with the guard in the file, and with `INKLING_SCONV=fast`.",
)
NO_FLOATS = ("tokens per decode step", "tokens of the first decode step")


def load(name: str) -> dict[str, Any]:
    """One record; empty where that test was not run."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(heading: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(heading) + " |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def comparisons() -> Iterator[tuple[str, ...]]:
    """Every comparison of floats, server by server; steps are no floats, and come elsewhere."""
    for name, server in SERVERS.items():
        for one in load(name).values():
            if isinstance(one, dict) and one["name"] not in NO_FLOATS:
                figure = f"{one['differing']} of {one['compared']}"
                differ = figure if one["differing"] == 0 else f"**{figure}**"
                cached = " ".join(map(str, one["cached"])) or "-"
                largest = f"{one['largest']:.3g}"
                yield server, one["name"], differ, largest, cached, one["detail"] or "-"


def facts() -> Iterator[tuple[str, ...]]:
    """What else each server showed."""
    for name, server in SERVERS.items():
        for key, label in FACTS.items():
            if (value := load(name).get(key)) is not None:
                shown = f"{value:.2f}" if isinstance(value, float) else str(value)
                yield server, label, shown.strip("[]'")


def steps() -> Iterator[tuple[str, ...]]:
    """Decode steps after a hit against cold, by what is kept of the draft's state."""
    for name, what in STEPS_OF.items():
        record = load(name)
        # A class that failed early has not all of its figures.
        if all(kind in record for kind in NO_FLOATS):
            whole, first = (record[kind] for kind in NO_FLOATS)
            figure = f"{whole['differing']} of {whole['compared']}"
            yield what, figure, whole["detail"].partition(";")[0], first["detail"]


def fixed() -> Iterator[tuple[str, ...]]:
    """A fix by the floats that differ without it and with it."""
    for fix, names in FIXED.items():
        figures = (load(name).get("prefill-made hit") for name in names)
        yield fix, *(f"{f['differing']} of {f['compared']}" if f else "-" for f in figures)


def mutants() -> Iterator[tuple[str, ...]]:
    """What a real server shows of wrong versions."""
    for name, seen in load("mtp-mutants").items():
        figure = seen
        if isinstance(seen, dict):
            largest = f"largest {seen['largest']:.3g}, {seen['detail']}"
            figure = f"{seen['differing']} of {seen['compared']} floats differ, {largest}"
        yield name, f"**red**: {figure}"


def refresh(
    title: str, measured: dict[str, dict[str, list[float]]], cell: Callable[[list[float]], str]
) -> Iterator[str]:
    """One measure of benchmark/bench_refresh.py: contenders by rows."""
    yield from table(
        (title, *(f"{rows} rows" for rows in measured)),
        (
            (name, *(cell(of[name]) for of in measured.values()))
            for name in next(iter(measured.values()))
        ),
    )


def median(values: list[float]) -> str:
    """Of the rounds."""
    return f"{statistics.median(values):.2f}"


def half_spread(values: list[float]) -> float:
    """Half the distance of the quartiles; 0 of a single value."""
    low, _, high = (
        statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    )
    return (high - low) / 2


def median_and_spread(values: list[float]) -> str:
    """The median, and in brackets half the distance of the quartiles."""
    return f"{median(values)} ({half_spread(values):.2f})"


def targets() -> Iterator[str]:
    """What was aimed at, and whether it was met."""
    found = load("refresh")["targets"]
    met = sum(1 for _, reached in found if reached)
    yield f"{met} of {len(found)} targets met."
    yield from (f"- not met: {text}" for text, reached in found if not reached)
    first = load("refresh")["first"]
    counts = (
        f"{name}: {one['compilations']}, {one['seconds']:.1f} s" for name, one in first.items()
    )
    yield f"\nCompilations at 200 new batch sizes, and what they take: {'; '.join(counts)}.\n"


def bench() -> Iterator[tuple[str, ...]]:
    """Figures of benchmark/bench_server.py, contender by contender; inert has an earlier record."""
    of = {
        **{name: one["figures"] for name, one in load("server")["contenders"].items()},
        "inert": load("server-inert")["contenders"]["faithful"]["figures"],
    }
    for what in of["exempt"]:
        # Start-up and rates of the earlier record: other servers were on the GPU.
        cells = (
            "-"
            if name == "inert" and "launches" not in what
            else f"{statistics.median(figures[what]):.4g} ({half_spread(figures[what]):.3g})"
            for name, figures in of.items()
        )
        yield what.strip(), *cells


def in_turns(contenders: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Figures of servers that were asked in turns, contender by contender."""
    of = [one["figures"] for one in contenders.values()]
    for what in of[0]:
        # One that failed may have none.
        yield what, *(median_and_spread(f[what]) if what in f else "-" for f in of)


def designs() -> Iterator[str]:
    """Design by check, from the records of test/gpu/test_designs_gpu.py."""
    records = {
        path.stem.removeprefix("design-"): json.loads(path.read_text())
        for path in sorted(RECORDS.glob("design-*.json"))
    }
    checks = list(next(iter(records.values())))
    yield from table(
        ("design", *checks),
        (
            (
                name.replace("-", " "),
                *(f"**red**: {seen[c]}" if seen[c] else "green" for c in checks),
            )
            for name, seen in records.items()
        ),
    )
    for check in checks:
        if not any(seen[check] for seen in records.values()):
            yield f"- *{check}* catches none of these designs."
    yield ""


def suites() -> Iterator[tuple[str, ...]]:
    """Tests, failures and seconds per class, from the JUnit files."""
    for path in sorted(RECORDS.glob("*.xml")):
        classes: dict[str, list[ElementTree.Element]] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            classes.setdefault(case.get("classname", "").split(".")[-1], []).append(case)
        for name, cases in classes.items():
            red = [case.get("name", "") for case in cases if case.find("failure") is not None]
            seconds = sum(float(case.get("time", 0)) for case in cases)
            failed = f"**{len(red)}**: {', '.join(red)}" if red else "0"
            yield path.stem, name, str(len(cases)), failed, f"{seconds:.0f}"


def span() -> float:
    """Seconds from the first part's start to the last one's end, by their JUnit files."""
    starts, ends = [], []
    for path in RECORDS.glob("shard-*.xml"):
        for suite in ElementTree.parse(path).iter("testsuite"):
            starts.append(datetime.fromisoformat(suite.attrib["timestamp"]).timestamp())
            ends.append(starts[-1] + float(suite.attrib["time"]))
    return max(ends, default=0) - min(starts, default=0)


def soak() -> Iterator[tuple[str, ...]]:
    """What a load left behind, from the record of test_inkling_soak.py."""
    seen = load("soak")
    ends, rescored, killed = seen["ends"], seen["rescored"], seen["killed"]
    yield "requests", f"{seen['requests']} in {seen['seconds']:.0f} s"
    yield "aborted by their client, streams left", f"{ends['aborted']}, {ends['closed']}"
    yield "retracted", str(seen["retracted"])
    yield "most running, most in the queue", f"{seen['most running']}, {seen['most queued']}"
    figure = f"{rescored['differing']} of {rescored['compared']}"
    figure = figure if rescored["differing"] == 0 else f"**{figure}**"
    yield "rescored by a cold prefill: floats that differ", f"{figure} ({rescored['detail']})"
    for pool, before in seen["start"]["pools"].items():
        after = seen["end"]["pools"][pool]
        yield f"free {pool} slots, before and after", f"{before['available']}, {after['available']}"
    for key, label in (("gpu", "GPU"), ("resident", "resident")):
        first, last = (f"{seen[key][n] / 2**20:.0f}" for n in (len(seen[key]) // 10, -1))
        yield f"{label} memory, MiB, after a tenth and at the end", f"{first}, {last}"
    yield (
        "`kill -9` of the scheduler",
        f"{killed['cut off']} requests got an error within {killed['seconds']:.1f} s",
    )
    if again := seen.get("restarted"):
        yield "after a restart", f"{again['the same']} of {again['answers']} answers the same"


INTRODUCTION = """\
# Evidence

<!-- Generated by docs/write_evidence.py from docs/evidence/: do not edit. -->

Measured on {machine}. One GPU, the tiny checkpoint of
`inkling-sconv tiny`, deterministic inference, 8 requests at most. The crashing fork is this SGLang
with the inert fill of #34043 and without the guard of #35042, made by the tests. To renew:

```
INKLING_SCONV_LOGS=DIR make gpu-test
python docs/write_evidence.py --take DIR && make evidence
```

## Start-up

With `INKLING_SCONV=off` the crashing fork dies in its draft-extend capture:
`{crash}`.
With the plugin, and after `apply`, it serves, as follows.

## Equality

Logprobs, float by float. *cached*: prefix tokens reused by each request.
"""
FIXES = """\
## Fixes

Floats that differ on a prefix hit that prefill graphs made, of the same server without the fix
and with it (`TestWithoutFixes`, `TestExtraBuffer`, `TestNgramWithoutFixes`, `TestNgram`).
"""
STEPS = """\
Decode steps after a hit on a decode-made prefix, against the same requests cold. The target
verifies every token, so the outputs are the same; what differs is how many tokens a step gives.
*First step*: mean of 24 prompts that end one token past a checkpoint, where the draft's windows are
those of the checkpoint. *Both*: `draft-checkpoint` and `draft-window`.
"""
STATE = """\
With both fixes 3 of 24 first steps differ. In the emulator 1 of 24 does, where head 1 kept a token
that was not verified yet (`pytest test/unit/test_drafts.py -k in_a_model`: 2.75 tokens with both,
2.79 cold, 1.00 one row early).

Without SGLang's boundary fix (`SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX=0`) every step reads the conv
state. Accept length (`TestWithoutBoundaryFix`): as published, no fix {none:.2f}, `draft-state`
{draft-state:.2f}; crashing fork, plugin {fork:.2f}. With the boundary fix: {default:.2f}.
"""
FORMS = """\
## Draft-extend left alone, and inert

Two servers of the crashing fork, one form each (`TestDraftExtendForms`): {rows_differing} of {rows}
rows of all conv pools differ after the same requests, slot 0 aside, and {steps[differing]} of
{steps[compared]} decode steps, {logprobs[differing]} of {logprobs[compared]} logprobs.
"""
MUTANTS = """\
## Wrong versions on a real server

Crashing fork, MTP (`TestMutants`).
"""
DESIGNS = """\
## Rejected designs in real CUDA graphs

`test/gpu/test_designs_gpu.py`; a figure is the number of sizes or replays that went wrong.
"""
REFRESH = """\
## The refresh

`python benchmark/bench_refresh.py --sglang-kernel FILE --sweep --json OUT.json --plot OUT.svg`,
one run; FILE is SGLang 0.5.22's `sconv_tracking.py`. Medians of 11 rounds, in brackets half the
distance of the quartiles. A round captures its graphs anew: where they lie moves a launch by a
tenth.
"""
PARTS = """\
What the kernel's time is made of, by leaving parts out:
"""
SERVER = """\
## A server

`python benchmark/bench_server.py --contenders exempt --repetitions 3 --json A`, and then with
`--earlier A --contenders checkpoints`, FA4's kernels from its disk cache: medians, in brackets half
the distance of the quartiles. *exempt*: the crashing fork and the method alone. *checkpoints*: the
same with `draft-checkpoint` and `draft-window`. *inert*: with `INKLING_SCONV_DRAFT_EXTEND=inert`,
from an earlier run beside other servers, so launches only. By their names
(`docs/evidence/server-inert.json`), the 90 launches that its draft-extend graph has more are 2
refreshes, 4 checkpoint scatters and 84 of draft tracking's arithmetic.

One server of each, one after the other, three runs of the client each: with one request at once,
{exempt} tokens/s and then {checkpoints}. A step takes 4 ms there, 0.8 ms of it on the GPU, on a
host that is shared.
"""
TURNS = """\
Both servers at once, asked in turns (`--turns 60 --contenders exempt checkpoints`, ended early, a
third server on the GPU): {turns} turns; an answer's time, prefill included, by its verifications.
"""
BENCH_EQUAL = """\
To the bit:
"""
SOAK = """\
## Soak

As published, MTP, pools of 3072 tokens and 48 conv states, 32 clients: shared prefixes,
conversations, aborts, flushes, retraction (`INKLING_SCONV_SOAK_REQUESTS=20000 make gpu-test`).
From an earlier `make gpu-test`, beside its other parts; memory is that of its own server.
"""
RUNS = """\
## Runs

One `make gpu-test`, a soak of 3,000 requests beside the other parts, FA4's kernels from its disk
cache: {seconds:.0f} s from the first start to the last end.
"""


def page() -> Iterator[str]:
    """The whole page, piece by piece."""
    machine = ", ".join(f"{key} {value}" for key, value in load("machine").items())
    yield INTRODUCTION.format(machine=machine, crash=load("mtp-crash")["error"])
    heading = (
        "server",
        "compared",
        "floats that differ",
        "largest difference",
        "cached",
        "outputs",
    )
    yield from table(heading, comparisons())
    yield from table(("server", "", "figure"), facts())
    if verified := load("verify"):
        seen = (f"{c['differing']} of {c['compared']}" for c in verified["comparisons"])
        yield f"`inkling-sconv verify`: passed {verified['passed']}, differing {', '.join(seen)}.\n"
    yield FIXES
    yield from table(("fix", "without", "with"), fixed())
    yield STEPS
    yield from table(("server", "steps that differ", "steps", "first step"), steps())
    if without := load("mtp-without-boundary-fix"):
        yield STATE.format(**without, default=load("mtp-installed")["accept length"])
    if forms := load("mtp-forms"):
        yield FORMS.format(**forms)
    yield MUTANTS
    yield from table(("version", ""), mutants())
    yield DESIGNS
    yield from designs()
    yield REFRESH
    for measure in ("graph", "host"):
        measured = load("refresh")["measures"][measure]
        yield from refresh(f"{measure}, us", measured, median_and_spread)
    yield from targets()
    yield PARTS
    yield from refresh("replayed graph, us", load("refresh")["parts, graph"], median)
    if load("server"):
        rate = "output tokens/s, 1 request at once"
        of = {name: one["figures"][rate] for name, one in load("server")["contenders"].items()}
        yield SERVER.format(
            **{name: ", ".join(f"{value:.0f}" for value in values) for name, values in of.items()}
        )
        yield from table(("", *load("server")["contenders"], "inert"), bench())
        if turns := load("server-turns").get("contenders"):
            counted = [len(v) for one in turns.values() for v in one["figures"].values()]
            yield TURNS.format(turns=min(counted))
            yield from table(("", *turns), in_turns(turns))
        yield BENCH_EQUAL
        yield from table(
            ("", "compared", "differ"),
            (
                (
                    one["name"].replace("faithful", "inert"),
                    str(one["compared"]),
                    str(one["differing"]),
                )
                for record in ("server", "server-inert")
                for one in load(record)["comparisons"]
                if record == "server" or one["name"].startswith("faithful")
            ),
        )
    # A record without these is one of a load that failed.
    if load("soak").get("killed"):
        yield SOAK
        yield from table(("", "figure"), soak())
    yield RUNS.format(seconds=span())
    yield from table(("run", "suite", "tests", "failed", "seconds"), suites())
    yield "## Not run\n"
    yield from (f"- {line}" for line in NOT_RUN)


def take(folder: Path) -> None:
    """Copy the records of ``folder`` and below, without answers and without a machine's names."""
    for path in folder.rglob("*.json"):
        record = json.loads(_PATH.sub("", path.read_text()))
        for contender in record.get("contenders", {}).values():
            contender.pop("answers", None)
        (RECORDS / path.name).write_text(json.dumps(record, indent=1))
    for path in folder.rglob("*.xml"):
        tree = ElementTree.parse(path)
        for element in tree.iter():
            element.attrib.pop("hostname", None)
            if element.tag in ("failure", "error", "system-out", "system-err"):
                element.text = None
            for name, value in element.attrib.items():
                element.set(name, _PATH.sub("", value))
        name = path.parent.name if path.stem == "junit" else path.stem
        tree.write(RECORDS / f"{name}.xml")


# Absolute, or below a hidden folder.
_PATH = re.compile(r"(?<![\w./])[./][\w.-]*/(?:[\w.-]+/)*")


def main() -> None:
    if sys.argv[1:2] == ["--take"]:
        take(Path(sys.argv[2]))
        return
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "evidence.md"
    out.write_text("\n".join(page()).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
