"""What SGLang's CUDA-graph runners do with the conv state's track fields, found by running them.

A runner's method is driven on CPU tensors, on an instance without a model: everything else that it
calls or reads is blank. Each question raises what the method raises where it cannot be driven.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from inkling_sconv.probe import CONFIG_MODULES

PREFILL = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
DRAFT_EXTEND = "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry"

CONVOLUTION = "sglang.srt.models.inkling_common.sconv"
WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2"
BATCH = "sglang.srt.managers.schedule_batch"
SPECULATION = "sglang.srt.speculative.spec_utils"

TRACK_FIELDS = ("mamba_track_mask", "mamba_track_indices")
"""What decides whether a recorded checkpoint scatter writes a row, and where to."""

CLEAR_FIELDS = ("mamba_clear_indices", "mamba_cow_src_indices", "mamba_cow_dst_indices")
"""Slots whose conv state a prefill clears, or copies from a cached prefix."""

_SLOTS = 4


@dataclasses.dataclass(init=False)
class _Blank:
    """False, smaller and larger than nothing; every attribute, item and call of it is blank too."""

    # A dataclass: some of what it stands for is copied with dataclasses.replace.
    def __init__(self, **_: Any):
        pass

    def __getattr__(self, name: str) -> _Blank:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Blank:
        return self

    def __getitem__(self, _: Any) -> _Blank:
        return self

    def __bool__(self) -> bool:
        return False

    def __lt__(self, _: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class _With:
    """Blank, but for the attributes it is given."""

    def __init__(self, **given: Any):
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Blank()


def leaves_stale_rows(module: ModuleType) -> bool:
    """Whether a prefill replay sees the last replay's track fields past the live batch.

    A batch of three requests is loaded, then one of one, into a graph of four request slots.
    """
    runner = module.PrefillCudaGraphRunner
    # Its registry as it builds it, but shared with nobody.
    registry = importlib.import_module(REGISTRY).build_prefill_registry(
        device=torch.device("cpu"),
        max_bs=_SLOTS,
        max_num_token=_SLOTS * 4,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
        share_pool=False,
    )
    host = _host(
        runner,
        "load_batch",
        buffer_registry=registry,
        capture_num_tokens=[_SLOTS * 4],
        _pad_to_bucket=lambda *_: _SLOTS * 4,
        _is_full_backend=True,
        _capture_req_slots=_SLOTS,
        _prefill_static_buffers=collections.defaultdict(
            lambda: torch.zeros(_SLOTS, dtype=torch.int64)
        ),
    )
    for requests in (3, 1):
        host.load_batch(_prefill_batch(requests))
    return any(registry.get_slot(name).buffer[1:].any() for name in TRACK_FIELDS)


def _prefill_batch(requests: int) -> _With:
    """A live batch of four tokens a request, every row tracked into slot 7."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    row = torch.ones(requests, dtype=torch.int64)
    token = torch.zeros(4 * requests, dtype=torch.int64)
    return _With(
        forward_mode=ForwardMode.EXTEND,
        batch_size=requests,
        input_ids=token,
        positions=token,
        out_cache_loc=token,
        mamba_track_mask=row.bool(),
        mamba_track_indices=row * 7,
        mamba_track_seqlens=row.int() * 64,
        seq_lens=row * 4,
        orig_seq_lens=row * 4,
        extend_seq_lens=row * 4,
        extend_prefix_lens=row * 0,
        extend_start_loc=row * 0,
        req_pool_indices=row,
    )


def tracks(module: ModuleType, *, speculative: bool) -> bool:
    """Whether prefill graphs track conv windows, with everything on that tracking needs."""
    runner = module.PrefillCudaGraphRunner
    host = _host(
        runner,
        "_is_mamba_track_enabled",
        model_runner=_On(spec_algorithm=_On(is_none=not speculative)),
    )
    with _configured(module, _On()):
        return bool(host._is_mamba_track_enabled())


@contextlib.contextmanager
def _configured(module: ModuleType, configuration: _On) -> Iterator[None]:
    """For its duration, every configuration that ``module`` reads is this one."""
    saved = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ in CONFIG_MODULES
    }
    vars(module).update(dict.fromkeys(saved, lambda: configuration))
    try:
        yield
    finally:
        vars(module).update(saved)


class _On:
    """A configuration in which everything is on, but what is given and what disables something."""

    def __init__(self, **given: Any):
        self.given = given

    def __getattr__(self, name: str) -> Any:
        if name in self.given:
            value = self.given[name]
            return (lambda: value) if isinstance(value, bool) else value
        if name.startswith("__"):
            raise AttributeError(name)
        return False if name.startswith("disable") else _On()

    def __call__(self) -> bool:
        return True


def drops_draft_checkpoints(module: ModuleType) -> bool:
    """Whether the batch of a draft-extend capture has no destination for the draft's checkpoints.

    Then the captured convolution records no tracking, and no replay keeps a checkpoint.
    """
    runner = module.MultiLayerEagleDraftExtendCudaGraphRunner
    buffers = _With(
        # The one that is sliced in its second dimension.
        mrope_positions=torch.zeros((3, _SLOTS), dtype=torch.int64),
        **{
            name: torch.zeros(_SLOTS, dtype=torch.int64)
            for name in ("seq_lens", "mamba_track_indices")
        },
    )
    host = _host(
        runner,
        "get_forward_batch",
        buffers=buffers,
        captured_req_width=1,
        extend_seq_lens_cpu=[1] * _SLOTS,
        num_front_tokens=0,
    )
    return host.get_forward_batch(2).mamba_track_indices is None


