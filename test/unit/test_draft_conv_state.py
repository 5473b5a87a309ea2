"""The draft's conv state: reference and kernel against each token's own row; the kernel's cost.

The kernel runs on the CPU (interpreted) and on a GPU.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import kernel_tools
import pytest
import torch
from drafts_steps import BATCHES, MIXED, Step, expected, run, steps
from hypothesis import given, settings
from inkling_sconv.ops import draft_conv_state

pytest.importorskip("triton")

KERNEL = "_update_draft_conv_state_kernel"


def assert_formula(function: Callable[..., None], step: Step, device: str = "cpu") -> None:
    got, want = run(function, step, device), expected(step)
    assert torch.equal(got, want), (step, (got != want).nonzero().tolist())


@pytest.fixture(scope="module")
def ops(device: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("ops")
    module = kernel_tools.load_copy(draft_conv_state, folder, interpret=device == "cpu")
    assert module._INTERPRETED is (device == "cpu")
    return module


# -------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_batches(ops, device, batch):
    assert_formula(ops.update_draft_conv_state_ref, batch)
    assert_formula(ops.update_draft_conv_state, batch, device)


def test_any_step(ops, device):
    # On a GPU, a step may be a compilation of its own.
    @settings(kernel_tools.CAREFUL, max_examples=200 if device == "cpu" else 40)
    @given(step=steps())
    def is_the_formula(step: Step) -> None:
        assert_formula(ops.update_draft_conv_state_ref, step)
        assert_formula(ops.update_draft_conv_state, step, device)

    is_the_formula()


@pytest.mark.parametrize("floats", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("n", range(-1, 5))
@pytest.mark.parametrize("front", range(6))
@pytest.mark.parametrize("interval", (5, 8))
def test_one_request_by_hand(ops, device, interval, front, n, floats):
    """The tokens of positions 6 to 9 after 3, 4, 5; rows hold their positions.

    Boundaries are at 8, or at 5 and 10. Only five front rows reach from 5 one row past its window.
    """
    hidden = torch.arange(6 - front, 10, device=device).to(floats).view(1, -1, 1)
    slot, accepted, length, track = torch.tensor([[0], [n], [10], [1]], device=device)
    for function in (ops.update_draft_conv_state_ref, ops.update_draft_conv_state):
        cache = torch.tensor([[3, 4, 5], [0, 0, 0]], device=device).to(floats).unsqueeze(-1)
        function(hidden, cache, slot, accepted, length, track, front=front, interval=interval)
        moved = max(n, 0)
        own, kept = cache[:, :, 0].tolist()
        assert own == [3 + moved, 4 + moved, 5 + moved]
        saved = {8: (n >= 2, 8), 5: (n == 4 or (n >= 0 and front == 5), 10 if n == 4 else 5)}
        crossed, boundary = saved[interval]
        assert kept == ([boundary - 3, boundary - 2, boundary - 1] if crossed else [0, 0, 0])


@kernel_tools.NO_GPU
def test_replays_read_what_is_there_then():
    """One capture; accepted counts, lengths and slots are changed in place between replays."""
    floats = torch.bfloat16
    first = dataclasses.replace(MIXED, channels=512, floats=floats, slots=12, spread=1, longer=0)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (first.rows, first.width + first.front, first.channels)
    hidden = torch.zeros(shape, dtype=floats, device="cuda")
    cache = torch.randn(12, 3, 512, device="cuda", generator=generator).to(floats)
    integers = {name: tensor.cuda() for name, tensor in first.integers().items()}
    options = {"front": first.front, "interval": first.interval}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        draft_conv_state.update_draft_conv_state(hidden, cache, **integers, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_conv_state.update_draft_conv_state(hidden, cache, **integers, **options)
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
        draft_conv_state.update_draft_conv_state_ref(hidden.cpu(), want, **on_cpu, **options)
        graph.replay()
        assert torch.equal(cache.cpu(), want), seed


# -------------------------------------------------------------------------------- wrong versions

REACH = "reach = max(front - window, 0)\n    for"
OWN = "rows = torch.cat([cache[slot, : max(window - front, 0)], own])"
WRONG_REFERENCES = {
    "padded rows write": ("n < 0:\n            continue", "n < -1:\n            continue"),
    "the state for front rows": (OWN, OWN.replace("max(window - front, 0)", "window")),
    "front rows are tokens": (REACH, "reach = 0\n    for"),
    "front rows past the window": (REACH, "reach = front\n    for"),
    "only a crossing": ("min(offset, boundary) > 0", "min(offset - reach, boundary) > 0"),
    "a boundary out of reach": ("min(offset, boundary) > 0", "min(offset + 1, boundary) > 0"),
    "a boundary at 0": ("min(offset, boundary) > 0", "offset > 0"),
    "a freed slot": (" and track_slots[r] >= 0:", ":"),
    "the boundary's own token left out": ("rows[offset : offset", "rows[offset - 1 : offset - 1"),
    "the step's end for the boundary": ("= (base + n) // interval * interval", "= base + n"),
    "one checkpoint slot": ("int(track_slots[r])", "int(track_slots[0])"),
    "one slot": ("int(cache_indices[r])", "int(cache_indices[0])"),
    "the length before the step": (" - (own.shape[0] - front)\n", "\n"),
    "rejected tokens move the state": ("rows[n + reach : n + reach + window]", "rows[-window:]"),
    "another slot's state": ("torch.cat([cache[slot, ", "torch.cat([cache[slot - 1, "),
}
CHECKPOINT = "tl.store(kept + w * cache_row, tl.where(at < STATE, old, new)"
STATE = "tl.store(own + w * cache_row, tl.where(at < STATE, old, new)"
WRONG_KERNELS = {
    "padded rows write": ("n < 0:\n            return", "n < -1:\n            return"),
    "front rows in the state": ("at = n + REACH + w", "at = n + w"),
    "front rows in the checkpoint": ("at = offset + w", "at = offset - REACH + w"),
    "only a crossing": ("if (offset > 0)", "if (offset > REACH)"),
    "a freed slot": (" & (slot >= 0):", ":"),
    "front rows are of the step": ("        length - front,\n", "        length,\n"),
    "the state for front rows": ("max(cache.shape[1] - front, 0)", "cache.shape[1]"),
    "a boundary out of reach": ("if (offset > 0)", "if (offset >= 0)"),
    "a boundary at 0": (" & (boundary > 0)", ""),
    "the step's end for the boundary": ("= (base + n) // INTERVAL * INTERVAL", "= base + n"),
    "the boundary's own token left out": ("at = offset + w", "at = offset + w - 1"),
    "one checkpoint slot": ("tl.load(track_slots + row)", "tl.load(track_slots)"),
    "one slot": ("tl.load(cache_indices + row)", "tl.load(cache_indices)"),
    "one accepted count": ("tl.load(accepted + row)", "tl.load(accepted)"),
    "one length": ("tl.load(seq_lens + row)", "tl.load(seq_lens)"),
    "lengths in 32 bits": ("(seq_lens + row).to(tl.int64)", "(seq_lens + row).to(tl.int32)"),
    "the state's oldest row from the step": (STATE, STATE.replace("<", "<=")),
    "the checkpoint's oldest row from the step": (CHECKPOINT, CHECKPOINT.replace("<", "<=")),
    "channels past the last are written": (f"{STATE}, mask=inside)", f"{STATE})"),
    "one block of channels": ("(rows, triton.cdiv(channels, block))", "(rows, 1)"),
    "requests are taken for contiguous": ("hidden_states.stride(0),", "length * channels,"),
    "tokens are taken for contiguous": ("hidden_states.stride(1),", "channels,"),
    "the cache is taken for contiguous": (" cache.stride(1),", " channels,"),
}
WRONG = {"update_draft_conv_state_ref": WRONG_REFERENCES, "update_draft_conv_state": WRONG_KERNELS}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_versions_are_caught(tmp_path, name):
    def check(ops: ModuleType) -> None:
        function = getattr(ops, name)

        @kernel_tools.QUICK
        @given(step=steps())
        def is_the_formula(step: Step) -> None:
            assert_formula(function, step)

        for batch in BATCHES:
            assert_formula(function, batch)
        is_the_formula()

    assert kernel_tools.find_survivors(draft_conv_state, tmp_path, WRONG[name], check) == []


# ----------------------------------------------------------------------------------------- cost


def make_arguments(step: Step, device: str) -> dict[str, Any]:
    hidden, cache = step.views(*(buffer.to(device) for buffer in step.memory()))
    integers = {n: None if t is None else t.to(device) for n, t in step.integers().items()}
    options = {"front": step.front, "interval": step.interval}
    return {"hidden_states": hidden, "cache": cache, **integers, **options}


NO_ROWS = Step([], [], [], [], 1)


@pytest.mark.parametrize("batch", (*BATCHES, NO_ROWS), ids=[*range(len(BATCHES)), "no rows"])
def test_one_launch_and_nothing_else(ops, device, batch):
    arguments = make_arguments(batch, device)
    call = partial(ops.update_draft_conv_state, **arguments)
    assert kernel_tools.list_work(ops, KERNEL, call, device) == [KERNEL] * (batch.rows > 0)


def test_tensors_on_the_cpu_take_the_reference():
    function = draft_conv_state.update_draft_conv_state
    work = kernel_tools.list_work(
        draft_conv_state, KERNEL, lambda: assert_formula(function, MIXED), "cpu"
    )
    assert KERNEL not in work


@pytest.mark.parametrize("name", ("hidden_states", "cache"))
def test_a_channel_stride_is_refused(ops, device, name):
    arguments = make_arguments(dataclasses.replace(MIXED, channels=3), device)
    arguments[name] = arguments[name][..., ::2]
    with pytest.raises(AssertionError):
        ops.update_draft_conv_state(**arguments)


def test_a_torch_without_triton_takes_the_reference():
    code = """
