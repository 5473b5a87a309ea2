"""Find out what SGLang's CUDA-graph runners do with the conv state's track fields.

Each function runs one real method on CPU tensors, with stand-ins for everything else that the
method calls or reads. It raises what the method raises.
"""

import collections
import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from inkling_sconv.names import (
    BUFFER_REGISTRY_MODULE,
    CLEAR_FIELDS,
    CONFIG_MODULES,
    SCHEDULE_BATCH_MODULE,
    SPEC_UTILS_MODULE,
    TRACK_GRID,
    TRACK_INDICES,
    TRACK_MASK,
)
from inkling_sconv.probe.stand_ins import AllOn, Blank, Stub, make_instance, use_configuration

TRACK_FIELDS = (TRACK_MASK, TRACK_INDICES)
"""The fields that decide whether a recorded checkpoint scatter writes a row, and where."""

_SLOTS = 4


def leaves_stale_rows(module: ModuleType) -> bool:
    """Whether ``load_batch`` leaves track rows of an earlier batch past the live one.

    Loads a batch of three requests, then a batch of one.
    """
    runner = make_prefill_runner(module)
    for requests in (3, 1):
        runner.load_batch(make_prefill_batch(requests))
    return any(runner.buffer_registry.get_slot(name).buffer[1:].any() for name in TRACK_FIELDS)


