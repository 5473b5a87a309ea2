"""The draft's conv state on a GPU: each token's own row, and replays of one graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from drafts_steps import BATCHES, MIXED, Step, expected, run, steps
from hypothesis import given, settings
from inkling_sconv.ops import draft_conv_state

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def assert_formula(step: Step) -> None:
    got = run(draft_conv_state.update_draft_conv_state, step, "cuda")
    assert torch.equal(got, expected(step)), step


@pytest.mark.parametrize("floats", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("front", range(6))
def test_by_hand(front, floats):
    """The tokens of positions 6 to 9 after 3, 4, 5; a boundary at 8; rows hold their positions."""
    cache = torch.zeros(2, 3, 1, dtype=floats, device="cuda")
    cache[0, :, 0] = torch.tensor([3.0, 4.0, 5.0])

    def on_gpu(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    draft_conv_state.update_draft_conv_state(
        torch.arange(6.0 - front, 10.0, device="cuda").to(floats).view(1, -1, 1),
        cache,
        on_gpu(0),
        on_gpu(3),
        on_gpu(10),
        on_gpu(1),
        front=front,
        interval=8,
    )
    assert cache[:, :, 0].tolist() == [[6, 7, 8], [5, 6, 7]]


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_batches(batch):
    assert_formula(batch)


def test_any_step():
    # A step may be a compilation of its own.
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(step=steps())
    def is_the_formula(step: Step) -> None:
        assert_formula(step)

    is_the_formula()


def test_replays_read_what_is_there_then():
    """One capture; accepted counts, lengths and slots are changed in place between replays."""
    floats = torch.bfloat16
    first = dataclasses.replace(MIXED, channels=512, floats=floats, slots=12, spread=1, longer=0)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (first.rows, first.width + first.front, first.channels)
    hidden = torch.zeros(shape, dtype=floats, device="cuda")
    cache = torch.randn(12, 3, 512, device="cuda", generator=generator).to(floats)
    integers: dict[str, Any] = {
        name: tensor.cuda() for name, tensor in first.integers().items() if tensor is not None
    }
    given_arguments = {"front": first.front, "interval": first.interval}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        draft_conv_state.update_draft_conv_state(hidden, cache, **integers, **given_arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_conv_state.update_draft_conv_state(hidden, cache, **integers, **given_arguments)
    for seed in range(50):
        drawn = torch.Generator().manual_seed(seed)
        slots = torch.randperm(12, generator=drawn)
        integers["cache_indices"].copy_(slots[: first.rows])
        integers["track_slots"].copy_(slots[first.rows : 2 * first.rows])
        integers["accepted"].copy_(torch.randint(-1, 5, (first.rows,), generator=drawn))
        integers["seq_lens"].copy_(torch.randint(8, 60, (first.rows,), generator=drawn))
        hidden.normal_(generator=generator)
        want = cache.cpu()
        on_cpu = {name: tensor.cpu() for name, tensor in integers.items()}
        draft_conv_state.update_draft_conv_state_ref(
            hidden.cpu(), want, **on_cpu, **given_arguments
        )
        graph.replay()
        assert torch.equal(cache.cpu(), want), seed
