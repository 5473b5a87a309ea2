"""SGLang's own convolution in draft-extend, its Triton kernels interpreted on the CPU.

Scenarios of ``test/drive.py``: it beside our method, and after our refresh in both forms.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from drafts_steps import Step, expected, run
from inkling_sconv import names
from inkling_sconv.plugin.convolution import InklingShortConvolution
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe.stand_ins import AllOn, Stub, make_instance, use_configuration

UPDATE = "_update_sconv_cache_for_draft_extend"


def import_convolution() -> Any:
    """SGLang's module, imported again: Triton interprets a kernel if told so when it is defined."""
    sys.modules.pop(names.SHORT_CONVOLUTION_MODULE, None)
    os.environ["TRITON_INTERPRET"] = "1"
    return importlib.import_module(names.SHORT_CONVOLUTION_MODULE)


def configure(module: Any, interval: int) -> Any:
    """Tracking on, a boundary every ``interval`` tokens, for every release."""
    settings = SimpleNamespace(mamba_track_interval=interval, enable_mamba_extra_buffer=True)
    configuration = AllOn(mamba=settings, enable_mamba_extra_buffer=True)
    return use_configuration(vars(module), configuration)


def draw_step(draw: random.Random) -> Step:
    """A step without front rows, which SGLang's method counts as tokens."""
    requests, width = draw.randint(1, 4), draw.randint(1, 6)
    order = draw.sample(range(2 * requests + 1), 2 * requests)
    return Step(
        order[:requests],
        [draw.randint(-1, width) for _ in range(requests)],
        [draw.randint(0, 40) for _ in range(requests)],
        order[requests:] if draw.random() < 0.8 else None,
        2 * requests + 1,
        width=width,
        interval=draw.choice((4, 16, 64)),
        window=draw.randint(1, 4),
        channels=draw.randint(1, 5),
    )


def update_by(cls: type, module: Any, step: Step, *, flat: bool) -> torch.Tensor:
    """The cache of ``step`` after the method of ``cls``."""

    def update(hidden: torch.Tensor, cache: torch.Tensor, **rest: Any) -> None:
        batch = Stub(
            batch_size=step.rows,
            seq_lens=rest["seq_lens"],
            mamba_track_indices=rest["track_slots"],
            spec_info=Stub(num_accept_tokens=rest["accepted"], num_front_tokens=0),
        )
        metadata = SimpleNamespace(track_cache_indices=rest["track_slots"])
        host = make_instance(
            cls,
            UPDATE,
            _conv_state=lambda _: metadata,
            _inkling_sconv_interval=lambda: step.interval,
        )
        hidden = hidden.flatten(0, 1) if flat else hidden
        # The kernel takes a bool, which a blank is not.
        with (
            configure(module, step.interval),
            mock.patch.object(module, "mamba_extra_buffer_enabled", lambda: True, create=True),
        ):
            getattr(host, UPDATE)(batch, cache, rest["cache_indices"], hidden)

    return run(update, step)


def compare_draft_states() -> dict[str, int]:
    """How many of 200 steps cross a boundary, and in how many the two methods differ."""
    module, draw = import_convolution(), random.Random(0)
    kinds = ("compared", "tracked", "crossed", "states", "checkpoints", "misplaced")
    found = dict.fromkeys(kinds, 0)
    for number in range(200):
        step = draw_step(draw)
        theirs, ours = (
            update_by(cls, module, step, flat=bool(number % 2))
            for cls in (module.ShortConvolution, InklingShortConvolution)
        )
        assert torch.equal(ours, expected(step))
        crossed = step.kept is not None and any(
            (base + n) // step.interval > base // step.interval
            for base, n in zip(step.base, step.accepted, strict=True)
            if n >= 0
        )
        own = [slot + 1 for slot in step.own]
        found["compared"] += 1
        found["tracked"] += step.kept is not None
        found["crossed"] += crossed
        found["states"] += not torch.equal(theirs[own], ours[own])
        found["misplaced" if crossed else "checkpoints"] += not torch.equal(theirs, ours)
    return found


WINDOW, CHANNELS, WIDTH = 3, 16, 3


def compare_pools() -> dict[str, int]:
    """Draft-extend exempt against inert: slots that differ after 40 batches, slot 0 aside."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    (backend,) = probe.find_backends(importlib.import_module(names.BACKEND_MODULE))
    module = import_convolution()
    found = dict.fromkeys(("batches", "differ", "slot 0", "moved"), 0)
    with configure(module, interval=8):
        for seed in range(40):
            step = draw_batch(seed)
            exempt, inert = (
                fill_pool(backend, module.ShortConvolution, step, exempt=form)
                for form in (True, False)
            )
            found["batches"] += 1
            found["differ"] += int((exempt[1:] != inert[1:]).any((1, 2)).sum())
            found["slot 0"] += bool((exempt[0] != inert[0]).any())
            found["moved"] += bool((exempt != step.pool).any())
    return found


def draw_batch(seed: int) -> SimpleNamespace:
    """Up to six requests, some of them padded rows, with and without front rows."""
    rng = random.Random(seed)
    rows, front = rng.randint(1, 6), rng.choice((0, 4))
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        rows=rows,
        front=front,
        seq_lens=torch.tensor([rng.randint(WIDTH + front, 60) for _ in range(rows)]),
        accepted=torch.tensor([rng.randint(-1, WIDTH) for _ in range(rows)], dtype=torch.int32),
        slots=torch.tensor(rng.sample(range(1, 9), rows), dtype=torch.int32),
        pool=torch.randn(9, WINDOW, CHANNELS, generator=generator),
        hidden=torch.randn(rows * (WIDTH + front), CHANNELS, generator=generator),
    )


def fill_pool(
    backend: type, convolution: type, step: SimpleNamespace, *, exempt: bool
) -> torch.Tensor:
    """The pool, ``[slots, window, channels]``, after one draft-extend step of one convolution."""
    rig = probe.Rig(backend, window=WINDOW)
    rig.backend._inkling_sconv_exempt_draft_extend = exempt
    batch = rig.make_batch("DRAFT_EXTEND_V2", step.rows)
    batch.seq_lens = step.seq_lens
    batch.spec_info = SimpleNamespace(num_accept_tokens=step.accepted, num_front_tokens=step.front)
    starts = [(WIDTH + step.front) * r for r in range(step.rows + 1)]
    # Warm-up and capture.
    for _ in range(2):
        indices = rig.refresh(batch, starts, on_graph_path=True)
    assert (indices is None) == exempt
    pool = step.pool.clone()
    host: Any = object.__new__(
        type("Host", (convolution,), {"_conv_state": lambda self, batch: SimpleNamespace()})
    )
    host._prepare_extend_sconv_cache(batch, pool, step.hidden, indices)
    host._update_sconv_cache_for_draft_extend(batch, pool, step.slots, step.hidden)
    return pool
