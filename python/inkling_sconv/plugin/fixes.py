"""Fixes of what is around the Inkling backend: CUDA-graph runners, and the draft's conv state.

A fix asks ``runners.py`` whether its harm is there, and wraps the methods that do it. It is for
processes that serve Inkling: the runners serve other models too, which it has not been tried on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import wrapt

from inkling_sconv import names
from inkling_sconv.names import FIXES_VARIABLE
from inkling_sconv.plugin.convolution import InklingShortConvolution
from inkling_sconv.plugin.settings import describe_error, log, read_fix_names
from inkling_sconv.probe import runners
from inkling_sconv.probe.backend import leaves_draft_extend_alone


@dataclass(frozen=True)
class Fix:
    """``module`` is the one it waits for, ``change`` the upstream change that mended the same."""

    name: str
    change: str
    module: str
    harm: str
    is_needed: Callable[[ModuleType], bool]
    apply: Callable[[ModuleType], None]
    default_for: frozenset[str] = frozenset()
    """States of the backend where it is on by default: docs/evidence.md has the figures."""
    needs_draft_extend_exemption: bool = False
    """Whether it needs a refresh that leaves draft-extend alone."""


def _clear_stale_rows(module: ModuleType) -> None:
    """After every load of a batch, nothing is tracked past its rows."""

    def load_batch(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        for name in (names.TRACK_MASK, names.TRACK_INDICES):
            if runner.buffer_registry.has_slot(name):
                runner.buffer_registry.get_slot(name).buffer[runner.raw_bs :].zero_()
        return batch

    wrapt.wrap_function_wrapper(module.PrefillCudaGraphRunner, "load_batch", load_batch)


class _WithoutSpeculation:
    """A runner as its ``_is_mamba_track_enabled`` would see it with no speculative algorithm."""

    def __init__(self, of: Any, **instead: Any):
        self._of = of
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return self._instead[name] if name in self._instead else getattr(self._of, name)

    @classmethod
    def of(cls, runner: Any) -> _WithoutSpeculation:
        algorithm = cls(runner.model_runner.spec_algorithm, is_none=lambda: True)
        return cls(runner, model_runner=cls(runner.model_runner, spec_algorithm=algorithm))


def _track_under_speculation(module: ModuleType) -> None:
    """The runner decides on tracking as it would without a speculative algorithm."""

    def decide(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        return wrapped.__func__(_WithoutSpeculation.of(runner), *args, **kwargs)

    wrapt.wrap_function_wrapper(module.PrefillCudaGraphRunner, "_is_mamba_track_enabled", decide)


def _keep_draft_checkpoints(module: ModuleType) -> None:
    """A graph-static buffer of checkpoint slots, recorded by captures and filled before replays.

    Padded rows point at slot 0, which every pool reserves; their accepted count is negative, so
    they write nothing at all.
    """

    def allocate(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        buffers = wrapped(*args, **kwargs)
        if not _translates(runner):
            buffers.mamba_track_indices = torch.zeros(
                runner.max_bs, dtype=torch.int64, device=buffers.seq_lens.device
            )
        return buffers

    def get_forward_batch(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        slots = getattr(runner.buffers, "mamba_track_indices", None)
        if slots is not None:
            batch.mamba_track_indices = slots[: batch.batch_size]
        return batch

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

    whole = module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    step = module.MultiLayerEagleDraftExtendCudaGraphRunner
    wrapt.wrap_function_wrapper(whole, "_allocate_buffers", allocate)
    wrapt.wrap_function_wrapper(step, "get_forward_batch", get_forward_batch)
    wrapt.wrap_function_wrapper(whole, "prepare", prepare)


def _translates(runner: Any) -> bool:
    """Whether slot ids are translated on the host: a graph would keep those of its capture."""
    sidecars = (
        getattr(backend, "short_conv_backend", None)
        for backend in runner.draft_extend_attn_backend_list
    )
    return not all(getattr(sidecar, "_slot_gather_recordable", False) for sidecar in sidecars)


def _place_draft_checkpoints(module: ModuleType) -> None:
    """The draft's convolution moves its state on, and keeps a checkpoint of it, by our method."""
    cls = module.ShortConvolution
    cls._inkling_sconv_interval = staticmethod(
        lambda: int(module.get_exec().mamba.mamba_track_interval)
    )
    name = "_update_sconv_cache_for_draft_extend"
    setattr(cls, name, vars(InklingShortConvolution)[name])


