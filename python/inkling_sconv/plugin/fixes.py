"""Fixes for the code around the Inkling backend: CUDA-graph runners and the draft's conv state.

Each fix asks ``probe/runners.py`` whether SGLang does the harm, and wraps the methods that do it.
docs/fixes.md describes them. Fixes are applied only in processes that serve Inkling: the runners
serve other models too, but fixes are tested with Inkling only.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import wrapt

from inkling_sconv import names
from inkling_sconv.errors import describe_error
from inkling_sconv.plugin.convolution import InklingShortConvolution
from inkling_sconv.plugin.settings import DraftExtend, log, read_draft_extend, read_fix_names
from inkling_sconv.probe import runners
from inkling_sconv.probe.backend import (
    fills_draft_extend,
    find_backends,
    leaves_draft_extend_alone,
)
from inkling_sconv.probe.stand_ins import Override


@dataclass(frozen=True)
class Fix:
    """One fix: what is wrong, how to tell, and how to change it."""

    name: str
    change: str
    """The upstream pull request or release with the same fix; ``ours`` if there is none."""
    module: str
    """The SGLang module that it changes. The fix is applied when SGLang imports it."""
    harm: str
    """What SGLang does wrong, as the log line says it."""
    is_needed: Callable[[ModuleType], bool]
    """Whether the module does the harm. Raises SGLang's own exception if its method cannot run."""
    apply: Callable[[ModuleType], None]
    default_for: frozenset[str] = frozenset()
    """States of the backend for which it is on by default. docs/evidence.md has the figures."""
    needs_draft_extend_exemption: bool = False
    """Whether it works only with a refresh that leaves draft-extend alone."""


