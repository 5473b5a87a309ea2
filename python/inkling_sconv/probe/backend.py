"""Classify an Inkling backend by running it on CPU tensors.

The class runs without a model runner: on an instance made by ``object.__new__``, with the buffers
of its own ``_alloc_graph_buffers``, and with real ``ForwardBatch`` objects.
"""

import contextlib
import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from inkling_sconv.errors import describe_error
from inkling_sconv.names import (
    ALLOC_GRAPH_BUFFERS,
    REFRESH,
    TRACK_INDICES,
    TRACK_MASK,
    TRACK_SEQLENS,
)
from inkling_sconv.ops.track_conv_indices import track_conv_indices_ref
from inkling_sconv.probe.stand_ins import Blank, use_configuration

_UNSET = object()


class State(str, enum.Enum):
    """What a backend class does with a capture batch that carries no prefix lengths."""

    UNTRACKED = "untracked"
    """Returns early, without indices: the graph records no checkpoint scatter."""
    CRASHING = "crashing"
    """Dereferences the missing prefix lengths."""
    GUARDED = "guarded"
    """Gives inert indices."""
    EXEMPT = "exempt"
    """Gives inert indices to prefill; leaves draft-extend alone."""
    GRAFTED = "grafted"
    """Our method: like exempt or guarded, but refuses a live mask without prefix lengths."""
    UNKNOWN = "unknown"
    """Does something else, or cannot be run."""


@dataclass(frozen=True)
class Report:
    """The state of a class."""

    state: State
    why: str
    """The outcome that decided it, in one line."""
    capture: str
    """What a draft-extend capture did; empty if it could not be tried."""


def find_backends(module: ModuleType) -> list[type]:
    """Every class of ``module`` that defines the refresh itself, bases before subclasses."""
    found = {c for c in vars(module).values() if isinstance(c, type) and REFRESH in vars(c)}
    return sorted(found, key=lambda c: (len(c.__mro__), c.__qualname__))


class Rig:
    """One backend instance with allocated graph buffers, and without a model runner.

    Args:
        cls: the backend class.
        max_rows: requests that the static buffers hold.
        window: rows of one conv state (``conv_kernel - 1``).
        chunk_size: ``mamba_cache_chunk_size``, in tokens.
        device: where all tensors live.
    """

    def __init__(
        self,
        cls: type[Any],
        *,
        max_rows: int = 8,
        window: int = 3,
        chunk_size: int = 64,
        device: str = "cpu",
    ):
        self.device = device
        self.window = window
        self.chunk_size = chunk_size
        self.backend: Any = object.__new__(cls)
        self.backend.device = torch.device(device)
        self.backend.conv_state_len = window
        self.backend.mamba_cache_chunk_size = chunk_size
        self.backend._cache_indices_buf = None
        self.backend.req_to_token_pool = SimpleNamespace(size=max_rows)
        self.backend.sconv_metadata = SimpleNamespace(track_conv_indices=None)
        with contextlib.ExitStack() as stack:
            for base in cls.__mro__:
                if ALLOC_GRAPH_BUFFERS in vars(base):
                    method = inspect.unwrap(vars(base)[ALLOC_GRAPH_BUFFERS])
                    stack.enter_context(use_configuration(method.__globals__, Blank()))
            getattr(self.backend, ALLOC_GRAPH_BUFFERS)()

    def make_tensor(self, values: Sequence[int | bool], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``values`` on the rig's device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def make_batch(
        self,
        mode: str,
        rows: int,
        *,
        mask: Sequence[bool] | None = None,
        track_seqlens: Sequence[int] | None = None,
        prefix_lens: Sequence[int] | None = None,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.int64, torch.int32),
    ) -> Any:
        """A real ``ForwardBatch`` of ``rows`` requests in the ``ForwardMode`` named ``mode``.

        ``dtypes`` are those of ``track_seqlens`` and ``prefix_lens``. A field that is not given
        stays None.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        seqlens_dtype, prefix_dtype = dtypes
        empty = self.make_tensor([], torch.int64)
        batch = ForwardBatch(
            forward_mode=ForwardMode[mode],
            batch_size=rows,
            input_ids=empty,
            req_pool_indices=empty,
            seq_lens=empty,
            out_cache_loc=empty,
            seq_lens_sum=0,
        )
        if mask is not None:
            batch.mamba_track_mask = self.make_tensor(mask, torch.bool)
            batch.mamba_track_indices = self.make_tensor([0] * len(mask), torch.int64)
        if track_seqlens is not None:
            batch.mamba_track_seqlens = self.make_tensor(track_seqlens, seqlens_dtype)
        if prefix_lens is not None:
            batch.extend_prefix_lens = self.make_tensor(prefix_lens, prefix_dtype)
        return batch

    def refresh(
        self, batch: Any, query_start_loc: Sequence[int], *, on_graph_path: bool
    ) -> torch.Tensor | None:
        """Run the class's own refresh on ``batch`` and return its ``track_conv_indices``.

        ``query_start_loc``: cumulative query lengths, ``[rows + 1]``, in tokens. The result is
        ``[rows, window]``, or None.
        """
        metadata = self.backend.sconv_metadata
        metadata.query_start_loc = self.make_tensor(query_start_loc, torch.int32)
        metadata.track_conv_indices = None
        method = getattr(self.backend, REFRESH)
        _, graph = list(inspect.signature(method).parameters.values())[:2]
        if graph.kind is graph.KEYWORD_ONLY:
            method(batch, **{graph.name: on_graph_path})
        else:
            method(batch, on_graph_path)
        indices: torch.Tensor | None = metadata.track_conv_indices
        return indices

    def compute_reference(self, batch: Any) -> torch.Tensor:
        """The indices that ``batch`` should get, from the last refresh's ``query_start_loc``."""
        return track_conv_indices_ref(
            self.backend.sconv_metadata.query_start_loc,
            batch.mamba_track_seqlens,
            batch.extend_prefix_lens,
            rows=batch.batch_size,
            chunk_size=self.chunk_size,
            window=self.window,
        )


