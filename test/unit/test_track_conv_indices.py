"""The refresh: formula, reference and kernel, on the CPU (interpreted) and on a GPU; its cost."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kernel_tools
import pytest
import torch
from formula import INTEGERS, Case, expected, live_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_sconv.ops import track_conv_indices
from inkling_sconv.plugin.backend import InklingSconvBackend

pytest.importorskip("triton")

KERNEL = "_track_conv_indices_kernel"
TENSORS = ("query_start_loc", "track_seqlens", "prefix_lens")
GARBAGE = -7
"""What lies around the slices that a step hands over, and in a buffer before it is written."""


@dataclass(frozen=True)
class Step(Case):
    """Arguments of ``track_conv_indices``: every list is a slice of a buffer of garbage."""

    starts_dtype: torch.dtype = torch.int32
    offset: int = 0
    strides: tuple[int, int, int] = (1, 1, 1)

    def arguments(self, device: str) -> dict[str, Any]:
        """Keyword arguments, but for ``out``."""
        rest = {name: getattr(self, name) for name in ("rows", "chunk_size", "window")}
        for name, dtype, stride in zip(
            TENSORS, (self.starts_dtype, *self.dtypes), self.strides, strict=True
        ):
            values = getattr(self, name)
            if values is None:
                rest[name] = None
                continue
            buffer = torch.full((self.offset + (len(values) + 32) * stride,), GARBAGE, dtype=dtype)
            place = slice(self.offset, self.offset + len(values) * stride, stride)
            buffer[place] = torch.tensor(values, dtype=dtype)
            rest[name] = buffer.to(device)[place]
        return rest


LIVE = Step(3, [0, 64, 128, 192], [64, 64], [0, 0])


def make_batch(rows: int, beyond: int = 0, *, prefix: bool = True, **changes: Any) -> Step:
    """Rows of 300 tokens that end before, on and after a boundary; one row in four is padded.

    ``beyond`` is added to what is tracked and to what is cached, which changes no index.
    """
    tracked = [(97 * r) % 700 + beyond for r in range(rows)]
    cached = [(61 * r) % 400 + beyond for r in range(rows - rows // 4)]
    starts = [300 * r for r in range(rows + 1)]
    step = Step(rows, starts, tracked, cached if prefix else None, dtypes=(torch.int64,) * 2)
    return replace(step, **changes)


BATCHES = tuple(
    make_batch(rows, beyond, chunk_size=chunk_size)
    for rows in (2, 8, 42, 43, 90)
    for chunk_size in (64, 96)
    for beyond in (0, 2**31, 2**62)
)


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
        dtypes[1:],
        dtypes[0],
        draw(st.integers(0, 3)),
        tuple(draw(st.sampled_from((1, 1, 1, 2))) for _ in range(3)),
    )


def run(function: Callable[..., torch.Tensor], step: Step, device: str) -> list[list[int]]:
    """The indices, written into the middle of a buffer of garbage, the rest of which must stay."""
    buffer = torch.full((step.rows + 18, step.window), GARBAGE, device=device)
    out = buffer[1 : step.rows + 1]
    assert function(**step.arguments(device), out=out) is out
    around = torch.cat((buffer[:1], buffer[step.rows + 1 :]))
    assert around.eq(GARBAGE).all(), "written outside of out"
    fresh = function(**step.arguments(device))
    assert fresh.dtype == torch.int64 and fresh.is_contiguous() and torch.equal(fresh, out)
    return fresh.tolist()


def assert_right(ops: ModuleType, step: Step, device: str) -> None:
    """Formula, reference and kernel agree."""
    want = expected(step)
    assert run(ops.track_conv_indices_ref, step, device) == want
    assert run(ops.track_conv_indices, step, device) == want


@pytest.fixture(scope="module")
def ops(device: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("ops")
    module = kernel_tools.load_copy(track_conv_indices, folder, interpret=device == "cpu")
    assert module._INTERPRETED is (device == "cpu")
    return module


# -------------------------------------------------------------------------------------- results


def test_batches(ops, device):
    for batch in BATCHES:
        assert_right(ops, batch, device)


def test_any_lengths(ops, device):
    @settings(kernel_tools.CAREFUL, max_examples=300 if device == "cpu" else 1000)
    @given(steps() | live_batches(max_rows=40).map(lambda case: Step(**vars(case))))
    def is_right(step: Step) -> None:
        if device == "cuda":
            # Every window and chunk size is a compilation of its own.
            step = replace(step, window=3, chunk_size=64 if step.chunk_size % 2 else 192)
        assert_right(ops, step, device)

    is_right()


@pytest.mark.parametrize("device", kernel_tools.DEVICES[1:], indirect=True)
@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("dtypes", list(itertools.product(INTEGERS, repeat=3)))
def test_every_combination_of_dtypes_compiled(ops, device, dtypes, prefix):
    shapes = itertools.product((1, 2, 7, 8, 9, 32, 160, 512, 4096), (1, 3, 4), (64, 96))
    for rows, window, chunk_size in shapes:
        step = make_batch(rows, prefix=prefix, window=window, chunk_size=chunk_size)
        assert_right(ops, replace(step, starts_dtype=dtypes[0], dtypes=dtypes[1:]), device)


@pytest.mark.parametrize("prefix_lens", (None, [0, 0, 0]))
@pytest.mark.parametrize("live", (0, 2, 3))
def test_the_padded_tail_is_zero(ops, device, live, prefix_lens):
    step = Step(3, [0, 64, 128, 192], [64, 64, 64][:live], prefix_lens)
    windows = [[61, 62, 63], [125, 126, 127], [189, 190, 191]]
    assert_right(ops, step, device)
    assert run(ops.track_conv_indices, step, device) == windows[:live] + [[0] * 3] * (3 - live)


@pytest.mark.parametrize("rows", (0, 1, 9))
@pytest.mark.parametrize("prefix", (False, True))
def test_a_step_with_no_tokens_gives_index_zero(ops, device, rows, prefix):
    step = Step(rows, [0] * (rows + 1), [640] * rows, [64] * rows if prefix else None)
    assert_right(ops, step, device)
    assert run(ops.track_conv_indices, step, device) == [[0] * 3] * rows


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("chunk_size", (1, 64, 96))
def test_lengths_at_the_ends_of_a_dtype_wrap_in_64_bits(ops, device, dtype, chunk_size):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    assert_right(
        ops,
        Step(2, [0, 64, 128], [most, least], [least, most], chunk_size, 3, (dtype,) * 2),
        device,
    )


def test_a_query_start_loc_longer_than_the_step(ops, device):
    step = Step(3, [0, 64, 128, 192, 256], [64, 64, 192], None)
    assert_right(ops, step, device)
    assert expected(step)[2] == [255, 255, 255]


@pytest.mark.parametrize(
    ("shape", "dtype"), (((3, 3), torch.int32), ((2, 3), torch.int64), ((3, 4), torch.int64))
)
def test_an_out_that_the_store_does_not_fit_is_refused(ops, device, shape, dtype):
    out = torch.zeros(shape, dtype=dtype, device=device)[:, :3]
    with pytest.raises(AssertionError):
        ops.track_conv_indices(**LIVE.arguments(device), out=out)


@kernel_tools.NO_GPU
@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("rows", (1, 8, 33))
def test_a_replay_reads_what_is_there_then(rows, prefix):
    first = make_batch(rows, prefix=prefix)
    arguments = first.arguments("cuda")
    out = torch.full((rows, 3), GARBAGE, device="cuda")
    track_conv_indices.track_conv_indices(**arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        track_conv_indices.track_conv_indices(**arguments, out=out)
    for longer in (1, 2, 0):
        step = replace(
            first,
            query_start_loc=[start * longer for start in first.query_start_loc],
            track_seqlens=[length + 64 * longer for length in first.track_seqlens],
            prefix_lens=first.prefix_lens and [max(p - 64, 0) for p in first.prefix_lens],
        )
        for name in TENSORS:
            if arguments[name] is not None:
                arguments[name].copy_(torch.tensor(getattr(step, name)))
        out.fill_(GARBAGE)
        graph.replay()
        assert out.tolist() == expected(step)


# -------------------------------------------------------------------------------- wrong kernels

WRONG_KERNELS = {
    "tail not zeroed": ("is_live = row < live", "is_live = row < rows"),
    "no lower clamp": ("tl.maximum(index, 0)", "index"),
    "no upper clamp": ("tl.minimum(tl.maximum(index, 0), tl.maximum(tokens - 1, 0))", "index"),
    "no tokens gives -1": ("tl.maximum(tokens - 1, 0)", "tokens - 1"),
    "last live entry taken for the last": ("(query_start_loc + rows)", "(query_start_loc + live)"),
    "truncating division": ("tracked & -CHUNK", "tracked // CHUNK * CHUNK"),
    "truncating division, odd chunks": ("tl.where(rest < 0, rest + CHUNK, rest)", "rest"),
    "every chunk a power of two": ("if CHUNK & (CHUNK - 1) == 0:", "if CHUNK > 0:"),
    "no chunk alignment": ("index = start + aligned", "index = start + tracked"),
    "lengths in 32 bits": (
        "tl.load(track_seqlens + row, mask=is_live, other=0).to(tl.int64)",
        "tl.load(track_seqlens + row, mask=is_live, other=0).to(tl.int32)",
    ),
    "prefix ignored": ("tracked -= tl.load(", "tracked -= 0 * tl.load("),
    "window one row late": ("(column - WINDOW)", "(column - WINDOW + 1)"),
    "rows past the last are written": ("mask=row < rows", "mask=row < rows + 1"),
    "one program only": ("-(-rows * window // _BLOCK),", "1,"),
    "rows and columns swapped": ("column = offset % WINDOW", "column = offset // WINDOW"),
    "live ignores prefix lengths": ("live = min(live, prefix_lens.numel())", "pass"),
    "live ignores track seqlens": ("live = min(rows, track_seqlens.numel())", "live = rows"),
    "strides not checked": ("        and track_seqlens.is_contiguous()\n", ""),
    "longer query_start_loc not checked": ("        and query_start_loc.numel() == rows + 1\n", ""),
}


def test_wrong_kernels_are_caught(tmp_path):
    def check(ops: ModuleType) -> None:
        @kernel_tools.QUICK
        @given(steps(least=1))
        def is_right(step: Step) -> None:
            assert_right(ops, step, "cpu")

        for batch in BATCHES:
            assert_right(ops, batch, "cpu")
        is_right()

    assert kernel_tools.find_survivors(track_conv_indices, tmp_path, WRONG_KERNELS, check) == []


# ----------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("rows", (0, 1, 8, 512))
@pytest.mark.parametrize("prefix", (False, True))
def test_one_launch_and_nothing_else(ops, device, rows, prefix):
    arguments = make_batch(rows, prefix=prefix).arguments(device)
    out = torch.empty(rows, 3, dtype=torch.int64, device=device)
    allocation = ["aten.empty.memory_format"] if device == "cpu" else []
    launch = [KERNEL] * (rows > 0)
    for to, want in ((out, launch), (None, [*allocation, *launch])):
        call = partial(ops.track_conv_indices, **arguments, out=to)
        assert kernel_tools.list_work(ops, KERNEL, call, device) == want


@pytest.mark.parametrize("tracked", (False, True))
@pytest.mark.parametrize("on_graph_path", (False, True))
def test_the_whole_refresh_is_one_launch(ops, device, monkeypatch, tracked, on_graph_path):
    """``tracked`` is a live batch; without it, a capture batch: no track fields, no prefix."""
    monkeypatch.setattr("inkling_sconv.plugin.backend.track_conv_indices", ops.track_conv_indices)
    arguments = LIVE.arguments(device)
    backend = SimpleNamespace(
        sconv_metadata=SimpleNamespace(query_start_loc=arguments["query_start_loc"]),
        conv_state_len=LIVE.window,
        mamba_cache_chunk_size=LIVE.chunk_size,
        _graph_track_conv_indices=torch.full((64, LIVE.window), GARBAGE, device=device),
    )
    InklingSconvBackend._alloc_inert_tracking(backend)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND", is_draft_extend_v2=lambda: False),
        batch_size=LIVE.rows,
        mamba_track_mask=torch.ones(3, dtype=torch.bool, device=device) if tracked else None,
        mamba_track_indices=None,
        mamba_track_seqlens=arguments["track_seqlens"] if tracked else None,
        extend_prefix_lens=arguments["prefix_lens"] if tracked else None,
    )

    def refresh() -> None:
        InklingSconvBackend._refresh_track_conv_indices(backend, batch, on_graph_path)

    work = kernel_tools.list_work(ops, KERNEL, refresh, device)
    assert work.count(KERNEL) == (tracked or on_graph_path)
    allocates = device == "cpu" and tracked and not on_graph_path
    assert [name for name in work if name != KERNEL] == ["aten.empty.memory_format"] * allocates
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            refresh()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("where", ("cpu", "meta"))
def test_tensors_that_are_not_on_a_gpu_take_the_reference(where):
    arguments, results = LIVE.arguments(where), []

    def call() -> None:
        results.append(track_conv_indices.track_conv_indices(**arguments))

    assert KERNEL not in kernel_tools.list_work(track_conv_indices, KERNEL, call, "cpu")
    assert results[0].shape == (3, 3) and results[0].device.type == where


def test_a_torch_without_triton_takes_the_reference():
    code = """
