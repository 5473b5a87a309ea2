"""Fixes of the CUDA-graph runners around the Inkling backend, each by name.

A fix asks ``runners.py`` whether its harm is there, and wraps the runner's own methods. It is for
processes that serve Inkling: the same runners serve other models, which it has not been tried on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import wrapt

from inkling_sconv import runners


@dataclass(frozen=True)
class Fix:
    """``module`` is the one it waits for, ``change`` the upstream change that mended the same."""

    name: str
    change: str
    module: str
    harm: str
    harms: Callable[[ModuleType], bool]
    mend: Callable[[ModuleType], None]
    proven: bool
    """On by default: docs/evidence.md has the figure without it and with it."""


def _clear_stale_rows(module: ModuleType) -> None:
    """After every load of a batch, nothing is tracked past its rows."""

    def load_batch(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        batch = wrapped(*args, **kwargs)
        for name in runners.TRACK_FIELDS:
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
            live = 0 if batch.mamba_track_indices is None else runner.raw_bs
            slots[live : runner.bs].zero_()
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


FIXES = (
    Fix(
        "prefill-rows",
        "#34184",
        runners.PREFILL,
        "a prefill graph's replay tracks rows of the last one past its own",
        runners.leaves_stale_rows,
        _clear_stale_rows,
        proven=True,
    ),
    Fix(
        "prefill-tracking",
        "#34043",
        runners.PREFILL,
        "prefill graphs track nothing under a speculative algorithm",
        lambda module: (
            not runners.tracks(module, speculative=True)
            and runners.tracks(module, speculative=False)
        ),
        _track_under_speculation,
        proven=False,
    ),
    Fix(
        "draft-checkpoint",
        "0.5.22",
        runners.DRAFT_EXTEND,
        "draft-extend graphs keep no checkpoint of the draft's conv state",
        runners.drops_draft_checkpoints,
        _keep_draft_checkpoints,
        proven=False,
    ),
)
