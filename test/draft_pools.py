"""Draft-extend exempt against inert: what SGLang's own convolution leaves in a conv pool.

Run with one SGLang tree, our plugin and ``TRITON_INTERPRET=1``. The refresh is ours; the scatter of
prefill tracking and the draft's own update are SGLang's kernels, interpreted on the CPU. Prints how
many batches, how many slots differ (slot 0 aside), how many batches left another slot 0, and how
many moved a conv state.
"""

from __future__ import annotations

import importlib
import json
import random
from types import SimpleNamespace
from typing import Any

import torch
from inkling_sconv import names
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe import runners
from sglang.srt.plugins import load_plugins

WINDOW, CHANNELS, WIDTH, INTERVAL = 3, 16, 3, 8


def pool_after(
    backend: type, convolution: type, case: SimpleNamespace, *, exempt: bool
) -> torch.Tensor:
    """The pool, ``[slots, window, channels]``, after one draft-extend step of one convolution."""
    rig = probe.Rig(backend, window=WINDOW)
    rig.backend._inkling_sconv_exempt_draft_extend = exempt
    batch = rig.make_batch("DRAFT_EXTEND_V2", case.rows)
    batch.seq_lens = case.seq_lens
    batch.spec_info = SimpleNamespace(num_accept_tokens=case.accepted, num_front_tokens=case.front)
    window = WIDTH + case.front
    starts = [window * r for r in range(case.rows + 1)]
    # Warm-up and capture.
    for _ in range(2):
        indices = rig.refresh(batch, starts, on_graph_path=True)
    assert (indices is None) == exempt
    pool = case.pool.clone()
    conv: Any = object.__new__(convolution)
    conv._prepare_extend_sconv_cache(batch, pool, case.hidden, indices)
    conv._update_sconv_cache_for_draft_extend(batch, pool, case.slots, case.hidden)
    return pool


def draw(seed: int) -> SimpleNamespace:
    """A step of up to six requests, some of them padded rows."""
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


def main() -> None:
    load_plugins()
    (backend,) = probe.find_backends(importlib.import_module(names.BACKEND_MODULE))
    module = importlib.import_module(names.SHORT_CONVOLUTION_MODULE)
    convolution = type(
        "Convolution",
        (module.ShortConvolution,),
        {"_conv_state": lambda self, batch: SimpleNamespace()},
    )
    configuration: Any = SimpleNamespace(
        # 0.5.17 calls the one, later releases read the other.
        enable_mamba_extra_buffer=lambda: True,
        mamba=SimpleNamespace(mamba_track_interval=INTERVAL, enable_mamba_extra_buffer=True),
    )
    seen = dict.fromkeys(("batches", "differ", "slot 0", "moved"), 0)
    with runners._configured(module, configuration):
        for case in map(draw, range(40)):
            exempt, inert = (
                pool_after(backend, convolution, case, exempt=form) for form in (True, False)
            )
            seen["batches"] += 1
            seen["differ"] += int((exempt[1:] != inert[1:]).any((1, 2)).sum())
            seen["slot 0"] += bool((exempt[0] != inert[0]).any())
            seen["moved"] += bool((exempt != case.pool).any())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