import sys, torch
sys.modules["triton"] = None
from inkling_sconv.plugin.backend import track_conv_indices
one = torch.ones(1, dtype=torch.int64)
got = track_conv_indices(torch.tensor([0, 64]), one * 64, None, rows=1, chunk_size=64, window=3)
assert got.tolist() == [[61, 62, 63]]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def list_calls(
    ops: ModuleType, dtypes: tuple[torch.dtype, ...], sizes: range, device: str
) -> Iterator[Callable[[], Any]]:
    """A call per batch size, with other slices and live rows; two ``dtypes``: without prefix."""
    for rows in sizes:
        prefix_lens = [0] * rows if len(dtypes) == 3 else None
        step = Step(rows, [0] * (rows + 1), [0] * (rows - rows % 3), prefix_lens)
        starts_dtype, *others = (*dtypes, torch.int32)[:3]
        step = replace(step, starts_dtype=starts_dtype, dtypes=tuple(others), offset=rows % 5)
        buffer = torch.empty(rows * 3 + rows % 4, dtype=torch.int64, device=device)
        out = buffer[rows % 4 :].view(rows, 3)
        yield partial(ops.track_conv_indices, **step.arguments(device), out=out)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ModuleType]:
    """Makes copies that have compiled nothing yet; Triton's cache on disk is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return lambda *edits: kernel_tools.load_copy(track_conv_indices, tmp_path, *edits)


def test_200_batch_sizes_are_one_compilation(device, compiled):
    ops, live = compiled(), (torch.int32, torch.int64, torch.int32)
    others = {*itertools.product(INTEGERS, repeat=2), *itertools.product(INTEGERS, repeat=3)}
    calls = list_calls(ops, live, range(1, 201), device)
    assert kernel_tools.count_compilations(ops, KERNEL, calls, device) == 1
    for done, dtypes in enumerate(others - {live}, 2):
        calls = list_calls(ops, dtypes, range(1, 18), device)
        assert kernel_tools.count_compilations(ops, KERNEL, calls, device) == done


@pytest.mark.parametrize("name", ("rows", "live", "out", "track_seqlens"))
def test_the_count_of_compilations_sees_a_specialised_argument(compiled, name):
    ops = compiled((f'"{name}"', '"query_start_loc"'))
    calls = list_calls(ops, (torch.int32, torch.int64, torch.int32), range(1, 34), "cpu")
    assert kernel_tools.count_compilations(ops, KERNEL, calls, "cpu") > 1
