"""The kernel on a GPU: the same bits as ``windows.py``, one launch, one compilation, replays."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from formula import INTEGERS, Case, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_sconv.ops import track_conv_indices
from inkling_sconv.plugin.backend import InklingSconvBackend
from steps import GARBAGE, Step, load, refresh_arguments, run, steps

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

LIVE = Step(3, [0, 64, 128, 192], [64, 64], [0, 0])
DTYPES = (torch.int32, torch.int64, torch.int32)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A copy of its own, so that nobody else's calls have compiled anything in it."""
    return load(tmp_path_factory.mktemp("kernels"), interpret=False)


def prefill(rows: int, *, prefix: bool = True, **changes: Any) -> Step:
    """A step as the scheduler makes them, of ``rows`` requests with one padded row in four."""
    rng = random.Random(rows)
    lengths = [rng.randint(0, 400) for _ in range(rows)]
    live = rows - rows // 4
    starts = [sum(lengths[:r]) for r in range(rows + 1)]
    prefixes = [rng.randrange(0, 4000, 64) for _ in range(live)]
    tracked = [(p + n) // 64 * 64 for p, n in zip(prefixes, lengths, strict=False)]
    return replace(
        Step(rows, starts, tracked, prefixes if prefix else None, 64, 3, DTYPES), **changes
    )


def compiled(kernels: ModuleType) -> int:
    """How many kernels were compiled, or loaded from Triton's cache on disk, until now."""
    caches = kernels._track_conv_indices_kernel.device_caches
    return sum(len(cache[0]) for cache in caches.values())


def launches(function: Any) -> list[str]:
    """Everything that ``function`` puts on the device, by the profiler."""
    function()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.cuda.synchronize()  # the first profile of a process may miss its first events
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == device]


@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("dtypes", list(product(INTEGERS, repeat=3)))
def test_every_combination_of_dtypes(kernels, dtypes, prefix):
    shapes = product((1, 2, 7, 8, 9, 32, 160, 512, 4096), (1, 3, 4), (64, 96))
    for rows, window, chunk_size in shapes:
        step = prefill(rows, prefix=prefix, window=window, chunk_size=chunk_size, dtypes=dtypes)
        want = run(track_conv_indices.track_conv_indices_ref, step)
        assert run(kernels.track_conv_indices, step, "cuda") == want
        case = Case(rows, step.query_start_loc, step.track_seqlens, step.prefix_lens or [0] * rows)
        assert want == expected(replace(case, window=window, chunk_size=chunk_size))


@settings(max_examples=1000, deadline=None)
@given(step=steps(), chunk_size=st.sampled_from((64, 192)))
def test_any_lengths(step, chunk_size):
    from inkling_sconv.ops import track_conv_indices

    # Every window and chunk size is a compilation of its own.
    step = replace(step, window=3, chunk_size=chunk_size)
    want = run(track_conv_indices.track_conv_indices_ref, step)
    assert run(kernels.track_conv_indices, step, "cuda") == want


@pytest.mark.parametrize("prefix", (False, True))
def test_200_batch_sizes_are_one_compilation(kernels, prefix):
    # A chunk size that no other test uses: it is compiled in.
    before = compiled(kernels)
    for rows in range(1, 201):
        step = prefill(rows, prefix=prefix, chunk_size=256, offset=rows % 5)
        want = run(track_conv_indices.track_conv_indices_ref, step)
        assert run(kernels.track_conv_indices, step, "cuda") == want
    assert compiled(kernels) == before + 1


@pytest.mark.parametrize("rows", (1, 8, 32, 160, 512))
@pytest.mark.parametrize("prefix", (False, True))
def test_one_launch(kernels, rows, prefix):
    arguments = prefill(rows, prefix=prefix).arguments("cuda")
    out = torch.empty(rows, 3, dtype=torch.int64, device="cuda")
    for destination in (None, out):
        seen = launches(
            lambda to=destination: track_conv_indices.track_conv_indices(**arguments, out=to)
        )
        assert seen == ["_track_conv_indices_kernel"]


@pytest.mark.parametrize(("tracked", "on_graph_path"), ((True, True), (True, False), (False, True)))
def test_the_whole_refresh_is_one_launch_and_no_synchronisation(tracked, on_graph_path):
    backend, batch = refresh_arguments(LIVE, "cuda", tracked=tracked)

    def refresh() -> None:
        InklingSconvBackend._refresh_track_conv_indices(backend, batch, on_graph_path)

    refresh()
    torch.cuda.set_sync_debug_mode("error")
    try:
        refresh()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launches(refresh) == ["_track_conv_indices_kernel"]


@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("rows", (1, 8, 33))
def test_a_replay_reads_what_is_there_then(kernels, rows, prefix):
    first = prefill(rows, prefix=prefix)
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
        for name in ("query_start_loc", "track_seqlens", "prefix_lens"):
            if arguments[name] is not None:
                arguments[name].copy_(torch.tensor(getattr(step, name)))
        out.fill_(GARBAGE)
        graph.replay()
        assert out.tolist() == run(track_conv_indices.track_conv_indices_ref, step)


@pytest.mark.parametrize("strides", ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
def test_what_the_kernel_does_not_take_is_still_right(kernels, strides):
    step = prefill(9, strides=strides)
    want = run(track_conv_indices.track_conv_indices_ref, step)
    assert run(kernels.track_conv_indices, step, "cuda") == want
