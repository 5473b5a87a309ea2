"""The rules of docs/contract.md, one by one, with real ``ForwardBatch`` objects on CPU tensors.

``make_rig`` runs a test in both forms of draft-extend. ``mutants.py`` finds the tests of a rule by
their names.
"""

from types import SimpleNamespace

import pytest
import torch
from formula import INTEGERS, Case, expected, live_batches
from hypothesis import given
from hypothesis import strategies as st
from inkling_sconv.probe.backend import Rig

DRAFT_EXTEND = "DRAFT_EXTEND_V2"
GRAPH_MODES = (DRAFT_EXTEND, "EXTEND")
TRACK_FIELDS = ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens")

both_paths = pytest.mark.parametrize("on_graph_path", (False, True))
both_modes = pytest.mark.parametrize("mode", GRAPH_MODES)
# Where a capture without a mask gets inert fields: the others fall under rule 11.
inert_captures = pytest.mark.parametrize(
    ("form", "mode"), (("exempt", "EXTEND"), ("inert", "EXTEND"), ("inert", DRAFT_EXTEND))
)


def make_tracked(rig, rows, mode="EXTEND", **fields):
    """A batch in which every row tracks its 64 new tokens, but for the given fields."""
    default = {"mask": [True] * rows, "track_seqlens": [64] * rows, "prefix_lens": [0] * rows}
    return rig.make_batch(mode, rows, **{**default, **fields})


def make_starts(rows, width=64):
    return [width * r for r in range(rows + 1)]


def make_later_metadata(track_cache_indices):
    """Metadata as SGLang has it since 0.5.22."""
    return SimpleNamespace(
        query_start_loc=None, track_conv_indices=None, track_cache_indices=track_cache_indices
    )


@given(
    st.sampled_from(("exempt", "inert")),
    st.sampled_from(GRAPH_MODES),
    st.booleans(),
    live_batches(),
)
def test_formula_of_any_live_batch(build_rig, form, mode, on_graph_path, case):
    rig = build_rig(form, window=case.window, chunk_size=case.chunk_size)
    batch = rig.make_batch(
        mode,
        case.rows,
        mask=[True] * case.rows,
        track_seqlens=case.track_seqlens,
        prefix_lens=case.prefix_lens,
        dtypes=case.dtypes,
    )
    # A static buffer is never clean when a step begins.
    rig.backend._graph_track_conv_indices.fill_(-7)
    got = rig.refresh(batch, case.query_start_loc, on_graph_path=on_graph_path)
    assert got.dtype == torch.int64 and got.is_contiguous()
    assert got.tolist() == expected(case)


def test_rule_1_eager_without_a_mask_gives_no_indices(make_rig):
    rig = make_rig()
    batch = rig.make_batch("EXTEND", 2, prefix_lens=[0, 0])
    rig.backend.sconv_metadata.track_conv_indices = "of the step before"
    rig.backend._refresh_track_conv_indices(batch, False)
    assert rig.backend.sconv_metadata.track_conv_indices is None
    assert [getattr(batch, name) for name in TRACK_FIELDS] == [None] * 3


@inert_captures
def test_rule_2_capture_without_a_mask_records_an_inert_scatter(make_rig, mode):
    rig, addresses = make_rig(), set()
    for rows in (3, 8, 1):
        batch = rig.make_batch(mode, rows, prefix_lens=[0] * rows)
        indices = rig.refresh(batch, make_starts(rows, 4), on_graph_path=True)
        assert indices is not None and indices.shape == (rows, 3)
        mask, slots, seqlens = (getattr(batch, name) for name in TRACK_FIELDS)
        assert mask.tolist() == [False] * rows and slots.tolist() == seqlens.tolist() == [0] * rows
        assert mask.dtype == torch.bool and slots.dtype == seqlens.dtype == torch.int64
        addresses.add((mask.data_ptr(), slots.data_ptr(), seqlens.data_ptr()))
    assert len(addresses) == 1, "a graph reads them where they were at its capture"


@pytest.mark.parametrize("later", (False, True))
@inert_captures
def test_rule_2_the_scatter_finds_inert_destinations(make_rig, mode, later):
    rig = make_rig()
    if later:
        rig.backend.sconv_metadata = make_later_metadata("of the step before")
    metadata = rig.backend.sconv_metadata
    has_field = hasattr(metadata, "track_cache_indices")
    batch = rig.make_batch(mode, 3)
    rig.refresh(batch, make_starts(3, 4), on_graph_path=True)
    assert hasattr(metadata, "track_cache_indices") == has_field
    if has_field:
        assert metadata.track_cache_indices is batch.mamba_track_indices
        assert metadata.track_cache_indices.tolist() == [0] * 3


@both_paths
@both_modes
def test_rule_2_a_live_batch_keeps_its_destinations(make_rig, mode, on_graph_path):
    """The metadata may have translated ones, unlike the batch."""
    rig = make_rig()
    metadata = rig.backend.sconv_metadata = make_later_metadata("translated")
    batch = make_tracked(rig, 1, mode)
    slots = batch.mamba_track_indices
    assert rig.refresh(batch, [0, 64], on_graph_path=on_graph_path).tolist() == [[61, 62, 63]]
    assert metadata.track_cache_indices == "translated"
    assert batch.mamba_track_indices is slots


