"""The draft's conv state: reference, kernel and method, against each token's own row. No GPU."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from operator import ne
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import emulator
import pytest
import releases
import test_kernels
import torch
from drafts_steps import BATCHES, MIXED, Step, expected, run, steps
from hypothesis import given
from inkling_sconv.ops import draft_conv_state
from inkling_sconv.proof import checkpoint, equality
from steps import load
from test_kernels import CAREFUL, QUICK

pytest.importorskip("triton")

compiler = test_kernels.compiler


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    module = copy_of(tmp_path_factory.mktemp("drafts"))
    assert module._INTERPRETED and not drafts._INTERPRETED
    return module


def copy_of(folder: Any, *edits: tuple[str, str], interpret: bool = True) -> ModuleType:
    return load(folder, *edits, interpret=interpret, name="drafts.py")


def assert_formula(function: Callable[..., None], step: Step) -> None:
    got, want = run(function, step), expected(step)
    assert torch.equal(got, want), (got != want).nonzero().tolist()


def test_the_reference_is_the_formula():
    @CAREFUL
    @given(step=steps())
    def is_the_formula(step: Step) -> None:
        assert_formula(draft_conv_state.update_draft_conv_state_ref, step)

    for batch in BATCHES:
        assert_formula(draft_conv_state.update_draft_conv_state_ref, batch)
    is_the_formula()


def test_the_kernel_is_the_reference(interpreted):
    @CAREFUL
    @given(step=steps())
    def is_the_reference(step: Step) -> None:
        got = run(interpreted.update_conv_state, step)
        assert torch.equal(got, run(draft_conv_state.update_draft_conv_state_ref, step))

    for batch in BATCHES:
        assert_formula(interpreted.update_conv_state, batch)
    is_the_reference()


@pytest.mark.parametrize("n", range(-1, 5))
@pytest.mark.parametrize("front", range(6))
def test_one_request_by_hand(interpreted, n, front):
    """The tokens of positions 6 to 9 after 3, 4, 5; a boundary at 8; rows hold their positions."""
    for function in (draft_conv_state.update_draft_conv_state_ref, interpreted.update_conv_state):
        cache = torch.zeros(2, 3, 1)
        cache[0, :, 0] = torch.tensor([3.0, 4.0, 5.0])
        function(
            torch.arange(6.0 - front, 10.0).view(1, -1, 1),
            cache,
            torch.tensor([0]),
            torch.tensor([n]),
            torch.tensor([10]),
            torch.tensor([1]),
            front=front,
            interval=8,
        )
        moved = max(n, 0)
        assert cache[0, :, 0].tolist() == [3 + moved, 4 + moved, 5 + moved]
        assert cache[1, :, 0].tolist() == ([5, 6, 7] if n >= 2 else [0, 0, 0])


REFERENCE, KERNEL = "update_conv_state_reference", "update_conv_state"
FRESH = "fresh = min(front, window)"
OLD_IN_THE_CHECKPOINT = "tl.store(kept + w * cache_row, tl.where(at < STATE, old, new)"
OLD_IN_THE_STATE = "tl.store(own + w * cache_row, tl.where(at < STATE, old, new)"
MUTANTS: dict[str, tuple[str, tuple[str, str]]] = {
    "reference: padded rows write": (
        REFERENCE,
        ("        if n < 0:\n            continue", "        if n < -1:\n            continue"),
    ),
    "reference: front rows are tokens": (REFERENCE, ("own[front - fresh :]", "own")),
    "reference: the state for front rows": (REFERENCE, (FRESH, "fresh = 0")),
    "reference: front rows past the window": (REFERENCE, (FRESH, "fresh = front")),
    "reference: a boundary at the base": (REFERENCE, ("and past > 0:", "and past >= 0:")),
    "reference: the boundary's own token left out": (
        REFERENCE,
        ("rows[past : past + window]", "rows[past - 1 : past - 1 + window]"),
    ),
    "reference: the step's end for the boundary": (
        REFERENCE,
        ("past = (base + n) // interval * interval - base", "past = n"),
    ),
    "reference: one checkpoint slot": (REFERENCE, ("int(track_slots[r])", "int(track_slots[0])")),
    "reference: one slot": (REFERENCE, ("int(cache_indices[r])", "int(cache_indices[0])")),
    "reference: the length before the step": (
        REFERENCE,
        (" - (own.shape[0] - front)\n", "\n"),
    ),
    "reference: rejected tokens move the state": (
        REFERENCE,
        ("rows[n : n + window]", "rows[-window:]"),
    ),
    "reference: another slot's state": (
        REFERENCE,
        ("cache[slot, : window - fresh]", "cache[slot - 1, : window - fresh]"),
    ),
    "kernel: padded rows write": (
        KERNEL,
        ("        if n < 0:\n            return", "        if n < -1:\n            return"),
    ),
    "kernel: front rows in the state": (
        KERNEL,
        (
            "\n            new = tl.load(token + (at - WINDOW + FRONT)",
            "\n            new = tl.load(token + (at - WINDOW)",
        ),
    ),
    "kernel: front rows in the checkpoint": (
        KERNEL,
        (
            "\n                        token + (at - WINDOW + FRONT)",
            "\n                        token + (at - WINDOW)",
        ),
    ),
    "kernel: front rows are of the step": (
        KERNEL,
        ("        length - front,\n", "        length,\n"),
    ),
    "kernel: the state for front rows": (
        KERNEL,
        ("max(cache.shape[1] - front, 0)", "cache.shape[1]"),
    ),
    "kernel: a boundary at the base": (
        KERNEL,
        ("            if past > 0:", "            if past >= 0:"),
    ),
    "kernel: the step's end for the boundary": (
        KERNEL,
        ("past = (base + n) // INTERVAL * INTERVAL - base", "past = n"),
    ),
    "kernel: the boundary's own token left out": (KERNEL, ("at = past + w", "at = past + w - 1")),
    "kernel: one checkpoint slot": (KERNEL, ("tl.load(track_slots + row)", "tl.load(track_slots)")),
    "kernel: one slot": (KERNEL, ("tl.load(cache_indices + row)", "tl.load(cache_indices)")),
    "kernel: one accepted count": (KERNEL, ("tl.load(accepted + row)", "tl.load(accepted)")),
    "kernel: one length": (KERNEL, ("tl.load(seq_lens + row)", "tl.load(seq_lens)")),
    "kernel: lengths in 32 bits": (
        KERNEL,
        (
            "base = tl.load(seq_lens + row).to(tl.int64) - WIDTH",
            "base = tl.load(seq_lens + row).to(tl.int32) - WIDTH",
        ),
    ),
    "kernel: the state's oldest row from the step": (
        KERNEL,
        (OLD_IN_THE_STATE, OLD_IN_THE_STATE.replace("<", "<=")),
    ),
    "kernel: the checkpoint's oldest row from the step": (
        KERNEL,
        (OLD_IN_THE_CHECKPOINT, OLD_IN_THE_CHECKPOINT.replace("<", "<=")),
    ),
    "kernel: channels past the last are written": (
        KERNEL,
        (f"{OLD_IN_THE_STATE}, mask=inside)", f"{OLD_IN_THE_STATE})"),
    ),
    "kernel: one block of channels": (
        KERNEL,
        ("(rows, triton.cdiv(channels, block))", "(rows, 1)"),
    ),
    "kernel: requests are taken for contiguous": (
        KERNEL,
        ("        hidden_states.stride(0),\n", "        length * channels,\n"),
    ),
    "kernel: tokens are taken for contiguous": (
        KERNEL,
        ("        hidden_states.stride(1),\n", "        channels,\n"),
    ),
    "kernel: the cache is taken for contiguous": (
        KERNEL,
        ("        cache.stride(1),\n", "        channels,\n"),
    ),
}


def catches(function: Callable[..., None]) -> bool:
    """Whether the comparison with the formula finds ``function`` wrong."""

    @QUICK
    @given(step=steps())
    def is_the_formula(step: Step) -> None:
        assert_formula(function, step)

    try:
        for batch in BATCHES:
            assert_formula(function, batch)
        is_the_formula()
    except (AssertionError, IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("name", (REFERENCE, KERNEL))
def test_wrong_versions_are_caught(tmp_path, name):
    assert not catches(getattr(copy_of(tmp_path), name)), "the table means nothing"
    wrong = {mutant: edit for mutant, (of, edit) in MUTANTS.items() if of == name}
    assert len(wrong) >= 8
    survivors = [
        mutant
        for mutant, edit in wrong.items()
        if not catches(getattr(copy_of(tmp_path, edit), name))
    ]
    assert not survivors, f"nobody kills: {survivors}"


# ------------------------------------------------------------------------------- what it costs


def arguments(step: Step) -> dict[str, Any]:
    hidden, cache = step.views(*step.memory())
    return {
        "hidden_states": hidden,
        "cache": cache,
        **step.integers(),
        "front": step.front,
        "interval": step.interval,
    }


def test_one_launch_and_nothing_else(interpreted, monkeypatch):
    launches = test_kernels._Launches()
    monkeypatch.setattr(interpreted, "_update_conv_state_kernel", launches)
    for number, batch in enumerate(BATCHES, 1):
        given_arguments = arguments(batch)
        with test_kernels._Operations() as operations:
            interpreted.update_conv_state(**given_arguments)
        assert (launches.count, operations.names) == (number, [])


def test_no_launch_for_no_rows(interpreted, monkeypatch):
    launches = test_kernels._Launches()
    monkeypatch.setattr(interpreted, "_update_conv_state_kernel", launches)
    interpreted.update_conv_state(**arguments(Step([], [], [], [], 1)))
    assert launches.count == 0


def test_what_is_not_on_a_gpu_takes_the_reference(tmp_path, monkeypatch):
    compiled = copy_of(tmp_path, interpret=False)
    launches = test_kernels._Launches()
    monkeypatch.setattr(compiled, "_update_conv_state_kernel", launches)
    assert_formula(compiled.update_conv_state, MIXED)
    assert launches.count == 0


def test_a_channel_stride_is_refused(interpreted):
    given_arguments = arguments(dataclasses.replace(MIXED, channels=3))
    given_arguments["hidden_states"] = given_arguments["hidden_states"][..., ::2]
    with pytest.raises(AssertionError):
        interpreted.update_conv_state(**given_arguments)


def test_a_torch_without_triton_takes_the_reference():
    code = """
