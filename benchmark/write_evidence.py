"""Writes docs/evidence.md from the records of GPU runs in docs/evidence/, a folder per release.

Tests and benchmarks leave JSON files of figures, and pytest its JUnit files, in
``INKLING_SCONV_LOGS``. ``--take`` copies them into the folder of the release that ``machine.json``
names. Every figure on the page is read from a record.

    python benchmark/write_evidence.py [OUT.md]
    python benchmark/write_evidence.py --take DIR    # every .json and .xml in DIR and below
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench_hits import ANSWERS
from summary import format_summary

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDS = DOCS / "evidence"

SERVERS = {
    "mtp-plugin": "crashing fork, plugin, MTP",
    "mtp-applied": "crashing fork after `apply`, plugin off, MTP",
    "mtp-installed": "as published, plugin, MTP",
    "mtp-plugin-eight-heads": "crashing fork, plugin, 8 MTP heads",
    "mtp-eight-heads": "as published, plugin, 8 MTP heads",
    "mtp-lazy": "as published, plugin, MTP, `extra_buffer_lazy`",
    "mtp-fast": "as published, `INKLING_SCONV=fast`, MTP, no prefill graph",
    "prefill-extra-buffer": "as published, plugin, full prefill graph",
    "prefill-extra-buffer-lazy": "the same, `extra_buffer_lazy`",
    "prefill-ngram": "the same, NGRAM",
    "prefill-plugin": "crashing fork, plugin, full prefill graph",
    "prefill-without-fixes": "as published, no fix, full prefill graph",
    "prefill-ngram-without-fixes": "the same, NGRAM",
}
STEPS_OF = {
    "mtp-without-fixes": "as published, no fix",
    "mtp-applied": "crashing fork after `apply`, plugin off",
    "mtp-without-draft-window": "as published, `draft-checkpoint` alone, as in SGLang 0.5.22",
    "mtp-zeroed-draft-state": "as published, both fixes, the checkpoint zeroed",
    "mtp-installed": "as published, plugin",
    "mtp-lazy": "as published, plugin, `extra_buffer_lazy`",
    "mtp-eight-heads": "as published, plugin, 8 heads",
    "mtp-plugin": "crashing fork, plugin",
    "mtp-plugin-eight-heads": "crashing fork, plugin, 8 heads",
    "mtp-fast": "as published, `INKLING_SCONV=fast`, both fixes",
}
FIXED = {
    "`prefill-rows`": ("prefill-without-fixes", "prefill-extra-buffer"),
    "`prefill-tracking`, with `prefill-rows`": ("prefill-ngram-without-fixes", "prefill-ngram"),
}
FACTS = {
    "accept length": "accept length, the bonus token counted",
    "distinct tokens in 300": "distinct tokens in 300",
    "captured": "decode sizes captured",
    "prefill graph": "prefill graph",
    "kl_test_utils": "SGLang's `kl_test_utils`",
    "kl_multiturn_utils": "SGLang's `kl_multiturn_utils`",
}
STEPS, FIRST_STEP = "tokens per decode step", "tokens of the first decode step"


def list_releases() -> list[str]:
    """The releases that have records, the newest first."""
    names = {path.parent.name for path in RECORDS.glob("*/*.json")}
    # A tree that is no release, such as a commit, comes last.
    return sorted(
        names,
        key=lambda name: [int(n) for n in re.findall(r"^\d+(?=\.)|(?<=\.)\d+", name)],
        reverse=True,
    )


def load(release: str, name: str) -> dict[str, Any]:
    """One record; empty where that test was not run."""
    path = RECORDS / release / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def make_table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table; nothing where it would have no rows."""
    rows = [*rows]
    if rows:
        heading = [*heading]
        yield "| " + " | ".join(heading) + " |"
        yield "|" + "---|" * len(heading)
        yield from ("| " + " | ".join(row) + " |" for row in rows)
        yield ""


def make_release_table(
    what: Iterable[str], rows: Iterable[tuple[tuple[str, ...], Callable[[str], str]]]
) -> Iterator[str]:
    """A table with a column per release. A row without a figure in any of them is left out."""
    releases = list_releases()
    made = [(*labels, *(cell(release) for release in releases)) for labels, cell in rows]
    first = len([*what])
    kept = (row for row in made if any(cell != "-" for cell in row[first:]))
    yield from make_table((*what, *(f"SGLang {release}" for release in releases)), kept)


