"""Our refresh of the tracked conv windows. It meets docs/contract.md.

``graft.py`` puts the methods of ``InklingSconvBackend`` on SGLang's own Inkling backend, the host
below; the class is never instantiated. The methods use four attributes of the host:
``sconv_metadata``, ``conv_state_len``, ``mamba_cache_chunk_size`` and
``_graph_track_conv_indices``, the ``[max_rows, conv_state_len]`` int64 buffer that captured kernels
read.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from inkling_sconv.names import STATIC_INDICES, TRACK_CACHE_INDICES
from inkling_sconv.ops.track_conv_indices import track_conv_indices


class TrackContractError(RuntimeError):
    """A batch requests conv-window tracking, but its fields do not allow it."""


class InertTracking:
    """Track fields for a batch that tracks nothing, ``[max_rows]`` each: mask False, the others 0.

    A capture without track metadata gets slices of these, so the graph still records the checkpoint
    scatter. It writes nothing until a replay supplies a live mask. They are written once, here.
    """

    # Keyed by storage address. Weak, because a freed address may be given to another tensor.
    _instances: ClassVar[weakref.WeakValueDictionary[int, InertTracking]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, max_rows: int, device: torch.device, host_mask: torch.Tensor | None = None):
        """``host_mask``: SGLang's own inert mask, if it has one; ``owns`` recognises it."""
        self.mask = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self.indices = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.seqlens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.host_mask = host_mask
        for mask in (self.mask, host_mask):
            if mask is not None:
                self._instances[mask.untyped_storage().data_ptr()] = self

    def fill(self, forward_batch: Any, rows: int) -> None:
        """Set the three track fields of ``forward_batch`` to the first ``rows`` inert entries."""
        forward_batch.mamba_track_mask = self.mask[:rows]
        forward_batch.mamba_track_indices = self.indices[:rows]
        forward_batch.mamba_track_seqlens = self.seqlens[:rows]

    @classmethod
    def owns(cls, mask: torch.Tensor) -> bool:
        """Whether ``mask`` is a view of an inert mask of any instance. Compares addresses only."""
        return mask.untyped_storage().data_ptr() in cls._instances


class InklingSconvBackend:
    """The methods that go on SGLang's Inkling short-conv backend."""

    def _alloc_inert_tracking(self: Any, exempt_draft_extend: bool = True) -> None:
        """Allocate the inert track fields, right after the host's ``_alloc_graph_buffers``.

        ``exempt_draft_extend``: whether draft-extend captures are left alone.
        """
        self._inkling_sconv_exempt_draft_extend = exempt_draft_extend
        buffer = getattr(self, STATIC_INDICES)
        self._inkling_sconv_inert = InertTracking(
            buffer.shape[0], buffer.device, getattr(self, "_graph_track_inert_mask", None)
        )

    def _refresh_track_conv_indices(self: Any, forward_batch: Any, on_graph_path: bool) -> None:
        """Set this step's ``sconv_metadata.track_conv_indices``: ``[rows, window]`` int64, or None.

        ``rows`` is ``forward_batch.batch_size``. On the graph path the result is a slice of the
        host's static buffer, and a batch without track metadata gets inert fields. An exempt
        draft-extend batch gets no indices and keeps its fields: the draft reads its checkpoint
        slots from ``mamba_track_indices``. A second call on the same batch gives the same result.
        No call synchronises with the device.

        Raises:
            TrackContractError: more rows than the static buffer holds; a track mask without
                ``mamba_track_seqlens``; no ``extend_prefix_lens`` in a batch that may track rows.
        """
        metadata = self.sconv_metadata
        rows = forward_batch.batch_size
        if forward_batch.mamba_track_mask is None and (
            not on_graph_path or _is_exempt(self, forward_batch)
        ):
            metadata.track_conv_indices = None
            return

        out = None
        if on_graph_path:
            buffer = getattr(self, STATIC_INDICES)
            if rows > buffer.shape[0]:
                raise _make_error(
                    "batch_size",
                    forward_batch,
                    f"is {rows}, but graph buffers hold {buffer.shape[0]} rows",
                    "raise --max-running-requests or lower --cuda-graph-max-bs-decode",
                )
            out = buffer[:rows]
            if forward_batch.mamba_track_mask is None:
                _require_inert_tracking(self, forward_batch).fill(forward_batch, rows)
                if hasattr(metadata, TRACK_CACHE_INDICES):
                    # Since 0.5.22 the scatter takes its destinations from there.
                    metadata.track_cache_indices = forward_batch.mamba_track_indices

        track_seqlens = forward_batch.mamba_track_seqlens
        if track_seqlens is None:
            raise _make_error(
                "mamba_track_seqlens",
                forward_batch,
                "is None, but mamba_track_mask is set",
                "set both, or neither",
            )
        prefix_lens = forward_batch.extend_prefix_lens
        if prefix_lens is None and on_graph_path:
            # Capture batches have no prefix lengths. No row is tracked, so zeros are safe, and None
            # stands for zeros.
            if rows > 0 and not InertTracking.owns(forward_batch.mamba_track_mask):
                raise _make_error(
                    "extend_prefix_lens",
                    forward_batch,
                    "is None on the graph path, but mamba_track_mask may track rows",
                    "fill extend_prefix_lens, or leave mamba_track_mask None for a capture",
                )
        elif prefix_lens is None:
            raise _make_error(
                "extend_prefix_lens",
                forward_batch,
                "is None, but mamba_track_mask is set",
                "build live batches with ForwardBatch.init_new",
            )
        metadata.track_conv_indices = track_conv_indices(
            metadata.query_start_loc,
            track_seqlens,
            prefix_lens,
            rows=rows,
            chunk_size=self.mamba_cache_chunk_size,
            window=self.conv_state_len,
            out=out,
        )


def _is_exempt(host: Any, forward_batch: Any) -> bool:
    exempt = getattr(host, "_inkling_sconv_exempt_draft_extend", True)
    return exempt and forward_batch.forward_mode.is_draft_extend_v2()


def _require_inert_tracking(host: Any, forward_batch: Any) -> InertTracking:
    inert: InertTracking | None = getattr(host, "_inkling_sconv_inert", None)
    if inert is None:
        # This may be inside a capture, where it is too late to allocate.
        raise _make_error(
            "mamba_track_mask",
            forward_batch,
            "is None, and this backend was made before inkling_sconv was loaded",
            "load SGLang's plugins before the model runner is built",
        )
    return inert


def _make_error(field: str, forward_batch: Any, found: str, remedy: str) -> TrackContractError:
    mode = getattr(forward_batch.forward_mode, "name", forward_batch.forward_mode)
    return TrackContractError(
        f"inkling_sconv: ForwardBatch.{field} {found} (forward mode {mode}); {remedy}."
    )
