"""The method that the fix ``draft-window`` puts on SGLang's ``ShortConvolution``."""

from __future__ import annotations

from typing import Any

import torch

from inkling_sconv.names import TRACK_CACHE_INDICES
from inkling_sconv.ops.draft_conv_state import update_draft_conv_state


class InklingShortConvolution:
    """What this package puts on SGLang's ``ShortConvolution``."""

    def _update_sconv_cache_for_draft_extend(
        self: Any,
        forward_batch: Any,
        sconv_cache: torch.Tensor,
        cache_indices: torch.Tensor,
        hidden_states: torch.Tensor,
    ) -> None:
        """``update_draft_conv_state`` for a draft-extend batch; ``hidden_states`` may be flat.

        ``mamba_track_indices`` of the batch are the checkpoint slots; None keeps none.
        """
        rows = forward_batch.batch_size
        if hidden_states.dim() == 2:
            hidden_states = hidden_states.unflatten(0, (rows, -1))
        # Since 0.5.22, kernels take their slots from the metadata.
        metadata = self._conv_state(forward_batch)
        slots = getattr(metadata, TRACK_CACHE_INDICES, forward_batch.mamba_track_indices)
        update_draft_conv_state(
            hidden_states,
            sconv_cache,
            cache_indices,
            forward_batch.spec_info.num_accept_tokens,
            forward_batch.seq_lens,
            slots,
            front=getattr(forward_batch.spec_info, "num_front_tokens", 0),
            interval=self._inkling_sconv_interval(),
        )