import sys, torch
sys.modules["triton"] = None
from inkling_sconv.ops import draft_conv_state
from inkling_sconv.plugin import fixes
cache, one = torch.zeros(1, 1, 1), torch.tensor([1])
draft_conv_state.update_draft_conv_state(torch.ones(1, 1, 1), cache, one - 1, one, one, None, front=0, interval=8)
assert cache.item() == 1 and fixes.FIXES
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_batch_sizes_are_one_compilation(compiler, tmp_path):
    module = copy_of(tmp_path, interpret=False)
    kernel = module._update_conv_state_kernel

    class Compiler:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: kernel.warmup(*args, grid=grid, **options)

    def compiled(dtypes: tuple[torch.dtype, ...], sizes: range) -> int:
        module._update_conv_state_kernel, module._INTERPRETED = Compiler(), True
        for rows in sizes:
            none = [0] * rows
            step = Step(none, none, none, none, 2, channels=64, dtypes=dtypes)
            call = arguments(dataclasses.replace(step, floats=torch.bfloat16))
            # As the cache of a layer, and slices of buffers, begin where they begin.
            call["hidden_states"] = torch.zeros(rows, 4, 64, dtype=torch.bfloat16)
            call["cache"] = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
            for name in ("cache_indices", "accepted", "seq_lens", "track_slots"):
                buffer = torch.zeros(rows + rows % 5, dtype=call[name].dtype)
                call[name] = buffer[rows % 5 :]
            module.update_conv_state(**call)
        module._update_conv_state_kernel, module._INTERPRETED = kernel, False
        return len(kernel.device_caches[0][0])

    live = (torch.int32, torch.int32, torch.int32, torch.int64)
    assert compiled(live, range(1, 66)) == 1
    assert compiled((torch.int64, torch.int64, torch.int64, torch.int32), range(1, 18)) == 2
