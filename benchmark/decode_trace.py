"""What decode steps did on the GPU, read from a Chrome trace by the torch profiler."""

import gzip
import json
import math
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERIFY, DRAFT, OTHER, OUTSIDE = "target verify", "draft-extend", "other graph", "outside graphs"
PARTS = (VERIFY, DRAFT, OTHER, OUTSIDE)
_OPERATIONS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# In the names of the kernels that end a draft-extend convolution: SGLang's two, and ours.
_DRAFT_KERNELS = ("draft_extend", "draft_conv_state")
_LONGEST_NAME = 80


class TraceError(RuntimeError):
    """A trace that says nothing about decode steps. The message is one line with its path."""


@dataclass
class Profile:
    """What whole decode steps did on the GPU. A step reaches from one verification to the next.

    ``launches`` (kernels, copies and fills) and ``microseconds`` (the sum of their durations) have
    a list per part of a step, with an entry per step. ``kernels`` counts, per part, how often a
    step runs each kernel of that name, as a mean. ``unplaced`` operations have no launch in the
    trace, so they are in no step.
    """

    launches: dict[str, list[int]] = field(default_factory=dict)
    microseconds: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    unplaced: int = 0


@dataclass(frozen=True)
class _Operation:
    name: str
    duration: float


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, ``.json`` or ``.json.gz``.

    Raises:
        TraceError: the file is missing or damaged, or is not a trace.
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


def profile_steps(events: Sequence[dict[str, Any]], batch: int, path: Path) -> Profile:
    """The decode steps of ``batch`` requests in a trace.

    A graph's operations carry the correlation id of its launch. The time of the launch says in
    which step it was; SGLang's ``step[TARGET_VERIFY bs=N]`` spans mark the steps,
    ``step[VERIFY bs=N]`` in newer releases.

    Raises:
        TraceError: there is no whole step.
    """
    launched: dict[int, tuple[float, bool]] = {}
    operations: dict[int, list[_Operation]] = defaultdict(list)
    spans: list[tuple[float, float, str]] = []
    found = Profile()
    for event in events:
        category, name = event.get("cat"), event.get("name")
        start, duration = event.get("ts"), event.get("dur", 0)
        if not (isinstance(name, str) and _is_time(start) and _is_time(duration)):
            continue
        arguments = event.get("args")
        correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
        if category in _LAUNCHES and type(correlation) is int:
            launched[correlation] = (start, "GraphLaunch" in name)
        elif category in _OPERATIONS and type(correlation) is int:
            operations[correlation].append(_Operation(name, duration))
        elif category in _OPERATIONS:
            found.unplaced += 1
        elif category == "user_annotation" and name.startswith("step["):
            spans.append((start, start + duration, name))
    if not operations and not found.unplaced:
        raise TraceError(f"{path}: no GPU operation in it")

    verifications = [span for span in spans if "VERIFY " in span[2]]
    part_of: dict[int, str] = {}
    for correlation, ran in operations.items():
        start, is_graph = launched.get(correlation, (math.nan, False))
        if not is_graph:
            part_of[correlation] = OUTSIDE
        elif any(kernel in operation.name for operation in ran for kernel in _DRAFT_KERNELS):
            part_of[correlation] = DRAFT
        elif any(first <= start < last for first, last, _ in verifications):
            part_of[correlation] = VERIFY
        else:
            part_of[correlation] = OTHER
    wanted = f"VERIFY bs={batch}]"
    marks = [(start, name) for start, _, name in spans if "DRAFT_EXTEND" not in name]
    marks.sort()
    # The last step is left out: the profile may end before it does.
    steps = [number for number, (_, name) in enumerate(marks[:-1]) if name.endswith(wanted)]
    if not steps:
        raise TraceError(f"{path}: no whole decode step of {batch} requests in it")

    within: dict[int, list[int]] = defaultdict(list)
    times = [start for start, _ in marks]
    for correlation, ran in operations.items():
        if correlation in launched:
            within[bisect_right(times, launched[correlation][0]) - 1].append(correlation)
        else:
            found.unplaced += len(ran)
    for part in PARTS:
        ran = [
            [one for c in within[step] if part_of[c] == part for one in operations[c]]
            for step in steps
        ]
        if any(ran):
            names = Counter(
                _shorten(one.name) for step_operations in ran for one in step_operations
            )
            found.launches[part] = [len(one) for one in ran]
            found.microseconds[part] = [sum(one.duration for one in step) for step in ran]
            found.kernels[part] = {name: names[name] / len(steps) for name in sorted(names)}
    return found


def _shorten(name: str) -> str:
    """The name; a checksum in place of the end of a long one keeps different kernels apart."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}~{zlib.crc32(name.encode()):08x}"


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
