"""Which rows of the token buffer hold the conv window that a prefix-cache checkpoint saves.

A step packs the new tokens of its requests one after the other. A request whose prompt crosses a
``chunk_size`` boundary in this step checkpoints the ``window`` token rows that end on the last
boundary it crossed. ``track_conv_indices_ref`` computes these rows in torch,
``track_conv_indices`` in one Triton launch.
"""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU builds of torch come without Triton
    triton = None


def track_conv_indices_ref(
    query_start_loc: torch.Tensor,
    track_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    *,
    rows: int,
    chunk_size: int,
    window: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the token-buffer rows of every request's tracked conv window.

    For a live row ``r < live = min(rows, len(track_seqlens), len(prefix_lens))`` and
    ``w = 0 .. window - 1`` (section "The contract of the refresh" of docs/contract.md)::

        tracked     = track_seqlens[r] - prefix_lens[r]            # negative on masked rows
        aligned     = floor(tracked / chunk_size) * chunk_size
        index[r, w] = clamp(query_start_loc[r] + aligned - window + w, 0, tokens - 1)

    where ``tokens = query_start_loc[-1]``. Rows from ``live`` to ``rows`` are 0. If the step has
    no tokens, all indices are 0. The host reads no value.

    Args:
        query_start_loc: ``[rows + 1]``, int32 or int64: cumulative query lengths, in tokens.
        track_seqlens: any length, int32 or int64: sequence length up to which row ``r`` tracks, in
            tokens.
        prefix_lens: any length, int32 or int64: tokens of row ``r`` that were cached before this
            step; None for zeros.
        rows: requests in the step, padded ones included.
        chunk_size: tokens between two checkpoint boundaries (``mamba_cache_chunk_size``).
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


# The work is far too small to fill a GPU: its cost is the launch, one round of loads and one store.
# So loads do not wait for each other, and values that change from step to step are run-time
# arguments. One index per thread.
_BLOCK = 128
_WARPS = 4

if triton is not None:
    # Without do_not_specialize, Triton recompiles when the row count is 1 or divisible by 16, and
    # when a pointer's alignment changes.
    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["query_start_loc", "track_seqlens", "prefix_lens", "out", "rows", "live"]
    )
    def _track_conv_indices_kernel(  # type: ignore[no-untyped-def]
        query_start_loc,  # [rows + 1]
        track_seqlens,  # [>= live]
        prefix_lens,  # [>= live], or None for zeros
        out,  # [rows, WINDOW]
        rows,
        live,
        CHUNK: tl.constexpr,
        WINDOW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        tokens = tl.load(query_start_loc + rows).to(tl.int64)
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = offset // WINDOW
        column = offset % WINDOW
        # Rows from live on load zeros. Their window ends before token 0: the clamp gives index 0.
        is_live = row < live
        start = tl.load(query_start_loc + row, mask=is_live, other=0).to(tl.int64)
        tracked = tl.load(track_seqlens + row, mask=is_live, other=0).to(tl.int64)
        if prefix_lens is not None:
            tracked -= tl.load(prefix_lens + row, mask=is_live, other=0).to(tl.int64)

        # Both branches are floor division for all int64, and overflow as torch does.
        if CHUNK & (CHUNK - 1) == 0:
            aligned = tracked & -CHUNK
        else:
            rest = tracked % CHUNK  # has the sign of tracked
            aligned = tracked - tl.where(rest < 0, rest + CHUNK, rest)
        index = start + aligned + (column - WINDOW)
        index = tl.minimum(tl.maximum(index, 0), tl.maximum(tokens - 1, 0))
        tl.store(out + offset, index, mask=row < rows)

    # TRITON_INTERPRET is read when the kernel is decorated.
    _INTERPRETED = not isinstance(_track_conv_indices_kernel, triton.JITFunction)
else:
    _INTERPRETED = False

# Compiled kernels by specialisation key. Triton's own look-up takes longer than the launch.
_COMPILED: dict[tuple[Any, ...], Any] = {}


def _launch(programs: int, *arguments: Any) -> None:
    """Launch the kernel with ``arguments`` on the current device."""
    if _INTERPRETED:
        _track_conv_indices_kernel[(programs,)](*arguments, num_warps=_WARPS)
        return
    query_start_loc, track_seqlens, prefix_lens, *_, chunk_size, window, _ = arguments
    key = (
        query_start_loc.device,
        query_start_loc.dtype,
        track_seqlens.dtype,
        None if prefix_lens is None else prefix_lens.dtype,
        chunk_size,
        window,
    )
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED[key] = _track_conv_indices_kernel.warmup(
            *arguments, grid=(programs,), num_warps=_WARPS
        )
    compiled[(programs, 1, 1)](*arguments)


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
    """Same as ``track_conv_indices_ref``, in one launch.

    All tensors must be on the current device. ``track_conv_indices_ref`` runs unless all inputs are
    contiguous and ``query_start_loc`` has ``rows + 1`` entries on a GPU.

    Triton compiles one kernel per combination of dtypes, and one more without ``prefix_lens``. A
    new number of rows, or another slice of a buffer, compiles nothing. ``chunk_size`` and
    ``window`` are fixed for a server, so they are compiled in.
    """
    if not (
        (query_start_loc.is_cuda or (_INTERPRETED and query_start_loc.is_cpu))
        and triton is not None
        and query_start_loc.numel() == rows + 1
        and query_start_loc.is_contiguous()
        and track_seqlens.is_contiguous()
        and (prefix_lens is None or prefix_lens.is_contiguous())
    ):
        return track_conv_indices_ref(
            query_start_loc,
            track_seqlens,
            prefix_lens,
            rows=rows,
            chunk_size=chunk_size,
            window=window,
            out=out,
        )
    if out is None:
        out = torch.empty((rows, window), dtype=torch.int64, device=query_start_loc.device)
    else:
        assert out.shape == (rows, window) and out.dtype == torch.int64 and out.is_contiguous()
    if rows > 0:
        live = min(rows, track_seqlens.numel())
        if prefix_lens is not None:
            live = min(live, prefix_lens.numel())
        _launch(
            -(-rows * window // _BLOCK),
            query_start_loc,
            track_seqlens,
            prefix_lens,
            out,
            rows,
            live,
            chunk_size,
            window,
            _BLOCK,
        )
    return out
