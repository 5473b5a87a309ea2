"""The fix ``draft-window``: a method for SGLang's ``ShortConvolution``."""

from typing import Any

import torch

from inkling_sconv.names import TRACK_CACHE_INDICES
from inkling_sconv.ops.draft_conv_state import update_draft_conv_state


class InklingShortConvolution:
    """Replacement for a method of ``ShortConvolution``; never instantiated."""

    def _update_sconv_cache_for_draft_extend(
        self: Any,
        forward_batch: Any,
        sconv_cache: torch.Tensor,
        cache_indices: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> None:
        """Move the draft's conv state forward after a draft-extend step; save its checkpoints.

        Args:
            forward_batch: SGLang's draft-extend batch. Without ``mamba_track_indices``, or with the
                server's extra buffer off, no checkpoint is saved.
            sconv_cache: ``[slots, window, D]``, written in place.
            cache_indices: ``[>= rows]``, integer: the slot of each request's own state.
            hidden_states: ``[rows, T, D]``, or ``[rows * T + padding, D]`` with less than ``rows``
                rows of padding: the convolution's input.
        """
        rows = forward_batch.batch_size
        if hidden_states.dim() == 2:
            # Where tokens are split over GPUs, SGLang pads their number past whole requests.
            width = len(hidden_states) // rows
            hidden_states = hidden_states[: rows * width].unflatten(0, (rows, width))
        # Since SGLang 0.5.22 the metadata holds the checkpoint slots.
        metadata = self._conv_state(forward_batch)
        slots = getattr(metadata, TRACK_CACHE_INDICES, forward_batch.mamba_track_indices)
        interval = self._inkling_sconv_interval()
        update_draft_conv_state(
            hidden_states,
            sconv_cache,
            cache_indices,
            forward_batch.spec_info.num_accept_tokens,
            forward_batch.seq_lens,
            slots if interval else None,
            front=getattr(forward_batch.spec_info, "num_front_tokens", 0),
            interval=interval or 1,
        )