def format_differing(comparison: dict[str, Any] | None) -> str:
    """``D of N``; bold, with the largest difference, where something differs."""
    if not comparison:
        return "-"
    figure = f"{comparison['differing']} of {comparison['compared']}"
    if comparison["differing"] == 0:
        return figure
    return f"**{figure}**, {comparison['largest']:.3g}"


def list_comparisons() -> Iterator[tuple[tuple[str, ...], Callable[[str], str]]]:
    """Every comparison of logprobs, server by server."""
    for record, server in SERVERS.items():
        kinds = dict.fromkeys(
            key
            for release in list_releases()
            for key, value in load(release, record).items()
            if isinstance(value, dict) and key not in (STEPS, FIRST_STEP)
        )
        for kind in kinds:
            yield (
                (server, kind),
                lambda release, r=record, k=kind: format_differing(load(release, r).get(k)),
            )


def list_facts() -> Iterator[tuple[tuple[str, ...], Callable[[str], str]]]:
    """What else each server showed."""

    def show(release: str, record: str, key: str) -> str:
        value = load(release, record).get(key, "-")
        return f"{value:.2f}" if isinstance(value, float) else str(value).strip("[]'")

    for record, server in SERVERS.items():
        for key, label in FACTS.items():
            yield (server, label), lambda release, r=record, k=key: show(release, r, k)


def list_steps() -> Iterator[tuple[tuple[str, ...], Callable[[str], str]]]:
    """Decode steps after a hit against cold, by what is kept of the draft's state."""

    def show(release: str, record: str) -> str:
        found = load(release, record)
        if not (STEPS in found and FIRST_STEP in found):
            return "-"
        whole, first = found[STEPS], found[FIRST_STEP]
        return f"{whole['differing']} of {whole['compared']}; {first['detail']}"

    for record, server in STEPS_OF.items():
        yield (server,), lambda release, r=record: show(release, r)


def list_fixed() -> Iterator[tuple[tuple[str, ...], Callable[[str], str]]]:
    """A fix by the floats that differ without it and with it."""

    def show(release: str, names: tuple[str, str]) -> str:
        without, fixed = (load(release, name).get("prefill-made hit") for name in names)
        if not (without and fixed):
            return "-"
        counts = (f"{one['differing']} of {one['compared']}" for one in (without, fixed))
        return ", then ".join(counts)

    for fix, names in FIXED.items():
        yield (fix,), lambda release, n=names: show(release, n)


