"""What decode steps did on the GPU, out of a Chrome trace by the torch profiler."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any


class TraceError(RuntimeError):
    """A trace that says nothing about decode steps, in one line that begins with its path."""


@dataclass(frozen=True)
class GraphKind:
    """Launches of one graph, alike in the names of what they run.

    ``operations`` are kernels, copies and fills of one launch; ``microseconds`` the sum of their
    durations and ``elapsed`` from the first one's start to the last one's end, medians both;
    ``per_step`` launches per decode step.
    """

    kind: str
    operations: int
    microseconds: float
    elapsed: float
    per_step: float
    names: dict[str, int]


@dataclass
class Profile:
    """What whole decode steps did on the GPU: lists with an entry per step.

    A step reaches from one target verification to the next. ``unplaced`` operations of the whole
    trace have no launch in it and are in no step.
    """

    marks: str
    unplaced: int = 0
    operations: list[int] = field(default_factory=list)
    microseconds: list[float] = field(default_factory=list)
    parts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    graphs: list[GraphKind] = field(default_factory=list)


VERIFY, DRAFT, OTHER, OUTSIDE = "target verify", "draft-extend", "other graph", "outside graphs"
_OPERATIONS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# In the names of both kernels that end a draft-extend convolution, CUDA's and Triton's.
_DRAFT_KERNEL = "draft_extend"


@dataclass(frozen=True)
class _Event:
    name: str
    start: float
    duration: float


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, ``.json`` or ``.json.gz``.

    Raises:
        TraceError: it is not there, not whole, or not a trace.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        trace = json.loads(content.decode(errors="replace"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path}: the file ends too early, or is damaged") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: not JSON") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise TraceError(f"{path}: no traceEvents in it")
    return [event for event in events if isinstance(event, dict)]


def profile(events: Sequence[dict[str, Any]], batch: int, path: Path) -> Profile:
    """The decode steps of ``batch`` requests in a trace.

    A graph's operations carry the correlation id of its launch, whose place in time says in which
    step it was. Where the trace has no ``step[TARGET_VERIFY bs=N]`` spans, launches of graphs
    without draft-extend's kernels mark the steps, of any batch size.

    Raises:
        TraceError: there is no whole step.
    """
    launched: dict[int, tuple[float, bool]] = {}
    operations: dict[int, list[_Event]] = defaultdict(list)
    spans: list[tuple[float, float, str]] = []
    unplaced = 0
    for event in events:
        category, name = event.get("cat"), event.get("name")
        start, duration = event.get("ts"), event.get("dur", 0)
        if not (isinstance(name, str) and _is_time(start) and _is_time(duration)):
            continue
        arguments = event.get("args")
        correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
        if category in _LAUNCHES and type(correlation) is int:
            launched[correlation] = (start, "GraphLaunch" in name)
        elif category in _OPERATIONS:
            if type(correlation) is int:
                operations[correlation].append(_Event(name, start, duration))
            else:
                unplaced += 1
        elif category == "user_annotation" and name.startswith("step["):
            spans.append((start, start + duration, name))
    if not operations and not unplaced:
        raise TraceError(f"{path}: nothing of the GPU in it")

    kinds: dict[int, str] = {}
    verifications = [span for span in spans if span[2].startswith("step[TARGET_VERIFY ")]
    for correlation, ran in operations.items():
        start, is_graph = launched.get(correlation, (math.nan, False))
        if not is_graph:
            kinds[correlation] = OUTSIDE
        elif any(_DRAFT_KERNEL in operation.name for operation in ran):
            kinds[correlation] = DRAFT
        elif not verifications or any(first <= start < last for first, last, _ in verifications):
            kinds[correlation] = VERIFY
        else:
            kinds[correlation] = OTHER
    if verifications:
        found = Profile("the profiler's spans")
        marks = [(start, name) for start, _, name in spans if "DRAFT_EXTEND" not in name]
        wanted = f"step[TARGET_VERIFY bs={batch}]"
    else:
        found = Profile("graphs without draft-extend's kernels")
        wanted = VERIFY
        marks = [(launched[c][0], VERIFY) for c, kind in kinds.items() if kind == VERIFY]
    marks.sort()
    # The last one's step ends with the profile, maybe too early.
    steps = [number for number, (_, name) in enumerate(marks[:-1]) if name == wanted]
    if not steps:
        raise TraceError(f"{path}: no whole decode step of {batch} requests in it")

    within: dict[int, list[int]] = defaultdict(list)
    times = [start for start, _ in marks]
    for correlation, ran in operations.items():
        if correlation in launched:
            within[bisect_right(times, launched[correlation][0]) - 1].append(correlation)
        else:
            unplaced += len(ran)
    found.unplaced = unplaced
    parts = {
        part: {"operations": [], "microseconds": []} for part in (VERIFY, DRAFT, OTHER, OUTSIDE)
    }
    for step in steps:
        counts, durations = Counter[str](), defaultdict[str, float](float)
        for correlation in within[step]:
            counts[kinds[correlation]] += len(operations[correlation])
            durations[kinds[correlation]] += sum(ran.duration for ran in operations[correlation])
        found.operations.append(sum(counts.values()))
        found.microseconds.append(sum(durations.values()))
        for part, figures in parts.items():
            figures["operations"].append(counts[part])
            figures["microseconds"].append(durations[part])
    found.parts = {part: figures for part, figures in parts.items() if any(figures["operations"])}

    alike: dict[Any, list[int]] = defaultdict(list)
    for correlation in chain.from_iterable(within[step] for step in steps):
        if kinds[correlation] != OUTSIDE:
            names = Counter(ran.name for ran in operations[correlation])
            alike[kinds[correlation], frozenset(names.items())].append(correlation)
    for (kind, names), correlations in alike.items():
        launches = [operations[correlation] for correlation in correlations]
        found.graphs.append(
            GraphKind(
                kind,
                len(launches[0]),
                statistics.median(sum(one.duration for one in ran) for ran in launches),
                statistics.median(
                    max(one.start + one.duration for one in ran) - min(one.start for one in ran)
                    for ran in launches
                ),
                len(launches) / len(steps),
                dict(sorted(names)),
            )
        )
    found.graphs.sort(key=lambda graph: (graph.kind, -graph.operations))
    return found


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
