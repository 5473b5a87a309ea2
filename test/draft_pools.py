"""SGLang's own convolution in draft-extend, its Triton kernels interpreted on the CPU.

Scenarios of ``test/drive.py``: it beside our method, after our refresh in both forms, and with
SGLang's own backend on a pool whose slots are virtual.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from drafts_steps import Step, expected, run
from inkling_sconv import names
from inkling_sconv.errors import describe_error
from inkling_sconv.ops import draft_conv_state
from inkling_sconv.plugin import backend as plugin_backend
from inkling_sconv.plugin import convolution as plugin_convolution
from inkling_sconv.plugin.convolution import InklingShortConvolution
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe import runners as probe_runners
from inkling_sconv.probe.stand_ins import (
    AllOn,
    Blank,
    Stub,
    make_instance,
    use_configuration,
)
from kernel_tools import load_copy

UPDATE = "_update_sconv_cache_for_draft_extend"


def import_convolution() -> Any:
    """SGLang's module, imported again: Triton interprets a kernel if told so when it is defined."""
    sys.modules.pop(names.SHORT_CONVOLUTION_MODULE, None)
    os.environ["TRITON_INTERPRET"] = "1"
    return importlib.import_module(names.SHORT_CONVOLUTION_MODULE)


@contextlib.contextmanager
def configure(
    module: Any, interval: int, grid: int | None = None, *, extra_buffer: bool = True
) -> Iterator[None]:
    """Set what a release's convolution reads."""
    settings = SimpleNamespace(mamba_track_interval=interval)
    if not hasattr(module, "get_server_args"):
        settings.enable_mamba_extra_buffer = extra_buffer
    configuration = AllOn(mamba=settings, enable_mamba_extra_buffer=extra_buffer)
    with (
        # First, since it patches functions that are SGLang's own.
        use_configuration(vars(module), configuration),
        probe_runners.use_track_grid(module, interval, grid or interval),
        contextlib.ExitStack() as stack,
    ):
        if hasattr(module, name := "mamba_extra_buffer_enabled"):
            # Goes into the kernel, which takes a bool.
            stack.enter_context(mock.patch.object(module, name, lambda: extra_buffer))
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


def update_by(cls: type, module: Any, step: Step, *, flat: bool, shards: int = 1) -> torch.Tensor:
    """The cache of ``step`` after the method of ``cls``, on each of ``shards`` of the channels."""

    def update(hidden: torch.Tensor, cache: torch.Tensor, **rest: Any) -> None:
        for rows, part in zip(hidden.chunk(shards, 2), cache.chunk(shards, 2), strict=True):
            # A shard has a cache of its own; its rows may be a part of a projection's.
            update_shard(rows, own := part.contiguous(), **rest)
            part.copy_(own)

    def update_shard(hidden: torch.Tensor, cache: torch.Tensor, **rest: Any) -> None:
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


WIDTHS, SHARDS = (256, 512, 8200), (1, 2, 4, 8)
"""Channels of a convolution, and over how many GPUs they are sharded.

The first two are those of the tiny checkpoint's streams. The last gives shards of 1025 channels.
"""
WRONG_BLOCKS = {
    "whole blocks only": ("triton.cdiv(channels, block)", "max(channels // block, 1)"),
    "one block only": ("tl.program_id(1) * BLOCK + ", ""),
    "rows that lie side by side": ("        hidden_states.stride(1),\n", "        channels,\n"),
    "no more than 64 channels": ("channel < D", "channel < min(D, 64)"),
}


def compare_draft_states() -> dict[str, Any]:
    """How many of 200 steps cross a boundary, and in how many the two methods differ.

    ``sharded`` has shards (channels / GPUs) on which SGLang's method differs from itself on all
    channels, and one on which ours, or a wrong version of its kernel, differs from the formula.
    """
    module, draw = import_convolution(), random.Random(0)
    kinds = ("compared", "tracked", "crossed", "states", "checkpoints", "misplaced")
    found: dict[str, Any] = dict.fromkeys(kinds, 0)
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
    return found | {"sharded": compare_shards(module, draw)}


