"""A Chrome trace as the torch profiler writes it of decode steps, without a GPU."""

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERIFY = ("gemm", "rms_norm", "gemm")
DRAFT = ("gather_scatter_kernel", "void draft_extend_kernel<4>(Params)", "Memset (Device)")
STEP = 1000.0


def trace(
    steps: int,
    *,
    batch: int = 1,
    verify: Sequence[str] = VERIFY,
    draft: Sequence[Sequence[str]] = (DRAFT,),
    between: Sequence[str] = ("sample", "Memcpy DtoH (Device -> Pinned)"),
) -> list[dict[str, Any]]:
    """Events of ``steps`` decode steps, in no order.

    The GPU is three quarters of a step behind, so a step's kernels run in the next one's time. Each
    name in ``verify`` and of one graph in ``draft`` takes 2 us of the GPU, with 1 us after it;
    those in ``between`` are launched one by one.
    """
    events: list[dict[str, Any]] = []
    correlations = itertools.count(1)

    def complete(category: str, name: str, start: float, duration: float, **about: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": about}
        )

    def launch(call: str, names: Sequence[str], start: float) -> None:
        correlation = next(correlations)
        complete("cuda_runtime", call, start, 5, correlation=correlation)
        for place, name in enumerate(names):
            kind = {"Memc": "gpu_memcpy", "Mems": "gpu_memset"}.get(name[:4], "kernel")
            complete(kind, name, start + 0.75 * STEP + 3 * place, 2.0, correlation=correlation)

    for step in range(steps):
        start = step * STEP
        complete("user_annotation", f"step[TARGET_VERIFY bs={batch}]", start, 100)
        complete("user_annotation", f"step[DRAFT_EXTEND_V2 bs={batch}]", start + 300, 100)
        launch("cudaGraphLaunch", verify, start + 50)
        for place, name in enumerate(between):
            launch("cudaLaunchKernel", [name], start + 150 + 10 * place)
        for place, names in enumerate(draft):
            launch("cudaGraphLaunch", names, start + 350 + 10 * place)
    random.Random(0).shuffle(events)
    return [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, *events]


def write(path: Path, events: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events]}).encode()))
