"""Writes docs/evidence.md from the records of GPU runs in docs/evidence/.

The registered tests leave a JSON file of figures each, and pytest a JUnit file, in
``INKLING_SCONV_LOGS``; what is copied from there into docs/evidence/ is what the page says.

Usage: python docs/write_evidence.py [OUT.md]
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "evidence"

SERVERS = {
    "mtp-plugin": "crashing fork, plugin (`INKLING_SCONV=auto`), MTP",
    "mtp-applied": "crashing fork after `inkling-sconv apply`, plugin off, MTP",
    "prefill-extra-buffer": "as published, full prefill graph, no MTP",
    "prefill-plugin": "crashing fork, plugin, full prefill graph, no MTP",
}
FACTS = {
    "accept length": "accept length (bonus token counted)",
    "distinct tokens in 300": "distinct tokens in 300",
    "captured": "decode sizes captured",
    "kl_test_utils": "SGLang's `kl_test_utils`",
    "kl_multiturn_utils": "SGLang's `kl_multiturn_utils`",
}
NOT_RUN = (
    "`extra_buffer_lazy` with a full prefill graph (`TestExtraBufferLazy`). SGLang refuses it with "
    "MTP.",
    "Every other SGLang than the one above. `TestInstalled` runs on any.",
    "B200, four GPUs, tensor parallelism: the fused all-reduce path reads the same indices.",
    "SGLang's own Inkling suites, which need a checkpoint that is not public.",
)


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
            if isinstance(one, dict) and one["name"] != "tokens per decode step":
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
        if steps := load(name).get("tokens per decode step"):
            yield (
                server,
                "tokens per decode step, after a hit against cold",
                f"{steps['differing']} of {steps['compared']} differ; {steps['detail']}",
            )


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
            yield f"- *{check}* catches none of them: it guards the arithmetic and the addresses."
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
INKLING_SCONV_LOGS=DIR python -m pytest --junitxml=DIR/NAME.xml test/gpu test/registered
cp DIR/*.json DIR/*.xml docs/evidence/ && make evidence
```

## Start-up

With `INKLING_SCONV=off` the crashing fork dies in its draft-extend capture:
`{crash}`.
With the plugin, and after `apply`, it serves, as follows.

## Equality

Logprobs, float by float. *cached*: prefix tokens reused by each request.
"""
PREFILL = """\
With the full prefill graph, {same} with our method and without it: the
cause is outside the refresh. This SGLang's prefill runner leaves stale track rows past the live
batch (`inkling-sconv doctor`: #34184, mended in 0.5.18); that they are what differs here was not
shown. The test skips with its figure where doctor finds such a runner.
"""
SOAK = """\
## Soak

As published, MTP, pools of 3072 tokens and 48 conv states, 32 clients: shared prefixes,
conversations, aborts, flushes, retraction.
"""
STEPS = """\
Tokens per step are recorded, not asserted. Up to 0.5.21 the draft's own conv checkpoints are not
kept under CUDA graphs, so a draft may propose other tokens just after a hit; that this is the whole
difference was not shown. The outputs are the same: the target verifies every token.

## Rejected designs in real CUDA graphs

`test/gpu/test_designs_gpu.py`; a figure is the number of sizes or replays that went wrong.
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
    stock, ours = (load(name).get("prefill-made hit") for name in list(SERVERS)[2:])
    if stock and ours and stock["differing"]:
        yield PREFILL.format(same="the same floats differ" if stock == ours else "floats differ")
    yield from table(("server", "", "figure"), facts())
    yield STEPS
    yield from designs()
    # A record without these is one of a load that failed.
    if load("soak").get("killed"):
        yield SOAK
        yield from table(("", "figure"), soak())
    yield "## Runs\n"
    yield from table(("run", "suite", "tests", "failed", "seconds"), suites())
    yield "## Not run\n"
    yield from (f"- {line}" for line in NOT_RUN)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "evidence.md"
    out.write_text("\n".join(page()).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