@inert_captures
def test_rule_2_a_backend_older_than_the_plugin_says_so(make_rig, mode):
    rig = make_rig()
    del rig.backend._inkling_sconv_inert
    with pytest.raises(RuntimeError, match="made before inkling_sconv was loaded"):
        rig.refresh(rig.make_batch(mode, 1), [0, 4], on_graph_path=True)


@inert_captures
def test_rule_3_capture_without_prefix_lengths_starts(make_rig, mode):
    rig = make_rig()
    rig.backend._graph_track_conv_indices.fill_(-7)
    batch = rig.make_batch(mode, 3)
    indices = rig.refresh(batch, make_starts(3, 4), on_graph_path=True)
    assert indices.tolist() == [[0, 0, 0], [1, 2, 3], [5, 6, 7]]
    assert batch.extend_prefix_lens is None


@pytest.mark.parametrize("seqlens_dtype", INTEGERS)
def test_rule_4_a_live_batch_without_prefix_lengths_is_refused(make_rig, seqlens_dtype):
    rig = make_rig()
    batch = make_tracked(rig, 1, prefix_lens=None, dtypes=(seqlens_dtype, torch.int32))
    with pytest.raises(RuntimeError, match=r"extend_prefix_lens.*EXTEND.*init_new"):
        rig.refresh(batch, [0, 64], on_graph_path=False)
    assert rig.backend.sconv_metadata.track_conv_indices is None


def test_rule_5_the_graph_path_writes_one_buffer(make_rig):
    rig = make_rig()
    buffer = rig.backend._graph_track_conv_indices
    for rows in (2, 8, 1):
        got = rig.refresh(make_tracked(rig, rows), make_starts(rows), on_graph_path=True)
        assert got.data_ptr() == buffer.data_ptr() and got.stride() == (3, 1)
    assert rig.backend._graph_track_conv_indices is buffer


def test_rule_5_eager_steps_do_not_share_it(make_rig):
    rig = make_rig()
    batch = make_tracked(rig, 1)
    first, second = (rig.refresh(batch, [0, 64], on_graph_path=False) for _ in range(2))
    graph = rig.backend._graph_track_conv_indices
    assert len({tensor.data_ptr() for tensor in (first, second, graph)}) == 3


@pytest.mark.parametrize("tracked", (False, True))
def test_rule_5_a_shape_over_the_bound_writes_nothing(make_rig, tracked):
    rig = make_rig(max_rows=2)
    rig.backend._graph_track_conv_indices.fill_(-7)
    batch = make_tracked(rig, 3) if tracked else rig.make_batch("EXTEND", 3)
    before = dict(vars(batch))
    with pytest.raises(RuntimeError, match=r"batch_size is 3.*hold 2 rows.*EXTEND"):
        rig.refresh(batch, make_starts(3), on_graph_path=True)
    assert all(vars(batch)[name] is value for name, value in before.items())
    assert rig.backend._graph_track_conv_indices.eq(-7).all()


@both_paths
@pytest.mark.parametrize("seqlens,prefix_lens", (([64], [0, 0, 0]), ([64, 64, 64], [0]), ([], [])))
def test_rule_6_the_padded_tail_is_zero(make_rig, on_graph_path, seqlens, prefix_lens):
    rig = make_rig()
    rig.backend._graph_track_conv_indices.fill_(-7)
    batch = make_tracked(rig, 3, track_seqlens=seqlens, prefix_lens=prefix_lens)
    got = rig.refresh(batch, make_starts(3), on_graph_path=on_graph_path)
    live = min(len(seqlens), len(prefix_lens))
    assert got.tolist() == [[61, 62, 63]] * live + [[0, 0, 0]] * (3 - live)


@both_modes
@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("tracked", (False, True))
def test_rule_7_no_value_is_read_on_the_host(make_rig, form, mode, prefix, tracked):
    # On meta tensors, any read of a value raises.
    rig = make_rig(device="meta")
    fields = {"mask": [True] * 3, "track_seqlens": [64] * 2} if tracked else {}
    batch = rig.make_batch(mode, 3, **fields, prefix_lens=[0] * 3 if prefix else None)
    for _ in range(2):
        got = rig.refresh(batch, make_starts(3), on_graph_path=True)
        if not tracked and (form, mode) == ("exempt", DRAFT_EXTEND):
            assert got is None
        else:
            assert got.shape == (3, 3) and got.dtype == torch.int64
    if tracked and prefix:
        assert rig.refresh(batch, make_starts(3), on_graph_path=False).shape == (3, 3)