import sys, torch
sys.modules["triton"] = None
from inkling_sconv.plugin import fixes
from inkling_sconv.plugin.convolution import update_draft_conv_state
cache, one = torch.zeros(1, 1, 1), torch.tensor([1])
arguments = (torch.ones(1, 1, 1), cache, one - 1, one, one, None)
update_draft_conv_state(*arguments, front=0, interval=8)
assert cache.item() == 1 and fixes.FIXES
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def list_calls(
    ops: ModuleType, dtypes: tuple[torch.dtype, ...], sizes: range, device: str
) -> Iterator[Callable[[], Any]]:
    """A call per batch size; integers are slices of buffers, the cache is that of a layer."""
    for rows in sizes:
        zeros = [0] * rows
        step = Step(zeros, [-1] * rows, zeros, zeros, 2, dtypes=dtypes)
        arguments = make_arguments(step, device)
        bfloat16 = {"dtype": torch.bfloat16, "device": device}
        arguments["hidden_states"] = torch.zeros(rows, 4, 64, **bfloat16)
        arguments["cache"] = torch.zeros(2, 3, 64, **bfloat16)
        for name, tensor in step.integers().items():
            assert tensor is not None
            buffer = torch.cat((tensor[: rows % 5], tensor)).to(device)
            arguments[name] = buffer[len(buffer) - rows :]
        yield partial(ops.update_draft_conv_state, **arguments)


def test_batch_sizes_are_one_compilation(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    ops = kernel_tools.load_copy(draft_conv_state, tmp_path)
    live = (torch.int32, torch.int32, torch.int32, torch.int64)
    calls = list_calls(ops, live, range(1, 66), device)
    assert kernel_tools.count_compilations(ops, KERNEL, calls, device) == 1
    others = (torch.int64, torch.int64, torch.int64, torch.int32)
    calls = list_calls(ops, others, range(1, 18), device)
    assert kernel_tools.count_compilations(ops, KERNEL, calls, device) == 2
