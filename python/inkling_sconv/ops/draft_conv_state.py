"""The conv state that an MTP head keeps during draft-extend, and its checkpoint.

In draft-extend an MTP head runs over ``T`` token rows per request. First come the *front* rows that
SGLang's boundary fix adds: tokens accepted in earlier steps. Then comes one row per token of this
step. Accepted tokens move the request's conv state forward. If they cross a checkpoint boundary,
the state that ends on the boundary is saved for the prefix cache.

Front rows replace the stored rows of the same tokens. Each step recomputes front rows from verified
tokens, while stored rows can be wrong:

- Every head but the first writes its last rows before their tokens are verified.
- SGLang 0.5.17 - 0.5.19 clear a request's states at prefill, and again at every draft-extend while
  the batch's requests stay the same (``_apply_deferred_mamba_init_to_draft_pools``).

For the same reason a checkpoint can be wrong: head ``i``, counted from 0, saves rows of tokens that
are not verified if the step accepts fewer than ``i`` tokens after the boundary. So a later step
saves the checkpoint again, from front rows, while the boundary is that near. SGLang names the slot
of the crossing until it has processed the step's result, which the scheduler does after it has
launched the next step. Then it names the request's other slot. The prefix cache gets that one only
after another crossing has filled it.
"""

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU builds of torch come without Triton
    triton = None


def update_draft_conv_state_ref(
    hidden_states: torch.Tensor,
    cache: torch.Tensor,
    cache_indices: torch.Tensor,
    accepted: torch.Tensor,
    seq_lens: torch.Tensor,
    track_slots: torch.Tensor | None,
    *,
    front: int,
    interval: int,
) -> None:
    """Move each request's conv state forward by its accepted tokens, and save a checkpoint.

    For a request ``r`` whose step begins at position ``base = seq_lens[r] - (T - front)`` and
    accepts ``n = accepted[r]`` tokens::

        reach    = max(front - window, 0)
        state    = cache[cache_indices[r], : max(window - front, 0)]
        rows     = cat(state, hidden_states[r])             # rows[0]: base - reach - window
        boundary = floor((base + n) / interval) * interval
        offset   = boundary - (base - reach)
        # If offset > 0, boundary > 0 and the slot >= 0:
        cache[track_slots[r]]   = rows[offset:][:window]
        cache[cache_indices[r]] = rows[n + reach :][:window]

    Args:
        hidden_states: ``[rows, T, D]``, any floating dtype: the convolution's input.
        cache: ``[slots, window, D]``, same dtype; written in place.
        cache_indices: ``[>= rows]``, int32 or int64: the slot of each request's own state.
        accepted: ``[>= rows]``, int32 or int64: how many tokens of the step were accepted. A
            padded row has a negative number, and writes nothing.
        seq_lens: ``[>= rows]``, int32 or int64: the request's length in tokens, with all tokens of
            the step, accepted or not.
        track_slots: ``[>= rows]``, int32 or int64: the slot of each request's checkpoint; None to
            save no checkpoints. A negative slot saves none: SGLang 0.5.22 and newer give one to a
            request whose slots have been freed.
        front: how many of the ``T`` rows are front rows.
        interval: tokens between two checkpoint boundaries (SGLang's ``mamba_track_grid``).
    """
    window = cache.shape[1]
    reach = max(front - window, 0)
    for r, own in enumerate(hidden_states):
        n = int(accepted[r])
        if n < 0:
            continue
        slot = int(cache_indices[r])
        rows = torch.cat([cache[slot, : max(window - front, 0)], own])
        base = int(seq_lens[r]) - (own.shape[0] - front)
        boundary = (base + n) // interval * interval
        offset = boundary - (base - reach)
        if track_slots is not None and min(offset, boundary) > 0 and track_slots[r] >= 0:
            cache[int(track_slots[r])] = rows[offset : offset + window]
        cache[slot] = rows[n + reach : n + reach + window]


