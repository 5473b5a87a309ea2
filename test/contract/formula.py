"""The formula of the tracked window in Python integers, and batches to try it on.

It shares nothing with the code under test.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Case:
    """One step: ``rows`` requests, of which the first ``live`` have lengths. All in tokens."""

    rows: int
    query_start_loc: list[int]
    track_seqlens: list[int]
    prefix_lens: list[int] | None
    chunk_size: int = 64
    window: int = 3
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.int64, torch.int32)


def expected(case: Case) -> list[list[int]]:
    """Rules 3, 6 and 10 of docs/contract.md, row by row, in integers of 64 bits."""
    last_token = max(_wrap(case.query_start_loc[-1] - 1), 0)
    table = [[0] * case.window for _ in range(case.rows)]
    prefix_lens = [0] * case.rows if case.prefix_lens is None else case.prefix_lens
    lengths = zip(case.query_start_loc, case.track_seqlens, prefix_lens, strict=False)
    for row, (start, seqlen, prefix) in zip(table, lengths, strict=False):
        aligned = _wrap(seqlen - prefix) // case.chunk_size * case.chunk_size
        for w in range(case.window):
            row[w] = min(max(_wrap(start + aligned - case.window + w), 0), last_token)
    return table


def _wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@st.composite
def live_batches(draw: st.DrawFn, max_rows: int = 8) -> Case:
    """Any batch a runner may hand over; masked rows hold lengths that make no sense."""
    rows = draw(st.integers(1, max_rows))
    lengths = draw(st.lists(st.integers(0, 300), min_size=rows, max_size=rows))
    live = draw(st.integers(0, rows))
    tokens = st.integers(0, 5000)
    return Case(
        rows,
        [sum(lengths[:r]) for r in range(rows + 1)],
        draw(st.lists(tokens, min_size=live, max_size=rows)),
        draw(st.lists(tokens, min_size=live, max_size=rows)),
        draw(st.sampled_from((1, 64, 128))),
        draw(st.integers(1, 4)),
        draw(st.tuples(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS))),
    )