def list_decode_steps(release: str, record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Launches and GPU time of a decode step, contender by contender."""
    for batch in ("1", "8"):
        for name, one in record["contenders"].items():
            figures = one["batches"].get(batch)
            if figures:
                launches, us = figures["launches"], figures["us"]
                parts = [f"{launches[p]['median']:.0f}" for p in launches if p != "step"]
                whole = f"{launches['step']['median']:.0f} ({', '.join(parts)})"
                yield release, name, batch, whole, format_summary(us["step"], 1)


def list_kernel_changes(release: str, record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The launches that each contender adds to the first one's and removes, at one request."""
    changed: dict[tuple[str, str], dict[str, float]] = {}
    for name, batch, part, kernel, more in record["kernel changes"]:
        if batch == 1:
            short = kernel.removeprefix("void ").partition("<")[0]
            of = changed.setdefault((name, part), {})
            of[short] = of.get(short, 0.0) + more
    for (name, part), of in changed.items():
        kernels = (f"{more:+.0f} `{kernel}`" for kernel, more in of.items() if more)
        yield release, name, part, f"{sum(of.values()):+.0f}", ", ".join(kernels)


def list_hits(measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Decode steps of all prompts, and milliseconds, by how far past the checkpoint they end."""
    columns = [one["figures"][kind] for one in measured.values() for kind in one["figures"]]
    for distance in columns[0]:
        for place, length in enumerate(ANSWERS):
            cells = (
                f"{of[distance]['steps'][place]}; {of[distance]['ms'][place]['median']:.0f}"
                for of in columns
            )
            yield distance, str(length), *cells


def list_designs(release: str) -> Iterator[str]:
    """Design by check, from the records of test/gpu/test_designs_gpu.py."""
    records = {
        path.stem.removeprefix("design-").replace("-", " "): json.loads(path.read_text())
        for path in sorted((RECORDS / release).glob("design-*.json"))
    }
    checks = list(next(iter(records.values()), ()))
    rows = (
        (name, *(f"**red**: {seen[check]}" if seen[check] else "green" for check in checks))
        for name, seen in records.items()
    )
    yield from make_table(("design", *checks), rows)


def list_mutants(release: str) -> Iterator[tuple[str, str]]:
    """What a real server shows of wrong versions."""
    for name, seen in load(release, "mtp-mutants").items():
        figure = seen if isinstance(seen, str) else f"{format_differing(seen)}, {seen['detail']}"
        yield name, f"**red**: {figure}"


def list_refresh(title: str, measured: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One measure of benchmark/bench_refresh.py: contenders by rows."""
    rows = (
        (name, *(format_summary(of[name]) for of in measured.values()))
        for name in next(iter(measured.values()))
    )
    yield from make_table((title, *(f"{count} rows" for count in measured)), rows)


def list_soak(seen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a load left behind, from the record of test_inkling_soak.py."""
    ends, rescored, killed = seen["ends"], seen["rescored"], seen["killed"]
    yield "requests", f"{seen['requests']} in {seen['seconds']:.0f} s"
    yield "aborted by their client, streams left", f"{ends['aborted']}, {ends['closed']}"
    yield "retracted", str(seen["retracted"])
    yield "most running, most in the queue", f"{seen['most running']}, {seen['most queued']}"
    yield (
        "rescored by a cold prefill: floats that differ",
        f"{format_differing(rescored)} ({rescored['detail']})",
    )
    for pool, before in seen["start"]["pools"].items():
        after = seen["end"]["pools"][pool]
        yield f"free {pool} slots, before and after", f"{before['available']}, {after['available']}"
    for key, label in (("gpu", "GPU"), ("resident", "resident")):
        first, last = (f"{seen[key][n] / 2**20:.0f}" for n in (len(seen[key]) // 10, -1))
        yield f"{label} memory, MiB, after a tenth and at the end", f"{first}, {last}"
    error = f"{killed['cut off']} requests got an error within {killed['seconds']:.1f} s"
    yield "`kill -9` of the scheduler", error
    if again := seen.get("restarted"):
        yield "after a restart", f"{again['the same']} of {again['answers']} answers the same"


def list_runs() -> Iterator[tuple[str, ...]]:
    """Tests, failures, skips and seconds per class."""
    for release in list_releases():
        for name, run in load(release, "runs").items():
            failed = f"**{len(run['failed'])}**: {', '.join(run['failed'])}"
            shown = failed if run["failed"] else "0"
            yield release, name, str(run["tests"]), shown, str(run["skipped"]), str(run["seconds"])


HEAD = """\
# Evidence

<!-- Generated by benchmark/write_evidence.py from docs/evidence/: do not edit. -->

Every figure here was measured on one GPU. Servers run the tiny checkpoint of `inkling-sconv
tiny` with deterministic inference, and at most 8 requests at once. The crashing fork is the
installed SGLang with the inert fill of [#34043] and without the guard of [#35042]; the tests make
it. To renew a release's records:

```
INKLING_SCONV_LOGS=DIR make gpu-test
python benchmark/write_evidence.py --take DIR && make evidence
```
"""
START_UP = """\
## Start-up

How the crashing fork ends with `INKLING_SCONV=off`. With the plugin, and after `apply`, it serves.
"""
EQUALITY = """\
## Equality

Logprobs that differ, of all that were compared, float by float; where some differ, also the
largest difference. *decode against a cold prefill*: generated tokens, scored again on an empty
cache. *hit*: a suffix scored on a cached prefix, against an empty cache. *branches*: several
suffixes on one prefix.
"""
FIXES = """\
## Fixes

Floats that differ on a prefix hit that prefill graphs made: without the fix, then with it
(`TestWithoutFixes`, `TestExtraBuffer`, `TestNgramWithoutFixes`, `TestNgram`).
"""
STEPS_TEXT = """\
## The draft after a hit

Decode steps that differ after a hit on a decode-made prefix, against the same requests cold. The
target verifies every token, so the outputs are the same; what differs is how many tokens a step
gives. Then the mean of the first step over 24 prompts that end one token past a checkpoint. There
the draft's windows are those of the checkpoint: it is the worst case. *Both fixes*:
`draft-checkpoint` and `draft-window`.
"""
DECODE_STEP = """\
## A decode step

`python benchmark/bench_decode_step.py`: launches of one decode step with MTP (in brackets: verify
graph, draft-extend graph, outside graphs), and GPU microseconds, as medians with half the
distance of the quartiles in brackets. *exempt*: the crashing fork with our method alone. *inert*:
the same with `INKLING_SCONV_DRAFT_EXTEND=inert`.
"""
CHANGES = """\
Launches that each contender adds to those of the first one with as many heads (+) and removes (-),
at one request:
"""
HITS = """\
## Answers after a hit

`python benchmark/bench_hits.py {names} --heads {heads}`, SGLang {release}: {prompts} prompts that
end 1 to 64 tokens past a checkpoint at 128 tokens. *cold*: on an empty cache. *decode*: the
checkpoint is from decoding, as in the next turn of a chat. *prefill*: it is from a prefill, as with
a shared system prompt. Decode steps of all prompts until an answer has 8, 32 and 128 tokens; then
the median of milliseconds from the request to that token, one request at a time. The tiny server is
bound by its host, so steps say more than milliseconds. {differing} answers differ.
"""
REFRESH = """\
## The refresh

`python benchmark/bench_refresh.py --json OUT.json --plot OUT.svg`, one run, SGLang {release}.
*SGLang's kernel* is the release's own; before 0.5.22 it is that of 0.5.22 (`--sglang-kernel`).
Medians, in brackets half the distance of the quartiles. A round captures its graphs anew: where
they lie moves a launch by a tenth.
"""
SOAK = """\
## Soak

SGLang {release} as published, MTP, pools of 3072 tokens and 48 conv states, 32 clients: shared
prefixes, conversations, aborts, flushes, retraction (`make gpu-test`,
`INKLING_SCONV_SOAK_REQUESTS`).
"""


def make_page() -> Iterator[str]:
    """The whole page, piece by piece."""
    yield HEAD
    keys = ("sglang", "torch", "triton", "CUDA", "Python", "GPU")
    machines = (
        [load(release, "machine").get(key, "-") for key in keys] for release in list_releases()
    )
    yield from make_table(keys, machines)
    for release in list_releases():
        if note := load(release, "machine").get("note"):
            yield f"{release}: {note}\n"
    yield START_UP
    crash = (("its last exception",), lambda release: load(release, "mtp-crash").get("error", "-"))
    yield from make_release_table(("",), [crash])
    yield EQUALITY
    yield from make_release_table(("server", "compared"), list_comparisons())
    yield from make_release_table(("server", "figure"), list_facts())
    for release in list_releases():
        if verified := load(release, "verify"):
            seen = (f"{c['differing']} of {c['compared']}" for c in verified["comparisons"])
            state = "passed" if verified["passed"] else "failed"
            how = ""
            if "seconds" in verified:
                how = (
                    f" {verified['heads']} MTP heads; prefill graph: {verified['prefill_graph']}; "
                    f"{verified['seconds']:.0f} s, {verified['start_seconds']:.0f} s of them to "
                    "start the server."
                )
            yield (
                f"`inkling-sconv verify` on {release}: {state}, {', '.join(seen)} differ.{how}\n"
            )
    yield FIXES
    yield from make_release_table(("fix",), list_fixed())
    yield STEPS_TEXT
    yield from make_release_table(("server",), list_steps())
    for release in list_releases():
        if without := load(release, "mtp-without-boundary-fix"):
            yield (
                "Without SGLang's boundary fix (`SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX=0`) every step "
                f"reads the conv state. Accept length on {release}: no fix {without['none']:.2f}, "
                f"`draft-state` {without['draft-state']:.2f}, crashing fork with the plugin "
                f"{without['fork']:.2f}.\n"
            )
        if forms := load(release, "mtp-forms"):
            steps, logprobs = map(format_differing, (forms["steps"], forms["logprobs"]))
            yield (
                f"Draft-extend left alone against inert, two servers of the crashing fork on "
                f"{release} (`TestDraftExtendForms`): {forms['rows_differing']} of {forms['rows']} "
                f"rows of all conv pools differ, slot 0 aside, {steps} decode steps, {logprobs} "
                "logprobs.\n"
            )
    steps = {release: load(release, "decode-step") for release in list_releases()}
    if any(steps.values()):
        yield DECODE_STEP
        rows = [
            row for release, one in steps.items() if one for row in list_decode_steps(release, one)
        ]
        yield from make_table(("SGLang", "contender", "requests", "launches", "GPU us"), rows)
        yield CHANGES
        rows = [
            row
            for release, one in steps.items()
            if one
            for row in list_kernel_changes(release, one)
        ]
        yield from make_table(("SGLang", "contender", "part", "launches", "kernels"), rows)
        for release, one in steps.items():
            if one:
                compared = sum(c["compared"] for c in one["comparisons"])
                differing = sum(c["differing"] for c in one["comparisons"])
                yield f"{release}: {differing} of {compared} tokens, steps and logprobs differ.\n"
    for release in list_releases():
        if hits := load(release, "hits"):
            labels = [name.rpartition(", ")[::2] for name in hits["contenders"]]
            names, heads = (" ".join(dict.fromkeys(column)) for column in zip(*labels, strict=True))
            heads = heads.replace("heads", "").replace("  ", " ").strip()
            counts = {key: hits[key] for key in ("prompts", "differing")}
            yield HITS.format(release=release, names=names, heads=heads, **counts)
            for count in heads.split():
                of_heads = {
                    name.rpartition(", ")[0]: one
                    for name, one in hits["contenders"].items()
                    if name.endswith(f", {count} heads") and one["figures"]
                }
                if not of_heads:
                    continue
                columns = [
                    f"{name}, {kind}" for name, one in of_heads.items() for kind in one["figures"]
                ]
                columns = [column.replace("stock, cold", "cold") for column in columns]
                yield f"{count} heads:\n"
                yield from make_table(("tokens past it", "answer", *columns), list_hits(of_heads))
    for release in list_releases():
        if mutants := [*list_mutants(release)]:
            yield f"## Wrong versions on {release}\n"
            yield "On a real server of the crashing fork (`TestMutants`):\n"
            yield from make_table(("version", ""), mutants)
            yield "In real CUDA graphs (`test/gpu/test_designs_gpu.py`); a figure counts faults:\n"
            yield from list_designs(release)
        if refresh := load(release, "refresh"):
            yield REFRESH.format(release=release)
            for measure in ("graph", "host"):
                yield from list_refresh(f"{measure}, us", refresh["measures"][measure])
            yield "What 200 new batch sizes compile:\n"
            first = refresh["first"].items()
            rows = ((n, str(one["compilations"]), f"{one['seconds']:.1f}") for n, one in first)
            yield from make_table(("", "compilations", "seconds"), rows)
        # A record without `killed` is one of a load that failed.
        if (soak := load(release, "soak")).get("killed"):
            yield SOAK.format(release=release)
            yield from make_table(("", "figure"), list_soak(soak))
    yield "## Runs\n"
    yield from make_table(("SGLang", "class", "tests", "failed", "skipped", "seconds"), list_runs())
    yield (
        "Not measured: other GPUs than those above, several GPUs, releases without a column,\n"
        "contenders without a row. SGLang's own Inkling suites have no record yet.\n"
    )
    yield "[#34043]: https://github.com/sgl-project/sglang/pull/34043"
    yield "[#35042]: https://github.com/sgl-project/sglang/pull/35042"


# Absolute, or below a hidden folder: a path of the machine that ran the tests.
_PATH = re.compile(r"(?<![\w./])[./][\w.-]*/(?:[\w.-]+/)*")


def take_records(folder: Path) -> Path:
    """Copy the records of ``folder`` and below, compact and without a machine's paths.

    Returns the folder of the release that they are of. JUnit files become ``runs.json``.
    """
    files = {path.stem: path for path in sorted(folder.rglob("*.json"))}
    machine = json.loads(files["machine"].read_text())
    out = RECORDS / machine.get("tree", machine["sglang"])
    out.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        record = json.loads(_PATH.sub("", path.read_text()))
        (out / f"{name}.json").write_text(json.dumps(record) + "\n")
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            name = case.get("classname", "").split(".")[-1]
            run = runs.setdefault(name, {"tests": 0, "failed": [], "skipped": 0, "seconds": 0.0})
            run["tests"] += 1
            run["skipped"] += case.find("skipped") is not None
            run["seconds"] = round(run["seconds"] + float(case.get("time", 0)), 1)
            if case.find("failure") is not None or case.find("error") is not None:
                run["failed"].append(case.get("name", ""))
    if runs:
        (out / "runs.json").write_text(json.dumps(runs) + "\n")
    return out


def main() -> None:
    """Take records, or write the page."""
    if sys.argv[1:2] == ["--take"]:
        print(take_records(Path(sys.argv[2])))
        return
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "evidence.md"
    out.write_text("\n".join(make_page()).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