def compare_shards(module: Any, draw: random.Random) -> dict[str, list[str]]:
    steps = [
        dataclasses.replace(draw_step(draw), channels=width) for width in WIDTHS for _ in range(2)
    ]

    def differ(cls: type) -> Iterator[str]:
        for step, flat in itertools.product(steps, (False, True)):
            cache = expected(step)
            if cls is not InklingShortConvolution:
                cache = update_by(cls, module, step, flat=flat)
            for shards in SHARDS:
                if not torch.equal(update_by(cls, module, step, flat=flat, shards=shards), cache):
                    yield f"{step.channels}/{shards}"

    found = {"SGLang's": list(differ(module.ShortConvolution))}
    edits: dict[str, tuple[tuple[str, str], ...]] = {"ours": ()}
    edits |= {name: (edit,) for name, edit in WRONG_BLOCKS.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in edits.items():
            kernel = load_copy(draft_conv_state, Path(folder), *changes, interpret=True)
            with mock.patch.object(
                plugin_convolution, "update_draft_conv_state", kernel.update_draft_conv_state
            ):
                # One difference is enough to catch a wrong version.
                found[name] = list(itertools.islice(differ(InklingShortConvolution), 1))
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


# ------------------------------------------------------------------------- slots that are virtual

OWN, KEPT, SLOTS = [1, 3, 5], [8, 10, 12], 16
"""Virtual slots of three requests: their own states, and their checkpoints."""
TIMES = ("untranslated", "once", "twice")
INTERVAL, WINDOW = 64, 3
STORE = "metadata = self.sconv_metadata\n        rows"
TARGETS = "getattr(metadata, TRACK_CACHE_INDICES, forward_batch.mamba_track_indices)"
TRANSLATE = """metadata = self.sconv_metadata
        for host, name in ((metadata, TRACK_CACHE_INDICES), (forward_batch, "mamba_track_indices")):
            if getattr(host, name, None) is not None:
                setattr(host, name, self._translate_mamba_indices(getattr(host, name)))
        rows"""
WRONG_SINCE_METADATA = {
    "refresh, untranslated": (
        plugin_backend,
        STORE,
        STORE.replace(
            "\n", "\n        metadata.track_cache_indices = forward_batch.mamba_track_indices\n"
        ),
    ),
    "draft-window, untranslated": (
        plugin_convolution,
        TARGETS,
        "forward_batch.mamba_track_indices",
    ),
}
WRONG = {
    "refresh, twice": (plugin_backend, STORE, TRANSLATE),
    "draft-window, twice": (plugin_convolution, TARGETS, f"{TARGETS} + 1"),
    "draft-window, states twice": (
        plugin_convolution,
        "cache_indices,\n            forward_batch",
        "cache_indices + 1,\n            forward_batch",
    ),
}
"""Wrong versions: a module of ours, and an edit of it. The physical slot is the virtual one + 1."""


def make_unified_backend(cls: Any) -> Any:
    """SGLang's backend, made by its own ``__init__``, on its own unified pool."""
    pools = importlib.import_module("sglang.srt.mem_cache.unified_memory_pool")
    table = torch.tensor([0, *range(2, SLOTS), 1])
    pool = object.__new__(pools.UnifiedHybridReqToTokenPool)
    pool.mamba_allocator = pools.UnifiedMambaSlotAllocator(
        SimpleNamespace(virtual_to_physical=table), SLOTS - 1, "cpu"
    )
    pool.mamba_pool = SimpleNamespace(
        mamba_cache=SimpleNamespace(conv=[torch.zeros(1, SLOTS, WINDOW, 1)])
    )
    pool.req_index_to_mamba_index_mapping = torch.tensor([0, *OWN], dtype=torch.int32)
    pool.size = 4
    with contextlib.ExitStack() as stack:
        for init in filter(
            inspect.isfunction, (vars(base).get("__init__") for base in cls.__mro__)
        ):
            stack.enter_context(use_configuration(init.__globals__, Blank()))
        backend = cls(Stub(device="cpu", req_to_token_pool=pool))
    backend.mamba_cache_chunk_size = INTERVAL
    assert backend.conv_state_len == WINDOW
    return backend


def find_translation(cache: torch.Tensor, *, draft: bool) -> Any:
    """How often own slots and checkpoint slots were translated; what was written if neither fits.

    Rows of the request ``r`` hold ``r + 1``. Slot 0 is left out: it is there for dummy writes.
    """
    written = {slot: int(rows.max()) for slot, rows in enumerate(cache) if slot and rows.any()}

    def at(slots: list[int], times: int) -> dict[int, int]:
        return {slot + times: r for r, slot in enumerate(slots, 1)}

    for own, kept in itertools.product(range(3) if draft else [None], (None, *range(3))):
        states = {} if own is None else at(OWN, own)
        checkpoints = {} if kept is None else at(KEPT, kept)
        if written == states | checkpoints:
            found = "nothing" if kept is None else TIMES[kept]
            return [TIMES[own], found] if draft else found
    return written


def label_rows(width: int, requests: int) -> torch.Tensor:
    return torch.arange(1.0, requests + 1).repeat_interleave(width)[:, None]


def track_prefill(cls: type, module: Any, *, graph: bool) -> Any:
    """Where a prefill's windows land; with ``graph``, after a capture that tracked nothing."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    backend, rows = make_unified_backend(cls), len(OWN)
    row = torch.ones(rows, dtype=torch.int64)
    static = {
        "mamba_track_mask": row.bool() & (not graph),
        "mamba_track_indices": torch.tensor(KEPT) * (not graph),
        "mamba_track_seqlens": row * INTERVAL,
        "extend_prefix_lens": row * 0,
        "extend_seq_lens": row.int() * INTERVAL,
        "req_pool_indices": torch.arange(1, rows + 1),
        "seq_lens": row * INTERVAL,
    }

    def make_batch() -> Any:
        empty = torch.empty(0, dtype=torch.int64)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=rows,
            input_ids=empty,
            out_cache_loc=empty,
            seq_lens_sum=0,
            extend_num_tokens=rows * INTERVAL,
            **static,
        )

    batch = make_batch()
    if graph:
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    else:
        backend.init_forward_metadata(batch)
    metadata = backend.sconv_metadata
    if graph:
        static["mamba_track_mask"].fill_(True)
        static["mamba_track_indices"].copy_(torch.tensor(KEPT))
        backend.init_forward_metadata_out_graph(make_batch())
    cache = torch.zeros(SLOTS + 2, WINDOW, 1)
    host = make_instance(
        module.ShortConvolution, "_prepare_extend_sconv_cache", _conv_state=lambda _: metadata
    )
    host._prepare_extend_sconv_cache(
        batch, cache, label_rows(INTERVAL, rows), metadata.track_conv_indices
    )
    return find_translation(cache, draft=False)


def update_draft(module: Any, batch: Any, metadata: Any) -> torch.Tensor:
    """The draft's cache after ``ShortConvolution`` on a batch whose steps cross a boundary."""
    cache = torch.zeros(SLOTS + 2, WINDOW, 1)
    host = make_instance(module.ShortConvolution, UPDATE, _conv_state=lambda _: metadata)
    hidden = label_rows(2, batch.batch_size)
    with configure(module, INTERVAL):
        getattr(host, UPDATE)(batch, cache, metadata.cache_indices, hidden)
    return cache


def extend_draft_eagerly(cls: type, module: Any) -> list[Any]:
    """Where the state and the checkpoint land in each of two heads, which share a batch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows = len(OWN)
    row = torch.ones(rows, dtype=torch.int64)
    batch = Stub(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        batch_size=rows,
        req_pool_indices=torch.arange(1, rows + 1),
        seq_lens=row * INTERVAL,
        extend_seq_lens=row.int() * 2,
        extend_num_tokens=rows * 2,
        extend_prefix_lens=None,
        mamba_track_mask=None,
        mamba_track_indices=torch.tensor(KEPT),
        spec_info=SimpleNamespace(num_accept_tokens=row.int() * 2, num_front_tokens=0),
    )
    found = []
    for backend in (make_unified_backend(cls), make_unified_backend(cls)):
        backend.init_forward_metadata(batch)
        cache = update_draft(module, batch, backend.sconv_metadata)
        found.append(find_translation(cache, draft=True))
    return found


def replay_draft(cls: type, module: Any) -> Any:
    """Where they land when SGLang's runner captures a batch, and replays it for three requests."""
    from fix_scenarios import make_draft_runners, prepare
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runners = importlib.import_module(names.DRAFT_EXTEND_RUNNER_MODULE)
    backend = make_unified_backend(cls)
    whole, step = make_draft_runners(runners, [SimpleNamespace(short_conv_backend=backend)])
    batch, buffers = step.get_forward_batch(4), whole.buffers
    batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    metadata, caches = backend.sconv_metadata, []

    def graph(*_: Any) -> None:
        backend.init_forward_metadata_in_graph(batch)
        for name in ("cache_indices", names.TRACK_CACHE_INDICES):
            before, after = (getattr(m, name, None) for m in (metadata, backend.sconv_metadata))
            assert before is after is None or before.data_ptr() == after.data_ptr()
        caches.append(update_draft(module, batch, metadata))

    prepare(runners, whole, KEPT, len(OWN))
    for name, values in (
        ("req_pool_indices", [1, 2, 3, 0]),
        ("seq_lens", [INTERVAL] * 4),
        ("num_accept_tokens", [2, 2, 2, -1]),
    ):
        getattr(buffers, name).copy_(torch.tensor(values))
    runner = make_instance(
        runners.MultiLayerEagleDraftExtendCudaGraphRunner,
        "replay",
        buffers=buffers,
        captured_req_width=2,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        attn_backend=Stub(supports_draft_extend_metadata_staging=False),
        eagle_worker=SimpleNamespace(draft_extend_attn_backend_list=[backend]),
        step=0,
        model_runner=Stub(device_timer=None),
        _replay_graph=graph,
    )
    parameters = inspect.signature(runner.replay).parameters
    given = {name: None for name, p in parameters.items() if p.default is p.empty}
    runner.replay(**given | {"bs": 4})
    return find_translation(*caches, draft=True)


@contextlib.contextmanager
def use_cpu_kernels(module: Any) -> Iterator[None]:
    """Give the backend's ``module`` its gather of slots interpreted, and a stand-in beside it.

    The stand-in fills ``query_start_loc``, as the kernel that needs a GPU does.
    """

    def fill_metadata(*, out: Any = None, extend_seq_lens: torch.Tensor, **_: Any) -> Any:
        if out is None:
            return None
        out["query_start_loc"].zero_()[1:].copy_(extend_seq_lens.cumsum(0))
        return out["query_start_loc"], out["has_initial_state"], out

    patches = {"fused_extend_sconv_metadata": fill_metadata}
    # Since SGLang 0.5.23 the gather of slots translates them.
    if (gather := getattr(module, "fused_replay_state_indices", None)) is not None:
        interpreted = load_copy(sys.modules[gather.__module__], Path(), interpret=True)
        patches[gather.__name__] = getattr(interpreted, gather.__name__)
    # Of Triton's own functions, those that are kernels are not interpreted here.
    zeros = mock.patch("triton.language.zeros", lambda shape, dtype: tl.full(shape, 0, dtype))
    with mock.patch.multiple(module, **patches), zeros:
        yield


PHASES: dict[str, Callable[[type, Any], Any]] = {
    "prefill": functools.partial(track_prefill, graph=False),
    "prefill graph": functools.partial(track_prefill, graph=True),
    "draft-extend": extend_draft_eagerly,
    "draft-extend graph": replay_draft,
}


def compare_unified_pools() -> dict[str, Any]:
    """Where rows land on a unified pool: SGLang alone, with ours, and with wrong versions of it."""
    from fix_mutants import MUTANTS, build
    from inkling_sconv.plugin import fixes
    from sglang.srt.plugins import load_plugins

    backends = importlib.import_module(names.BACKEND_MODULE)
    runners = importlib.import_module(names.DRAFT_EXTEND_RUNNER_MODULE)
    (cls,) = probe.find_backends(backends)
    module = import_convolution()

    def play() -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        for phase, run_phase in PHASES.items():
            try:
                with use_cpu_kernels(backends):
                    outcomes[phase] = run_phase(cls, module)
            except Exception as error:
                outcomes[phase] = describe_error(error)
        return outcomes

    def apply_fixes(subject: Any) -> Callable[[], None]:
        restore = [fixes.save_classes(changed) for changed in (runners, module)]
        if fixes.runners.drops_draft_checkpoints(runners):
            subject._keep_draft_checkpoints(runners)
        subject._place_draft_checkpoints(module)
        return lambda: [put_back() for put_back in restore]

    found = {"stock": play()}
    load_plugins()
    assert probe.classify(cls).state is probe.State.GRAFTED
    put_back = apply_fixes(fixes)
    found["ours"] = play()
    wrong = WRONG
    if hasattr(backends.InklingShortConvMetadata, names.TRACK_CACHE_INDICES):
        wrong = wrong | WRONG_SINCE_METADATA
    with tempfile.TemporaryDirectory() as folder:
        for name, (changed, old, new) in wrong.items():
            copy = load_copy(changed, Path(folder), (old, new))
            host, part, method = {
                plugin_backend: (cls, "InklingSconvBackend", names.REFRESH),
                plugin_convolution: (module.ShortConvolution, "InklingShortConvolution", UPDATE),
            }[changed]
            with mock.patch.object(host, method, vars(getattr(copy, part))[method]):
                found[name] = play()
    put_back()
    if fixes.runners.drops_draft_checkpoints(runners):
        (mutant,) = (m for m in MUTANTS if m.name == "where slots are translated")
        apply_fixes(build(mutant))
        found["draft-checkpoint, untranslated"] = play()
    return found