@inert_captures
def test_rule_8_warm_up_and_capture_of_every_size_at_every_mtp_step(make_rig, mode):
    """One batch per size, as the runners build it, through the backend of every draft step."""
    max_rows, width = 48, 5
    steps = [make_rig(max_rows=max_rows) for _ in range(3)]
    for rows in range(max_rows, 0, -1):
        batch = steps[0].make_batch(mode, rows)
        want = expected(Case(rows, make_starts(rows, width), [0] * rows, [0] * rows))
        for rig in steps * 2:
            rig.backend._graph_track_conv_indices.fill_(-7)
            got = rig.refresh(batch, make_starts(rows, width), on_graph_path=True)
            assert got.tolist() == want
            assert not batch.mamba_track_mask.any() and not batch.mamba_track_seqlens.any()


@both_modes
@pytest.mark.parametrize("mask", ([True, True], [False, False]))
def test_rule_9_no_prefix_is_made_up_for_rows_that_may_be_tracked(make_rig, mode, mask):
    rig = make_rig()
    batch = make_tracked(rig, 2, mode, mask=mask, prefix_lens=None)
    with pytest.raises(RuntimeError, match=rf"extend_prefix_lens.*mamba_track_mask.*{mode}"):
        rig.refresh(batch, make_starts(2), on_graph_path=True)


def test_rule_9_zero_rows_are_accepted(make_rig):
    rig = make_rig()
    batch = make_tracked(rig, 0, prefix_lens=None)
    assert rig.refresh(batch, [0], on_graph_path=True).shape == (0, 3)


def test_rule_9_the_host_s_own_inert_mask_is_inert(make_rig):
    rig = make_rig()
    mask = getattr(rig.backend, "_graph_track_inert_mask", None)
    if mask is None:
        pytest.skip("this tree has no inert mask of its own")
    batch = make_tracked(rig, 2, DRAFT_EXTEND, track_seqlens=[0, 0], prefix_lens=None)
    batch.mamba_track_mask = mask[:2]
    assert rig.refresh(batch, [0, 4, 8], on_graph_path=True).tolist() == [[0, 0, 0], [1, 2, 3]]


def test_rule_9_an_address_that_was_freed_is_not_inert(make_rig):
    rig = make_rig()
    inert = rig.backend._inkling_sconv_inert
    owns, mask = type(inert).owns, inert.mask
    assert owns(mask)
    del rig, inert
    assert not owns(mask)


@both_paths
def test_rule_10_a_step_with_no_tokens_gives_index_zero(make_rig, on_graph_path):
    rig = make_rig()
    batch = make_tracked(rig, 2, track_seqlens=[64, 640], prefix_lens=[0, 64])
    assert rig.refresh(batch, [0, 0, 0], on_graph_path=on_graph_path).eq(0).all()


@both_paths
def test_rule_10_a_mask_without_seqlens_is_refused(make_rig, on_graph_path):
    rig = make_rig()
    batch = make_tracked(rig, 1, track_seqlens=None)
    with pytest.raises(RuntimeError, match=r"mamba_track_seqlens.*EXTEND"):
        rig.refresh(batch, [0, 64], on_graph_path=on_graph_path)


@pytest.mark.parametrize("slots", (None, [5, 6, 7]))
@pytest.mark.parametrize("prefix_lens", (None, [0, 0, 0]))
def test_rule_11_draft_extend_keeps_its_fields(build_rig, prefix_lens, slots):
    rig = build_rig("exempt")
    rig.backend._graph_track_conv_indices.fill_(-7)
    batch = rig.make_batch(DRAFT_EXTEND, 3, prefix_lens=prefix_lens)
    batch.mamba_track_indices = slots and rig.make_tensor(slots, torch.int64)
    metadata = rig.backend.sconv_metadata = make_later_metadata(batch.mamba_track_indices)
    before = dict(vars(batch))
    for _ in ("warm-up", "capture"):
        metadata.track_conv_indices = "of the step before"
        rig.backend._refresh_track_conv_indices(batch, True)
        assert metadata.track_conv_indices is None
        assert metadata.track_cache_indices is batch.mamba_track_indices
        assert vars(batch).keys() == before.keys()
        assert all(value is before[name] for name, value in vars(batch).items())
    assert slots is None or batch.mamba_track_indices.tolist() == slots
    assert rig.backend._graph_track_conv_indices.eq(-7).all()


@pytest.mark.parametrize("rows", (0, 1, 8, 9))
@pytest.mark.parametrize("older", (False, True))
def test_rule_11_needs_neither_rows_nor_buffers(build_rig, rows, older):
    rig = build_rig("exempt")
    if older:  # a backend that was made before the plugin was loaded
        del rig.backend._inkling_sconv_inert, rig.backend._inkling_sconv_exempt_draft_extend
    batch = rig.make_batch(DRAFT_EXTEND, rows)
    assert rig.refresh(batch, make_starts(rows, 4), on_graph_path=True) is None
    assert [getattr(batch, name) for name in TRACK_FIELDS] == [None] * 3


def test_rule_11_is_the_default(subject):
    rig = Rig(subject)
    assert rig.refresh(rig.make_batch(DRAFT_EXTEND, 1), [0, 4], on_graph_path=True) is None