def make_prefill_runner(module: ModuleType, *, tracking: bool = True) -> Any:
    """Make a prefill runner of four request slots on which only ``load_batch`` is real."""
    # SGLang's own registry, not shared with other runners.
    registry = importlib.import_module(BUFFER_REGISTRY_MODULE).build_prefill_registry(
        device=torch.device("cpu"),
        max_bs=_SLOTS,
        max_num_token=_SLOTS * 4,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=tracking,
        share_pool=False,
    )
    return make_instance(
        module.PrefillCudaGraphRunner,
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


def make_prefill_batch(requests: int) -> Stub:
    """Make a live batch of four tokens a request, each request tracked into slot 7."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    row = torch.ones(requests, dtype=torch.int64)
    token = torch.zeros(4 * requests, dtype=torch.int64)
    return Stub(
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


def tracks_conv_windows(module: ModuleType, *, speculative: bool) -> bool:
    """Whether prefill graphs track conv windows if all settings that tracking needs are on."""
    runner = make_instance(
        module.PrefillCudaGraphRunner,
        "_is_mamba_track_enabled",
        model_runner=AllOn(spec_algorithm=AllOn(is_none=not speculative)),
    )
    with use_configuration(vars(module), AllOn()):
        return bool(runner._is_mamba_track_enabled())


def drops_draft_checkpoints(module: ModuleType) -> bool:
    """Whether the batch of a draft-extend capture has no slots for the draft's checkpoints.

    If so, the graph records no tracking, and no replay keeps a checkpoint.
    """
    buffers = Stub(
        # Sliced in its second dimension, unlike the others.
        mrope_positions=torch.zeros((3, _SLOTS), dtype=torch.int64),
        **{
            name: torch.zeros(_SLOTS, dtype=torch.int64)
            for name in ("seq_lens", "mamba_track_indices")
        },
    )
    runner = make_instance(
        module.MultiLayerEagleDraftExtendCudaGraphRunner,
        "get_forward_batch",
        buffers=buffers,
        captured_req_width=1,
        extend_seq_lens_cpu=[1] * _SLOTS,
        num_front_tokens=0,
    )
    return runner.get_forward_batch(2).mamba_track_indices is None


def misplaces_draft_checkpoints(module: ModuleType) -> bool:
    """Whether draft-extend saves a window other than the one that ends on the boundary.

    A request of six tokens accepts three more. The boundary is at eight, and each row holds its
    position. Tried without front rows, with four, and where checkpoints lie on a grid of 16.
    """
    interval, window, base, accepted, width = 8, 3, 6, 3, 3
    slots = torch.tensor([1])
    for front, grid in ((0, interval), (4, interval), (0, 2 * interval)):
        conv = make_instance(
            module.ShortConvolution,
            "_update_sconv_cache_for_draft_extend",
            _conv_state=lambda _: Stub(track_cache_indices=slots),
        )
        batch = Stub(
            batch_size=1,
            seq_lens=torch.tensor([base + width]),
            mamba_track_indices=slots,
            spec_info=Stub(num_accept_tokens=torch.tensor([accepted]), num_front_tokens=front),
        )
        cache = torch.zeros(2, window, 1)
        cache[0, :, 0] = torch.arange(base - window, base)
        rows = torch.arange(base - front, base + width, dtype=cache.dtype)[:, None]
        scatter = module.fused_draft_extend_sconv_cache
        module.fused_draft_extend_sconv_cache = _update_cache_ref  # type: ignore[attr-defined]
        try:
            with use_track_grid(module, interval, grid) as has_grid:
                conv._update_sconv_cache_for_draft_extend(batch, cache, torch.tensor([0]), rows)
        finally:
            module.fused_draft_extend_sconv_cache = scatter  # type: ignore[attr-defined]
        crossed = grid == interval or not has_grid
        kept = list(range(interval - window, interval)) if crossed else [0] * window
        if cache[1, :, 0].tolist() != kept:
            return True
    return False


@contextlib.contextmanager
def use_track_grid(module: ModuleType, interval: int, grid: int) -> Iterator[bool]:
    """Set ``mamba_track_interval`` for a module, and the grid of checkpoints if SGLang has one.

    Yields whether it has one. Without it, ``interval`` alone counts.
    """
    context = importlib.import_module(CONFIG_MODULES[0])
    configuration = AllOn(mamba=AllOn(mamba_track_interval=interval))
    has_grid = hasattr(context, TRACK_GRID)
    with (
        use_configuration(vars(context), configuration),
        use_configuration(vars(module), configuration),
    ):
        # ``use_configuration`` restores it.
        if has_grid:
            setattr(context, TRACK_GRID, lambda _: grid)
        yield has_grid


def _update_cache_ref(
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
    """Do on the CPU what SGLang's ``fused_draft_extend_sconv_cache`` does with one request."""
    window, slot = sconv_cache.shape[1], int(cache_indices[0])
    rows = torch.cat([sconv_cache[slot], hidden_states.view(draft_token_num, -1)])
    if do_tracking and crossed[0]:
        step = int(track_step[0])
        sconv_cache[int(mamba_track_indices[0])] = rows[step : step + window]
    accepted = int(num_accept_tokens[0])
    sconv_cache[slot] = rows[accepted : accepted + window]


def clears_draft_states_again(module: ModuleType) -> bool:
    """Whether each draft-extend clears the draft's conv states again, after the prefill did.

    It does if a decoding batch still names the slots that its prefill has cleared already, and if
    the draft's worker clears them in draft-extend too.
    """
    return _clears_in_draft_extend(module) and _decodes_with_slots_to_clear()


def _clears_in_draft_extend(module: ModuleType) -> bool:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    cleared: list[Any] = []
    pool = Stub(mamba_pool=Stub(clear_slots=cleared.append))
    architecture = Stub(architectures=["InklingForConditionalGenerationMTP"])
    worker = make_instance(
        module.MultiLayerEagleDraftWorker,
        "_apply_deferred_mamba_init_to_draft_pools",
        draft_runner=Stub(model_config=Stub(hf_config=architecture)),
        draft_runner_list=[Stub(req_to_token_pool=pool)],
    )
    fields = dict.fromkeys(CLEAR_FIELDS) | {CLEAR_FIELDS[0]: torch.tensor([1])}
    worker._apply_deferred_mamba_init_to_draft_pools(
        Stub(forward_mode=ForwardMode.DRAFT_EXTEND_V2, **fields)
    )
    return bool(cleared)


def _decodes_with_slots_to_clear() -> bool:
    module, speculation = map(importlib.import_module, (SCHEDULE_BATCH_MODULE, SPEC_UTILS_MODULE))
    given = dict.fromkeys(CLEAR_FIELDS, torch.tensor([1]))
    batch = make_instance(
        module.ScheduleBatch, "prepare_for_decode", spec_algorithm=AllOn(is_none=False), **given
    )
    prepare = speculation.spec_prepare_for_decode
    speculation.spec_prepare_for_decode = Blank()  # type: ignore[attr-defined]
    try:
        with use_configuration(vars(module), AllOn()):
            batch.prepare_for_decode()
    finally:
        speculation.spec_prepare_for_decode = prepare  # type: ignore[attr-defined]
    return any(getattr(batch, name) is not None for name in CLEAR_FIELDS)
