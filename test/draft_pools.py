"""SGLang's own convolution in draft-extend, its Triton kernels interpreted on the CPU.

Scenarios of ``test/drive.py``: it beside our method, and after our refresh in both forms.
"""

import contextlib
import importlib
import os
import random
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def configure(module: Any, interval: int) -> Iterator[None]:
    """Turn tracking on in any release, with a boundary every ``interval`` tokens."""
    settings = SimpleNamespace(mamba_track_interval=interval, enable_mamba_extra_buffer=True)
    # Goes into the kernel, which takes a bool.
    enabled = mock.patch.object(module, "mamba_extra_buffer_enabled", lambda: True, create=True)
    with enabled, use_configuration(vars(module), AllOn(mamba=settings)):
        yield


def draw_step(draw: random.Random, front: int = 0) -> Step:
    """A step of up to six requests, some of them padded, that leaves slot 0 alone."""
    requests, width = draw.randint(1, 6), draw.randint(1, 6)
    order = draw.sample(range(1, 2 * requests + 1), 2 * requests)
    return Step(
        order[:requests],
        [draw.randint(-1, width) for _ in range(requests)],
        [draw.randint(0, 40) for _ in range(requests)],
        order[requests:] if draw.random() < 0.8 else None,
        2 * requests + 1,
        width=width,
        front=front,
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
        with configure(module, step.interval):
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


def compare_pools() -> dict[str, int]:
    """Draft-extend exempt against inert: in how many of 40 steps they leave other slots."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    (backend,) = probe.find_backends(importlib.import_module(names.BACKEND_MODULE))
    module, draw = import_convolution(), random.Random(0)
    found = dict.fromkeys(("steps", "differ", "slot 0", "moved"), 0)
    for _ in range(40):
        step = draw_step(draw, front=draw.choice((0, 4)))
        with configure(module, step.interval):
            exempt, inert = (
                fill_pool(backend, module.ShortConvolution, step, exempt=form)
                for form in (True, False)
            )
        # Slot 0 is the second of the buffer.
        found["steps"] += 1
        found["slot 0"] += not torch.equal(exempt[1], inert[1])
        found["differ"] += not torch.equal(exempt[2:], inert[2:])
        found["moved"] += not torch.equal(exempt, step.memory()[1])
    return found


def fill_pool(backend: type, convolution: type, step: Step, *, exempt: bool) -> torch.Tensor:
    """The cache of ``step`` after our refresh and SGLang's convolution, as a capture runs them."""

    def update(hidden: torch.Tensor, cache: torch.Tensor, **rest: Any) -> None:
        rig = probe.Rig(backend, window=step.window)
        rig.backend._inkling_sconv_exempt_draft_extend = exempt
        batch = rig.make_batch("DRAFT_EXTEND_V2", step.rows)
        batch.seq_lens = rest["seq_lens"]
        batch.spec_info = SimpleNamespace(
            num_accept_tokens=rest["accepted"], num_front_tokens=step.front
        )
        starts = [(step.width + step.front) * r for r in range(step.rows + 1)]
        # Warm-up and capture.
        for _ in range(2):
            indices = rig.refresh(batch, starts, on_graph_path=True)
        assert (indices is None) == exempt
        members = {"_conv_state": lambda self, batch: SimpleNamespace()}
        host: Any = object.__new__(type("Host", (convolution,), members))
        hidden = hidden.flatten(0, 1)
        host._prepare_extend_sconv_cache(batch, cache, hidden, indices)
        host._update_sconv_cache_for_draft_extend(batch, cache, rest["cache_indices"], hidden)

    return run(update, step)


def name_track_slots() -> dict[str, Any]:
    """The checkpoint slots that steps name before, in and after a step that crosses a boundary.

    The request has slots 5 and 6. ``overlap``: the scheduler launches each step before it has
    processed the result of the one before it. ``in turn``: after that. ``kept``: the slot that a
    finished request would leave in the prefix cache.
    """
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components import batch_result_processor as results
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    processor = object.__new__(results.SchedulerBatchResultProcessor)
    # A frozen dataclass with slots, in some releases.
    object.__setattr__(processor, "tree_cache", Stub(page_size=64))
    pool = object.__new__(HybridReqToTokenPool)
    pool.mamba_ping_pong_track_buffer_size, pool.enable_mamba_extra_buffer_lazy = 2, False
    slots = pool.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.tensor([[5, 6]])
    make_tensor = torch.tensor

    def launch(request: Any) -> Any:
        batch = Stub(
            reqs=[request],
            req_to_token_pool=pool,
            req_pool_indices=make_tensor([0]),
            spec_algorithm=Stub(is_none=lambda: False),
        )
        schedule_batch.set_mamba_track_indices_from_reqs(batch)
        return batch

    def process(batch: Any, request: Any) -> None:
        request.seqlen += 4
        result = Stub(
            num_correct_drafts_per_req_cpu=[3],
            num_non_draft_tokens_per_req=1,
            grammar_retained_tokens=None,
        )
        processor._mamba_prefix_cache_update(request, batch, result, 0)

    def play(overlap: bool) -> list[int]:
        # The length with the last token, whose KV comes later: the first step goes from 62 to 66.
        request = Stub(
            seqlen=63,
            mamba_ping_pong_track_buffer=slots[0],
            mamba_next_track_idx=0,
            mamba_last_track_idx=1,
            mamba_last_track_seqlen=None,
        )
        request.kv = request
        named, waiting = [], []
        for _ in range(4 if overlap else 3):
            waiting.append(launch(request))
            named.append(int(waiting[-1].mamba_track_indices[0]))
            if len(waiting) > overlap:
                process(waiting.pop(0), request)
        kept.append(int(slots[0, pool.get_mamba_ping_pong_keep_idx(request)]))
        return named

    kept: list[int] = []
    settings = Stub(mamba=Stub(mamba_track_interval=64))
    with contextlib.ExitStack() as stack:
        for module in (schedule_batch, results):
            stack.enter_context(use_configuration(vars(module), settings))
        for name, value in (
            ("mamba_track_grid", lambda _: 64),
            ("mamba_extra_buffer_lazy_enabled", lambda: False),
        ):
            stack.enter_context(mock.patch.object(results, name, value, create=True))
        # There is no pinned memory without a GPU.
        unpinned = mock.patch.object(
            torch, "tensor", lambda *args, pin_memory=None, **rest: make_tensor(*args, **rest)
        )
        stack.enter_context(unpinned)
        found = {"overlap": play(True), "in turn": play(False)}
    return found | {"kept": kept[0] if kept[0] == kept[1] else kept}
