"""Steps to run the kernel on, versions of it with a wrong line in them, and a stand-in for SGLang.

Used by the interpreter's tests in ``test/unit`` and by those that need a GPU, in ``test/gpu``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from formula import INTEGERS
from hypothesis import strategies as st

GARBAGE = -7
"""What lies around the slices that a step hands over, and in a buffer before it is written."""


@dataclass(frozen=True)
class Step:
    """Arguments of ``track_conv_indices``, as Python values. Lengths in tokens."""

    rows: int
    query_start_loc: list[int]
    track_seqlens: list[int]
    prefix_lens: list[int] | None
    chunk_size: int = 64
    window: int = 3
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.int32, torch.int64, torch.int32)
    offset: int = 0
    strides: tuple[int, int, int] = (1, 1, 1)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Every list as a slice, at ``offset`` and ``strides``, of a buffer of garbage."""
        names = ("query_start_loc", "track_seqlens", "prefix_lens")
        lists = (self.query_start_loc, self.track_seqlens, self.prefix_lens)
        tensors = {
            name: None if values is None else self._slice(values, dtype, stride, device)
            for name, values, dtype, stride in zip(
                names, lists, self.dtypes, self.strides, strict=True
            )
        }
        return {
            **tensors,
            "rows": self.rows,
            "chunk_size": self.chunk_size,
            "window": self.window,
        }

    def _slice(
        self, values: list[int], dtype: torch.dtype, stride: int, device: str
    ) -> torch.Tensor:
        buffer = torch.full((self.offset + (len(values) + 32) * stride,), GARBAGE, dtype=dtype)
        place = slice(self.offset, self.offset + len(values) * stride, stride)
        buffer[place] = torch.tensor(values, dtype=dtype)
        return buffer.to(device)[place]


def run(function: Any, step: Step, device: str = "cpu") -> list[list[int]]:
    """The indices, written into the middle of a buffer of garbage, the rest of which must stay."""
    buffer = torch.full((step.rows + 18, step.window), GARBAGE, device=device)
    out = buffer[1 : step.rows + 1]
    assert function(**step.arguments(device), out=out) is out
    around = torch.cat((buffer[:1], buffer[step.rows + 1 :]))
    assert around.eq(GARBAGE).all(), "written outside of out"
    fresh = function(**step.arguments(device))
    assert fresh.dtype == torch.int64 and fresh.is_contiguous() and torch.equal(fresh, out)
    return fresh.tolist()


@st.composite
def steps(draw: st.DrawFn, least: int = 0) -> Step:
    """Anything of the right shape, also lengths that no request has.

    With ``least`` 1, no list is empty: a wrong kernel may read past the end of one, and an empty
    tensor's address is null.
    """
    rows = draw(st.integers(0, 12))
    dtypes = tuple(draw(st.sampled_from(INTEGERS)) for _ in range(3))
    # Lengths without sense end up in the clamp; those of a batch do not.
    batch = draw(st.booleans())

    def lengths(dtype: torch.dtype, fewest: int) -> list[int]:
        limits = torch.iinfo(dtype)
        value = st.integers(0, 2000)
        if not batch:
            value |= st.integers(limits.min, limits.max)
        return draw(st.lists(value, min_size=fewest, max_size=rows + 2))

    starts = lengths(dtypes[0], rows + 1)
    return Step(
        rows,
        list(itertools.accumulate(starts)) if batch else starts,
        lengths(dtypes[1], least),
        lengths(dtypes[2], least) if draw(st.booleans()) else None,
        draw(st.sampled_from((1, 64, 128, 3, 65, 192))),
        draw(st.integers(1, 5)),
        dtypes,
        draw(st.integers(0, 3)),
        tuple(draw(st.sampled_from((1, 1, 1, 2))) for _ in range(3)),
    )


def batch_of(rows: int, chunk_size: int, beyond: int = 0) -> Step:
    """Rows of 300 tokens that end before, on and after a boundary, some before their prefix.

    ``beyond`` is added to what is tracked and to what is cached, which changes no index.
    """
    tracked = [(97 * r) % 700 + beyond for r in range(rows)]
    prefix = [(61 * r) % 400 + beyond for r in range(rows - 1)]
    dtypes = (torch.int32, torch.int64, torch.int64)
    return Step(
        rows, [300 * r for r in range(rows + 1)], tracked, prefix, chunk_size, dtypes=dtypes
    )


BATCHES = tuple(
    batch_of(rows, chunk_size, beyond)
    for rows in (2, 8, 42, 43, 90)
    for chunk_size in (64, 96)
    for beyond in (0, 2**31, 2**62)
)

_serial = itertools.count()


def load(
    folder: Path, *edits: tuple[str, str], interpret: bool, name: str = "kernels.py"
) -> ModuleType:
    """A copy of ``name`` of its own, with ``edits``; each ``old`` stands there exactly once.

    Triton reads the source of a kernel from a file, and decides while it decorates whether to
    interpret it.
    """

    text = Path(windows.__file__).with_name(name).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    path = folder / f"{Path(name).stem}_{next(_serial)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _environment("TRITON_INTERPRET", "1" if interpret else "0"):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def refresh_arguments(step: Step, device: str, *, tracked: bool) -> tuple[Any, Any]:
    """A backend and a batch with what our refresh reads of them, without SGLang.

    ``tracked`` is a live batch; without it, a capture batch: no track fields, no prefix lengths.
    """
    from inkling_sconv.plugin.backend import InklingSconvBackend

    arguments = step.arguments(device)
    backend = SimpleNamespace(
        sconv_metadata=SimpleNamespace(query_start_loc=arguments["query_start_loc"]),
        conv_state_len=step.window,
        mamba_cache_chunk_size=step.chunk_size,
        _graph_track_conv_indices=torch.full((64, step.window), GARBAGE, device=device),
    )
    InklingSconvBackend._alloc_inert_tracking(backend)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND", is_draft_extend_v2=lambda: False),
        batch_size=step.rows,
        mamba_track_mask=None,
        mamba_track_indices=None,
        mamba_track_seqlens=None,
        extend_prefix_lens=None,
    )
    if tracked:
        batch.mamba_track_mask = torch.ones(step.rows, dtype=torch.bool, device=device)
        batch.mamba_track_seqlens = arguments["track_seqlens"]
        batch.extend_prefix_lens = arguments["prefix_lens"]
    return backend, batch
