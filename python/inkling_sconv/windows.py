"""Which rows of the token buffer hold the conv window that a prefix-cache checkpoint snapshots.

A step packs the new tokens of its requests one after the other. A request whose prompt crosses a
``chunk_size`` boundary in this step checkpoints the ``window`` token rows that end on the last
boundary it crossed. This module is the reference: plain torch, no SGLang.
"""

from __future__ import annotations

import torch


def track_conv_indices(
    query_start_loc: torch.Tensor,
    track_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    *,
    rows: int,
    chunk_size: int,
    window: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token-buffer rows of every request's tracked conv window.

    For a live row ``r < live = min(rows, len(track_seqlens), len(prefix_lens))`` and
    ``w = 0 .. window - 1``::

        tracked     = track_seqlens[r] - prefix_lens[r]            # negative on masked rows
        aligned     = floor(tracked / chunk_size) * chunk_size
        index[r, w] = clamp(query_start_loc[r] + aligned - window + w, 0, tokens - 1)

    where ``tokens = query_start_loc[-1]``. Rows from ``live`` to ``rows`` are 0, and so is every
    index of a step with no tokens. No value is read on the host.

    Args:
        query_start_loc: ``[rows + 1]``, integer: cumulative query lengths, in tokens.
        track_seqlens: ``[>= 0]``, integer: sequence length up to which row ``r`` tracks, in tokens.
        prefix_lens: ``[>= 0]``, integer: tokens of row ``r`` that were cached before this step;
            None for zeros.
        rows: requests in the step, padded ones included.
        chunk_size: distance of two checkpoint boundaries, in tokens (``mamba_cache_chunk_size``).
        window: rows of one conv state (``conv_kernel - 1``).
        out: ``[rows, window]`` int64 to write into; a new tensor if None.

    Returns:
        ``[rows, window]`` int64, ``out`` if it was given.
    """
    device = query_start_loc.device
    if out is None:
        out = torch.empty((rows, window), dtype=torch.int64, device=device)
    live = min(rows, track_seqlens.shape[0])
    if prefix_lens is not None:
        live = min(live, prefix_lens.shape[0])
    tracked = track_seqlens[:live].to(torch.int64)
    if prefix_lens is not None:
        tracked = tracked - prefix_lens[:live]
    aligned = tracked.div(chunk_size, rounding_mode="floor") * chunk_size
    ends = query_start_loc[:live] + aligned
    last_token = (query_start_loc[-1:].to(torch.int64) - 1).clamp_(min=0)
    offsets = torch.arange(-window, 0, device=device)
    torch.minimum((ends[:, None] + offsets).clamp_(min=0), last_token, out=out[:live])
    out[live:].zero_()
    return out