def _clear_stale_rows(module: ModuleType) -> None:
    """Zero the track fields past the live batch."""

    @wrapt.patch_function_wrapper(module.PrefillCudaGraphRunner, "load_batch")
    def load_batch(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        for name in runners.TRACK_FIELDS:
            if runner.buffer_registry.has_slot(name):
                runner.buffer_registry.get_slot(name).buffer[runner.raw_bs :].zero_()
        return batch


def _track_under_speculation(module: ModuleType) -> None:
    """Decide on tracking as if there were no speculative algorithm."""

    @wrapt.patch_function_wrapper(module.PrefillCudaGraphRunner, "_is_mamba_track_enabled")
    def decide(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        model_runner = runner.model_runner
        algorithm = Override(model_runner.spec_algorithm, is_none=lambda: True)
        model_runner = Override(model_runner, spec_algorithm=algorithm)
        return wrapped.__func__(Override(runner, model_runner=model_runner), *args, **kwargs)


def _leave_draft_extend_alone(module: ModuleType) -> None:
    """Return from the refresh in draft-extend without indices, as SGLang does since 0.5.22."""

    def refresh(wrapped: Any, backend: Any, args: Any, kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["forward_batch"]
        if not batch.forward_mode.is_draft_extend_v2():
            return wrapped(*args, **kwargs)
        backend.sconv_metadata.track_conv_indices = None
        return None

    for backend in find_backends(module):
        wrapt.wrap_function_wrapper(backend, names.REFRESH, refresh)
        if not leaves_draft_extend_alone(backend):
            raise RuntimeError(f"{backend.__qualname__} does not leave draft-extend alone")


def _keep_draft_checkpoints(module: ModuleType) -> None:
    """Give draft-extend graphs a static buffer of checkpoint slots, ``[max_bs]`` int64.

    Captures record it, and ``prepare`` fills it before each replay. Padded rows point at slot 0,
    which every pool reserves. Their accepted count is negative, so they write nothing.
    """
    multi_step_runner = module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    single_step_runner = module.MultiLayerEagleDraftExtendCudaGraphRunner

    @wrapt.patch_function_wrapper(multi_step_runner, "_allocate_buffers")
    def allocate(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        buffers = wrapped(*args, **kwargs)
        if _translates_slots_on_host(runner):
            # The import that logged the fix as applied came before the pool.
            log(
                logging.WARNING,
                "draft-checkpoint: slots are translated on the host, as in a unified pool; "
                "draft-extend graphs keep no checkpoints.",
            )
        else:
            buffers.mamba_track_indices = torch.zeros(
                runner.max_bs, dtype=torch.int64, device=buffers.seq_lens.device
            )
        return buffers

    @wrapt.patch_function_wrapper(single_step_runner, "get_forward_batch")
    def get_forward_batch(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        slots = getattr(runner.buffers, "mamba_track_indices", None)
        if slots is not None:
            batch.mamba_track_indices = slots[: batch.batch_size]
        return batch

    @wrapt.patch_function_wrapper(multi_step_runner, "prepare")
    def prepare(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        slots = getattr(runner.buffers, "mamba_track_indices", None)
        if slots is not None:
            batch = args[0] if args else kwargs["forward_batch"]
            live = 0 if batch.mamba_track_indices is None else batch.batch_size
            slots[live:].zero_()
            if live:
                slots[:live].copy_(batch.mamba_track_indices[:live])
        return result


def _translates_slots_on_host(runner: Any) -> bool:
    """Whether slots are translated on the host: a graph would bake in its capture's slots."""
    sidecars = (
        getattr(backend, "short_conv_backend", None)
        for backend in runner.draft_extend_attn_backend_list
    )
    return not all(getattr(sidecar, "_slot_gather_recordable", False) for sidecar in sidecars)


def _place_draft_checkpoints(module: ModuleType) -> None:
    """Replace the method that moves the draft's conv state on and keeps its checkpoint."""
    cls = module.ShortConvolution
    context = importlib.import_module(names.CONFIG_MODULES[0])
    cls._inkling_sconv_interval = staticmethod(lambda: _read_track_grid(module, context))
    name = "_update_sconv_cache_for_draft_extend"
    setattr(cls, name, vars(InklingShortConvolution)[name])


def _read_track_grid(module: ModuleType, context: Any) -> int:
    """Read how many tokens are between two checkpoints of decoding; 0 if it keeps none."""
    mamba = module.get_exec().mamba
    # Releases differ in who knows whether the extra buffer is on.
    if hasattr(module, "mamba_extra_buffer_enabled"):
        keeps = module.mamba_extra_buffer_enabled()
    elif hasattr(mamba, "enable_mamba_extra_buffer"):
        keeps = mamba.enable_mamba_extra_buffer
    else:
        keeps = module.get_server_args().enable_mamba_extra_buffer()
    if not keeps:
        return 0
    if hasattr(context, names.TRACK_GRID):
        return int(getattr(context, names.TRACK_GRID)(context.get_schedule().page_size))
    return int(mamba.mamba_track_interval)


def _clear_draft_states_once(module: ModuleType) -> None:
    """Skip the call in draft-extend: the prefill has cleared and copied already."""
    worker = module.MultiLayerEagleDraftWorker

    @wrapt.patch_function_wrapper(worker, "_apply_deferred_mamba_init_to_draft_pools")
    def clear(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["forward_batch"]
        return None if batch.forward_mode.is_draft_extend_v2() else wrapped(*args, **kwargs)


FIXES = (
    Fix(
        name="prefill-rows",
        change="#34184",
        module=names.PREFILL_RUNNER_MODULE,
        harm="a prefill graph's replay also tracks rows left over from the last one",
        is_needed=runners.leaves_stale_rows,
        apply=_clear_stale_rows,
        default_for=frozenset({"untracked", "crashing"}),
    ),
    Fix(
        name="prefill-tracking",
        change="#34043",
        module=names.PREFILL_RUNNER_MODULE,
        harm="prefill graphs track no conv windows under a speculative algorithm",
        is_needed=lambda module: (
            not runners.tracks_conv_windows(module, speculative=True)
            and runners.tracks_conv_windows(module, speculative=False)
        ),
        apply=_track_under_speculation,
        default_for=frozenset({"untracked"}),
    ),
    Fix(
        name="draft-extend",
        change="0.5.22",
        module=names.BACKEND_MODULE,
        harm="draft-extend graphs record tracking that only ever writes the dummy slot",
        is_needed=lambda module: (
            read_draft_extend() is DraftExtend.EXEMPT
            and any(map(fills_draft_extend, find_backends(module)))
        ),
        apply=_leave_draft_extend_alone,
    ),
    Fix(
        name="draft-checkpoint",
        change="0.5.22",
        module=names.DRAFT_EXTEND_RUNNER_MODULE,
        harm="draft-extend graphs keep no checkpoint of the draft's conv state",
        is_needed=runners.drops_draft_checkpoints,
        apply=_keep_draft_checkpoints,
        default_for=frozenset({"untracked", "crashing"}),
        needs_draft_extend_exemption=True,
    ),
    Fix(
        name="draft-window",
        change="ours",
        module=names.SHORT_CONVOLUTION_MODULE,
        harm="the draft's checkpoint is not the window that ends on its boundary",
        is_needed=runners.misplaces_draft_checkpoints,
        apply=_place_draft_checkpoints,
        default_for=frozenset({"untracked", "crashing", "exempt"}),
    ),
    Fix(
        name="draft-state",
        change="0.5.20",
        module=names.DRAFT_WORKER_MODULE,
        harm="each draft-extend clears the draft's conv state again",
        is_needed=runners.clears_draft_states_again,
        apply=_clear_draft_states_once,
        default_for=frozenset({"untracked", "crashing"}),
    ),
)


def install_fixes(backends: Sequence[type], states: set[str]) -> None:
    """Apply the fixes that are asked for and needed, each when SGLang imports its module, or now.

    Args:
        backends: the Inkling backends of the process, after any replacement.
        states: their states before it. Without ``INKLING_SCONV_FIXES``, these decide which fixes
            are on.
    """
    asked = _read_requested_fixes([fix.name for fix in FIXES if states & fix.default_for])
    for fix in FIXES:
        is_on = bool(states & fix.default_for) if asked is None else fix.name in asked
        if not is_on:
            continue
        if fix.needs_draft_extend_exemption and not all(map(leaves_draft_extend_alone, backends)):
            if asked is not None:
                log(
                    logging.WARNING,
                    f"{fix.name}: the refresh overwrites its slots in draft-extend; left alone. "
                    f"It needs draft-extend, and {names.DRAFT_EXTEND_VARIABLE} unset.",
                )
            continue
        wrapt.register_post_import_hook(functools.partial(_apply_if_needed, fix), fix.module)


def _read_requested_fixes(default: Sequence[str]) -> set[str] | None:
    """Read the known names in ``INKLING_SCONV_FIXES``.

    None, if the variable is unset or empty, or names neither a known fix nor ``none``: then the
    fixes of ``default`` are on.
    """
    asked = read_fix_names()
    if asked is None:
        return None
    known = [fix.name for fix in FIXES]
    choose = f"choose from {', '.join(known)}, or none."
    if asked.isdisjoint({*known, "none"}):
        on = f"the defaults stay on ({', '.join(default)})" if default else "no fix is on"
        log(logging.WARNING, f"{names.FIXES_VARIABLE} names no known fix, so {on}; {choose}")
        return None
    if unknown := asked.difference(known, {"none"}):
        ignored = ", ".join(sorted(unknown))
        log(logging.WARNING, f"{names.FIXES_VARIABLE}: ignored unknown fix {ignored}; {choose}")
    return asked.intersection(known)


def _apply_if_needed(fix: Fix, module: ModuleType) -> None:
    """Apply ``fix`` if ``module`` does the harm. If the harm is still there, restore the classes.

    Never raises: an exception would propagate into SGLang's own import.
    """
    restore_classes = save_classes(module)

    def is_needed() -> bool:
        # SGLang builds models, and imports modules meanwhile, with the GPU as default device.
        with torch.device("cpu"):
            return fix.is_needed(module)

    try:
        if not is_needed():
            return
        fix.apply(module)
        if not is_needed():
            log(logging.WARNING, f"{fix.name} ({fix.change}): {fix.harm}; fix applied.")
            return
        why = "it does not help here"
    except Exception as error:
        why = describe_error(error)
    restore_classes()
    log(logging.ERROR, f"{fix.name} ({fix.change}): {why}; left alone.")


def save_classes(module: ModuleType) -> Callable[[], None]:
    """Return a function that restores the current attributes of the classes of ``module``."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    saved = [(cls, dict(vars(cls))) for cls in classes if cls.__module__ == module.__name__]

    def restore() -> None:
        for cls, attributes in saved:
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if name not in vars(cls) or vars(cls)[name] is not value:
                    setattr(cls, name, value)

    return restore