def leaves_draft_extend_alone(cls: type) -> bool:
    """Whether a draft-extend capture keeps its ``mamba_track_indices`` and returns no indices."""
    try:
        rig = Rig(cls)
        batch = rig.make_batch("DRAFT_EXTEND_V2", 2)
        slots = batch.mamba_track_indices = rig.make_tensor([5, 6], torch.int64)
        indices = rig.refresh(batch, [0, 4, 8], on_graph_path=True)
    except Exception:
        return False
    return indices is None and batch.mamba_track_indices is slots


def fills_draft_extend(cls: type) -> bool:
    """Whether a draft-extend capture gets inert track fields and indices."""
    return _capture(cls, "DRAFT_EXTEND_V2") == _INDICES


class _UnrecognisedError(Exception):
    """The class matches no known state."""


def classify(cls: type) -> Report:
    """Run ``cls`` and name its state. Never raises: a class that cannot be run is ``unknown``."""
    capture = ""
    try:
        capture = _capture(cls, "DRAFT_EXTEND_V2")
        prefill = _capture(cls, "EXTEND")
        _check_live(cls)
        state = _STATES.get((_kind(capture), _kind(prefill)))
        if state is State.CRASHING:
            # Confirm that the missing prefix causes the crash.
            capture_with_prefix = _capture(cls, "DRAFT_EXTEND_V2", prefix_lens=[0, 0])
            if _kind(capture_with_prefix) != _INDICES:
                raise _UnrecognisedError(f"with prefix lengths, capture: {capture_with_prefix}")
        if state in (State.GUARDED, State.EXEMPT) and _refuses_unmasked(cls):
            state = State.GRAFTED
        if state is None:
            raise _UnrecognisedError(f"draft-extend capture: {capture}; prefill capture: {prefill}")
        return Report(state, f"draft-extend capture: {capture}", capture)
    except Exception as error:
        why = str(error) if isinstance(error, _UnrecognisedError) else describe_error(error)
        return Report(State.UNKNOWN, why, capture)


_NONE, _INDICES, _RAISES = "no indices", "inert indices", "raises"
_STATES = {
    (_NONE, _NONE): State.UNTRACKED,
    (_RAISES, _RAISES): State.CRASHING,
    (_INDICES, _INDICES): State.GUARDED,
    (_NONE, _INDICES): State.EXEMPT,
}


def _kind(outcome: str) -> str:
    return outcome if outcome in (_NONE, _INDICES) else _RAISES


def _capture(cls: type, mode: str, prefix_lens: Sequence[int] | None = None) -> str:
    """Run a capture of two rows of four tokens without track metadata, and name the outcome."""
    rig = Rig(cls)
    batch = rig.make_batch(mode, 2, prefix_lens=prefix_lens)
    before = dict(vars(batch))
    try:
        indices = rig.refresh(batch, [0, 4, 8], on_graph_path=True)
    except Exception as error:
        return describe_error(error)
    changed = {name for name, value in vars(batch).items() if value is not before.get(name)}
    if indices is None:
        if changed:
            raise _UnrecognisedError(f"{mode} capture: no indices, but sets {_join(changed)}")
        return _NONE
    fields = {TRACK_MASK, TRACK_INDICES, TRACK_SEQLENS}
    if changed != fields or batch.mamba_track_mask.any() or batch.mamba_track_indices.any():
        raise _UnrecognisedError(
            f"{mode} capture: track fields are not inert (sets {_join(changed)})"
        )
    if not torch.equal(indices, rig.compute_reference(batch)):
        raise _UnrecognisedError(
            f"{mode} capture: indices differ from the reference: {indices.tolist()}"
        )
    return _INDICES


def _check_live(cls: type) -> None:
    """Check that a live batch gets the right indices and nothing else, and needs a prefix."""
    mask, track_seqlens = [True, False, True], [192, 64, 400]
    for on_graph_path in (False, True):
        rig = Rig(cls)
        batch = rig.make_batch(
            "EXTEND", 4, mask=mask, track_seqlens=track_seqlens, prefix_lens=[64, 128, 200]
        )
        hosts = (batch, rig.backend, rig.backend.sconv_metadata)
        before = [dict(vars(host)) for host in hosts]
        indices = rig.refresh(batch, [0, 128, 168, 368, 368], on_graph_path=on_graph_path)
        if indices is None or not torch.equal(indices, rig.compute_reference(batch)):
            got = None if indices is None else indices.tolist()
            raise _UnrecognisedError(f"live batch: indices differ from the reference: {got}")
        touched = {
            name
            for host, old in zip(hosts, before, strict=True)
            for name, value in vars(host).items()
            if value is not old.get(name, _UNSET)
        } - {"track_conv_indices", "query_start_loc"}
        if touched:
            raise _UnrecognisedError(f"live batch: also sets {_join(touched)}")
    rig = Rig(cls)
    try:
        batch = rig.make_batch("EXTEND", 3, mask=mask, track_seqlens=track_seqlens)
        rig.refresh(batch, [0, 128, 168, 368], on_graph_path=False)
    except Exception:
        return
    raise _UnrecognisedError("a live batch without extend_prefix_lens is accepted")


def _refuses_unmasked(cls: type) -> bool:
    rig = Rig(cls)
    batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        rig.refresh(batch, [0, 64], on_graph_path=True)
    except Exception:
        return True
    return False


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