def misplaces_draft_checkpoints(module: ModuleType) -> bool:
    """Whether what draft-extend checkpoints is not the window that ends on the boundary.

    A request of six tokens accepts three more, with a boundary at eight; without front rows, and
    with four of them. Rows hold their positions.
    """
    interval, window, base, accepted, width = 8, 3, 6, 3, 3
    configuration = _On(mamba=_On(mamba_track_interval=interval))
    slots = torch.tensor([1])
    for front in (0, 4):
        conv = _host(
            module.ShortConvolution,
            "_update_sconv_cache_for_draft_extend",
            _conv_state=lambda _: _With(track_cache_indices=slots),
        )
        batch = _With(
            batch_size=1,
            seq_lens=torch.tensor([base + width]),
            mamba_track_indices=slots,
            spec_info=_With(num_accept_tokens=torch.tensor([accepted]), num_front_tokens=front),
        )
        cache = torch.zeros(2, window, 1)
        cache[0, :, 0] = torch.arange(base - window, base)
        rows = torch.arange(base - front, base + width, dtype=cache.dtype)[:, None]
        scatter = module.fused_draft_extend_sconv_cache
        module.fused_draft_extend_sconv_cache = _scatter  # type: ignore[attr-defined]
        try:
            with _configured(module, configuration):
                conv._update_sconv_cache_for_draft_extend(batch, cache, torch.tensor([0]), rows)
        finally:
            module.fused_draft_extend_sconv_cache = scatter  # type: ignore[attr-defined]
        if cache[1, :, 0].tolist() != list(range(interval - window, interval)):
            return True
    return False


def _scatter(
    *,
    hidden_states: torch.Tensor,
    sconv_cache: torch.Tensor,
    cache_indices: torch.Tensor,
    num_accept_tokens: torch.Tensor,
    draft_token_num: int,
    do_tracking: bool,
    crossed: torch.Tensor,
    track_step: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    **_: Any,
) -> None:
    """What SGLang's kernel of that name does with one request, on the CPU."""
    window, slot = sconv_cache.shape[1], int(cache_indices[0])
    rows = torch.cat([sconv_cache[slot], hidden_states.view(draft_token_num, -1)])
    if do_tracking and crossed[0]:
        step = int(track_step[0])
        sconv_cache[int(mamba_track_indices[0])] = rows[step : step + window]
    accepted = int(num_accept_tokens[0])
    sconv_cache[slot] = rows[accepted : accepted + window]


def clears_draft_states_again(module: ModuleType) -> bool:
    """Whether each draft-extend clears the draft's conv states, as the prefill before it did.

    Two things make it so: a batch that decodes still has what its prefill was to clear, and the
    draft's worker clears what a batch has in draft-extend too.
    """
    return _clears_in_draft_extend(module) and _decodes_with_slots_to_clear()


def _clears_in_draft_extend(module: ModuleType) -> bool:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cleared: list[Any] = []
    pool = _With(mamba_pool=_With(clear_slots=cleared.append))
    architecture = _With(architectures=["InklingForConditionalGenerationMTP"])
    worker = _host(
        module.MultiLayerEagleDraftWorker,
        "_apply_deferred_mamba_init_to_draft_pools",
        draft_runner=_With(model_config=_With(hf_config=architecture)),
        draft_runner_list=[_With(req_to_token_pool=pool)],
    )
    fields = dict.fromkeys(CLEAR_FIELDS) | {CLEAR_FIELDS[0]: torch.tensor([1])}
    worker._apply_deferred_mamba_init_to_draft_pools(
        _With(forward_mode=ForwardMode.DRAFT_EXTEND_V2, **fields)
    )
    return bool(cleared)


def _decodes_with_slots_to_clear() -> bool:
    module, speculation = map(importlib.import_module, (BATCH, SPECULATION))
    given = dict.fromkeys(CLEAR_FIELDS, torch.tensor([1]))
    batch = _host(
        module.ScheduleBatch, "prepare_for_decode", spec_algorithm=_On(is_none=False), **given
    )
    prepare = speculation.spec_prepare_for_decode
    speculation.spec_prepare_for_decode = _Blank()  # type: ignore[attr-defined]
    try:
        with _configured(module, _On()):
            batch.prepare_for_decode()
    finally:
        speculation.spec_prepare_for_decode = prepare  # type: ignore[attr-defined]
    return any(getattr(batch, name) is not None for name in CLEAR_FIELDS)


def _host(runner: type, method: str, **given: Any) -> Any:
    """An instance of ``runner`` with one real method; what is not given is blank."""
    names: dict[str, Any] = {
        name: _Blank()
        for base in runner.__mro__[:-1]
        for name, value in vars(base).items()
        if name != method
        and not name.startswith(("__", "_inkling_sconv"))
        and (inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod))
    }
    names |= {
        name: staticmethod(value) if inspect.isfunction(value) else value
        for name, value in given.items()
    }
    names["__getattr__"] = lambda self, name: _Blank()
    return object.__new__(type(runner.__name__, (runner,), names))