def _clear_draft_states_once(module: ModuleType) -> None:
    """The draft's worker clears and copies nothing in draft-extend: the prefill has done it."""

    def apply(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["forward_batch"]
        return None if batch.forward_mode.is_draft_extend_v2() else wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(
        module.MultiLayerEagleDraftWorker, "_apply_deferred_mamba_init_to_draft_pools", apply
    )


FIXES = (
    Fix(
        "prefill-rows",
        "#34184",
        names.PREFILL_RUNNER_MODULE,
        "a replay of a prefill graph tracks rows of the last one past its own",
        runners.leaves_stale_rows,
        _clear_stale_rows,
        default_for=frozenset({"untracked", "crashing"}),
    ),
    Fix(
        "prefill-tracking",
        "#34043",
        names.PREFILL_RUNNER_MODULE,
        "prefill graphs track nothing under a speculative algorithm",
        lambda module: (
            not runners.tracks_conv_windows(module, speculative=True)
            and runners.tracks_conv_windows(module, speculative=False)
        ),
        _track_under_speculation,
        default_for=frozenset({"untracked"}),
    ),
    Fix(
        "draft-checkpoint",
        "0.5.22",
        names.DRAFT_EXTEND_RUNNER_MODULE,
        "draft-extend graphs keep no checkpoint of the draft's conv state",
        runners.drops_draft_checkpoints,
        _keep_draft_checkpoints,
        default_for=frozenset({"untracked", "crashing"}),
        needs_draft_extend_exemption=True,
    ),
    Fix(
        "draft-window",
        "ours",
        names.SHORT_CONVOLUTION_MODULE,
        "the draft's checkpoint is not the window that ends on its boundary",
        runners.misplaces_draft_checkpoints,
        _place_draft_checkpoints,
        default_for=frozenset({"untracked", "crashing"}),
    ),
    Fix(
        "draft-state",
        "0.5.20",
        names.DRAFT_WORKER_MODULE,
        "each draft-extend clears the draft's conv state again",
        runners.clears_draft_states_again,
        _clear_draft_states_once,
        default_for=frozenset({"untracked", "crashing"}),
    ),
)


def install_fixes(backends: Sequence[type], states: set[str]) -> None:
    """Apply every fix that is asked for and needed, when SGLang imports its module; or at once.

    ``states`` are those in which ``backends`` were found; they decide which fixes are on by
    default.
    """
    asked = _select_asked()
    for fix in FIXES:
        if fix.name not in asked if asked is not None else not states & fix.default_for:
            continue
        if fix.needs_draft_extend_exemption and not all(map(leaves_draft_extend_alone, backends)):
            if asked is not None:
                log(
                    logging.WARNING,
                    f"{fix.name}: the refresh overwrites its slots in draft-extend; left alone. "
                    "It takes INKLING_SCONV=fast, and INKLING_SCONV_DRAFT_EXTEND unset.",
                )
            continue
        wrapt.register_post_import_hook(functools.partial(_apply_where_needed, fix), fix.module)


def _select_asked() -> set[str] | None:
    """The fixes that ``INKLING_SCONV_FIXES`` names, with a warning for unknown names.

    None where the variable is unset or empty.
    """
    asked = read_fix_names()
    if asked is None:
        return None
    known = [fix.name for fix in FIXES]
    if unknown := asked.difference(known):
        log(
            logging.WARNING,
            f"{FIXES_VARIABLE}: no fix is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(known)}, and none.",
        )
    return asked.intersection(known)


def _apply_where_needed(fix: Fix, module: ModuleType) -> None:
    # An exception here would propagate into SGLang's own import.
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    before = [(cls, dict(vars(cls))) for cls in classes if cls.__module__ == module.__name__]

    def is_needed() -> bool:
        # SGLang builds models, and imports modules meanwhile, with the GPU as default device.
        with torch.device("cpu"):
            return fix.is_needed(module)

    try:
        if not is_needed():
            return
        fix.apply(module)
        if not is_needed():
            log(logging.WARNING, f"{fix.name} ({fix.change}): {fix.harm}; mended.")
            return
        why = "it does not help here"
    except Exception as error:
        why = describe_error(error)
    for cls, attributes in before:
        for name in [name for name in vars(cls) if name not in attributes]:
            delattr(cls, name)
        for name, value in attributes.items():
            if vars(cls)[name] is not value:
                setattr(cls, name, value)
    log(logging.ERROR, f"{fix.name} ({fix.change}): {why}; left alone.")
