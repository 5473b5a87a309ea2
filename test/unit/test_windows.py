"""The reference arithmetic against the formula in Python integers, without SGLang."""

from __future__ import annotations

import torch
from formula import Case, expected, live_batches
from hypothesis import given, settings


def run(case: Case, out: torch.Tensor | None = None) -> torch.Tensor:
    seqlens_dtype, prefix_dtype = case.dtypes
    return track_conv_indices(
        torch.tensor(case.query_start_loc, dtype=torch.int32),
        torch.tensor(case.track_seqlens, dtype=seqlens_dtype),
        torch.tensor(case.prefix_lens, dtype=prefix_dtype),
        rows=case.rows,
        chunk_size=case.chunk_size,
        window=case.window,
        out=out,
    )


@settings(max_examples=500, deadline=None)
@given(case=live_batches(max_rows=40))
def test_reference(case):
    got = run(case)
    assert got.dtype == torch.int64 and got.tolist() == expected(case)
    out = torch.full((case.rows, case.window), -7)
    assert run(case, out) is out and torch.equal(out, got)


def test_lengths_near_the_end_of_int32_do_not_wrap():
    far = 2**31 - 1
    case = Case(2, [0, 64, 128], [far, 0], [0, far], dtypes=(torch.int32, torch.int32))
    assert run(case).tolist() == expected(case)