if triton is not None:

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["cache_indices", "accepted", "seq_lens", "track_slots"]
    )
    def _update_draft_conv_state_kernel(  # type: ignore[no-untyped-def]
        hidden_states,  # [rows, T, D]
        cache,  # [slots, WINDOW, D]
        cache_indices,  # [rows]
        accepted,  # [rows]
        seq_lens,  # [rows]
        track_slots,  # [rows], or None
        hidden_row,  # strides, in elements
        hidden_token,
        cache_slot,
        cache_row,
        D,
        WIDTH: tl.constexpr,  # tokens of the step: T - front
        INTERVAL: tl.constexpr,
        WINDOW: tl.constexpr,
        STATE: tl.constexpr,  # rows still taken from the stored state
        REACH: tl.constexpr,  # front rows before the window that ends on the step's base
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        n = tl.load(accepted + row).to(tl.int64)
        if n < 0:
            return
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < D
        own = cache + tl.load(cache_indices + row).to(tl.int64) * cache_slot + channel
        token = hidden_states + row.to(tl.int64) * hidden_row + channel

        if track_slots is not None:
            base = tl.load(seq_lens + row).to(tl.int64) - WIDTH
            boundary = (base + n) // INTERVAL * INTERVAL
            offset = boundary - (base - REACH)
            slot = tl.load(track_slots + row).to(tl.int64)
            if (offset > 0) & (boundary > 0) & (slot >= 0):
                kept = cache + slot * cache_slot + channel
                for w in tl.static_range(WINDOW):
                    at = offset + w
                    old = tl.load(own + at * cache_row, mask=inside & (at < STATE))
                    new = tl.load(token + (at - STATE) * hidden_token, mask=inside & (at >= STATE))
                    tl.store(kept + w * cache_row, tl.where(at < STATE, old, new), mask=inside)
        # In-place shift: ascending order reads each row before it is overwritten.
        for w in tl.static_range(WINDOW):
            at = n + REACH + w
            old = tl.load(own + at * cache_row, mask=inside & (at < STATE))
            new = tl.load(token + (at - STATE) * hidden_token, mask=inside & (at >= STATE))
            tl.store(own + w * cache_row, tl.where(at < STATE, old, new), mask=inside)

    # TRITON_INTERPRET is read when the kernel is decorated.
    _INTERPRETED = not isinstance(_update_draft_conv_state_kernel, triton.JITFunction)
else:
    _INTERPRETED = False


def update_draft_conv_state(
    hidden_states: torch.Tensor,
    cache: torch.Tensor,
    cache_indices: torch.Tensor,
    accepted: torch.Tensor,
    seq_lens: torch.Tensor,
    track_slots: torch.Tensor | None,
    *,
    front: int,
    interval: int,
) -> None:
    """Same as ``update_draft_conv_state_ref``, in one launch and without a device sync.

    The channels of ``hidden_states`` and ``cache`` must be contiguous, and so must the integer
    tensors. ``update_draft_conv_state_ref`` runs for tensors on the CPU.

    Triton compiles one kernel per combination of dtypes, ``front``, ``interval``, ``window`` and
    step width. These are fixed for a server. A new number of rows compiles nothing.
    """
    arguments = (hidden_states, cache, cache_indices, accepted, seq_lens, track_slots)
    if triton is None or not (hidden_states.is_cuda or (_INTERPRETED and hidden_states.is_cpu)):
        update_draft_conv_state_ref(*arguments, front=front, interval=interval)
        return
    rows, length, channels = hidden_states.shape
    assert hidden_states.stride(2) == cache.stride(2) == 1
    if rows == 0:
        return
    block = min(triton.next_power_of_2(channels), 1024)
    _update_draft_conv_state_kernel[(rows, triton.cdiv(channels, block))](
        *arguments,
        hidden_states.stride(0),
        hidden_states.stride(1),
        cache.stride(0),
        cache.stride(1),
        channels,
        length - front,
        interval,
        cache.shape[1],
        max(cache.shape[1] - front, 0),
        max(front - cache.shape[1], 0),
        block,
    )
