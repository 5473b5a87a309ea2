"""The fix ``draft-window``: its method, alone and beside SGLang's own, and in a model. No GPU."""

import copy
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import emulator
import pytest
import releases
import torch
from drafts_steps import BATCHES, expected, run
from inkling_sconv import names
from inkling_sconv.ops import draft_conv_state
from inkling_sconv.plugin.convolution import InklingShortConvolution
from inkling_sconv.probe import runners
from inkling_sconv.probe.stand_ins import make_instance
from inkling_sconv.proof import architecture, checkpoint, equality
from kernel_tools import load_copy

UPDATE = "_update_sconv_cache_for_draft_extend"


@pytest.mark.parametrize("flat", ("padded", True, False))
@pytest.mark.parametrize("release", ("before front rows", "slots in the batch", "in the metadata"))
def test_the_method(release, flat):
    def update(hidden: torch.Tensor, cache: torch.Tensor, **rest: Any) -> None:
        slots, metadata = rest["track_slots"], SimpleNamespace()
        if release == "in the metadata":
            metadata.track_cache_indices = slots
            slots = None if slots is None else torch.full_like(slots, 7)
        spec = SimpleNamespace(num_accept_tokens=rest["accepted"], num_front_tokens=rest["front"])
        if release == "before front rows":
            del spec.num_front_tokens
        batch = SimpleNamespace(
            batch_size=step.rows,
            seq_lens=rest["seq_lens"],
            mamba_track_indices=slots,
            spec_info=spec,
        )
        convolution = make_instance(
            InklingShortConvolution,
            UPDATE,
            _conv_state=lambda _: metadata,
            _inkling_sconv_interval=lambda: rest["interval"],
        )
        hidden = hidden.flatten(0, 1) if flat else hidden
        if flat == "padded":
            # Less than one row a request, as where tokens are split over GPUs.
            hidden = torch.cat([hidden, hidden.new_full((step.rows - 1, hidden.shape[1]), 9)])
        assert getattr(convolution, UPDATE)(batch, cache, rest["cache_indices"], hidden) is None

    for step in BATCHES:
        if release == "before front rows":
            step = dataclasses.replace(step, front=0)
        assert torch.equal(run(update, step), expected(step))


@pytest.mark.parametrize("tree", releases.RELEASES)
def test_sglang_s_own_method_where_it_must_agree(drive, tree):
    """Without front rows, the two methods differ only in the checkpoint of a crossed boundary."""
    seen = drive(tree, "draft-states")
    assert seen["compared"] == 200 and seen["crossed"] > 30 and seen["tracked"] > 120
    assert seen["states"] == seen["checkpoints"] == 0, seen
    assert seen["misplaced"] == seen["crossed"]
    # Tensor parallelism shards the channels: each shard has the rows of all channels together.
    sharded = seen["sharded"]
    assert sharded.pop("SGLang's") == sharded.pop("ours") == []
    assert len(sharded) == 4 and all(sharded.values()), sharded


ONCE = {
    "prefill": "once",
    "prefill graph": "once",
    "draft-extend": [["once", "once"]] * 2,
    "draft-extend graph": ["once", "once"],
}
VIRTUAL = {
    "prefill": "untranslated",
    "prefill graph": "untranslated",
    "draft-extend": [["once", "untranslated"]] * 2,
    "draft-extend graph": ["once", "nothing"],
}
ONE_HEAD = {
    **ONCE,
    "draft-extend": [["once", "once"], ["once", "twice"]],
    "draft-extend graph": (
        "AttributeError: 'types.SimpleNamespace' object has no attribute 'mamba_track_indices'"
    ),
}
LANDS = {
    **dict.fromkeys(("0.5.17", "0.5.18", "0.5.19", "0.5.20", releases.CRASHING), VIRTUAL),
    "0.5.21": ONE_HEAD,
    **dict.fromkeys(("0.5.22", "0.5.23"), ONCE),
}
"""How often a unified pool's virtual slots are translated. In draft-extend: states, checkpoints.

Up to 0.5.21 SGLang is wrong: it writes checkpoints to slots that have a virtual slot's number, or
translates those of the second head twice. MTP does not start on such a pool there.
"""


@pytest.mark.parametrize("tree", LANDS)
def test_on_a_unified_pool_rows_land_where_sglang_s_own_do(drive, tree):
    seen = drive(tree, "unified-pools", "fast", INKLING_SCONV_FIXES="none")
    stock, ours = seen.pop("stock"), seen.pop("ours")
    assert ours == LANDS[tree]
    if tree == releases.CRASHING:
        stock["draft-extend graph"], crash = ours["draft-extend graph"], stock["draft-extend graph"]
        assert crash == "AttributeError: 'NoneType' object has no attribute 'shape'"
    assert stock == ours
    # What a wrong fix keeps in a graph, 0.5.21 never replays.
    survivors = ["draft-checkpoint, untranslated"] if tree == "0.5.21" else []
    assert [name for name, lands in seen.items() if lands == ours] == survivors
    assert len(seen) == (5 if LANDS[tree] is ONCE else 4)


@pytest.mark.parametrize("tree", releases.TREES)
def test_sglang_starts_mtp_on_a_unified_pool_since_0_5_22(drive, tree):
    seen = drive(tree, "unified-memory")
    assert seen["None, triton"] == ""
    assert (seen["EAGLE, triton"] == "") == (LANDS[tree] is ONCE)
    assert "--enable-unified-memory" in seen["EAGLE, fa4"]


@pytest.mark.parametrize("tree", releases.RELEASES)
def test_the_slot_of_a_crossing_is_named_until_its_result_is_processed(drive, tree):
    """Then the other slot is, and the crossing's is what a finished request leaves in the cache."""
    assert drive(tree, "track-slots") == {"overlap": [5, 5, 6, 6], "in turn": [5, 6, 6], "kept": 5}


def test_exempt_and_inert_draft_extend_leave_the_same_pool(drive):
    seen = drive(releases.CRASHING, "draft-pools")
    assert seen["steps"] == 40 and seen["differ"] == 0
    # Conv states were moved, and inert tracking did write: into the dummy slot.
    assert seen["moved"] > 30 and seen["slot 0"] > 10, seen


@pytest.mark.parametrize(
    ("front", "shift", "wrong"), ((True, 0, False), (True, -1, True), (False, 0, True))
)
def test_a_window_that_is_right_only_without_front_rows_is_wrong(front, shift, wrong):
    """A method that ends ``shift`` rows off the boundary, or that takes front rows for tokens."""
    context = importlib.import_module(names.CONFIG_MODULES[0])

    class ShortConvolution:
        def _update_sconv_cache_for_draft_extend(self, batch, cache, indices, rows):
            skipped = batch.spec_info.num_front_tokens if front else 0
            if 8 % context.mamba_track_grid(1) == 0:
                cache[1] = torch.cat([cache[0], rows[skipped:]])[2 + shift :][:3]

    module = SimpleNamespace(ShortConvolution=ShortConvolution, fused_draft_extend_sconv_cache=None)
    assert runners.misplaces_draft_checkpoints(module) is wrong


# ----------------------------------------------------------------------------------- in a model

INTERVAL = 64


class Way(NamedTuple):
    """How a server may move the draft's conv states on."""

    update: Callable[..., None]
    cleared: bool = False
    """Each step finds zeroed states, as in SGLang 0.5.17 - 0.5.19."""
    overlap: bool = True
    """The scheduler launches a step before it has processed the result of the one before it."""


class TrackedRequest(emulator.Request):
    """A request whose conv states and checkpoints are moved on in each of ``ways``.

    A processed crossing makes SGLang name the other one of a request's two checkpoint slots.
    """

    def __init__(self, model: emulator.Model, steps: int, ways: dict[str, Way]):
        super().__init__(model, steps=steps)
        self.ways = ways
        # By way, head and convolution: own state, then both checkpoint slots.
        self.pools: dict[str, list[dict[str, torch.Tensor]]] = {}
        self.past: list[int] = []
        """By step, the tokens that it accepted after a boundary; -1 if it crossed none."""

    def prefill(self, tokens: list[int], keep: int | None = None) -> None:
        super().prefill(tokens, keep)
        self.pools = {
            way: [
                {
                    name: torch.stack([rows, *[torch.zeros_like(rows)] * 2])
                    for name, rows in state.conv.items()
                }
                for state in self.draft
            ]
            for way in self.ways
        }

    def _draft(self, ids: list[int], hidden: torch.Tensor, accepted: int) -> None:
        super()._draft(ids, hidden, accepted)
        for by, (update, cleared, overlap) in self.ways.items():
            processed = self.past[:-1] if overlap else self.past
            track = 1 + sum(past >= 0 for past in processed) % 2
            for pool, state in zip(self.pools[by], self.draft, strict=True):
                for name, cache in pool.items():
                    if cleared:
                        cache[0] = 0
                    update(
                        # Zeros come first: the convolution began with them.
                        state.conv[name][None, 3:],
                        cache,
                        torch.tensor([0]),
                        torch.tensor([accepted]),
                        torch.tensor([self.length + len(ids)]),
                        torch.tensor([track]),
                        front=self.front,
                        interval=INTERVAL,
                    )
        past = (self.length + accepted) % INTERVAL
        self.past.append(past if past < accepted else -1)


class Hit(NamedTuple):
    """The first step after a hit on a checkpoint, one token to go."""

    tokens: int
    off: list[float]
    """By head, how far the checkpoint's windows are from those of verified tokens."""


class Measured(NamedTuple):
    past: int
    """How many tokens the step that crossed the boundary accepted after it."""
    next: int
    """How many tokens the step after that one accepted."""
    cold: int
    """Tokens of the first step without a cache."""
    hits: dict[str, Hit]


def measure(model: emulator.Model, ways: dict[str, Way], tokens: list[int]) -> Measured:
    """Decode past a checkpoint and hit it, one token to go; the same without a cache."""
    heads = len(model.heads)
    made = TrackedRequest(model, heads, ways)
    made.prefill(tokens)
    whole = [*tokens, made.bonus]
    lens = []
    while len(whole) < INTERVAL + 12:
        new = made.step()
        lens.append(len(new))
        whole += new
    request = emulator.Request(model, steps=heads)
    request.prefill(whole[: INTERVAL + 1])
    cold = len(request.step())
    cached = emulator.Request(model, steps=heads)
    # The last head's last row has a token that comes so much later.
    cached.prefill(whole[: INTERVAL + heads], keep=INTERVAL)
    hits = {}
    for way, pools in made.pools.items():
        request, off = copy.deepcopy(cached), []
        for state, pool, source in zip(request.draft, pools, made.draft, strict=True):
            kept = {name: cache[1] for name, cache in pool.items()}
            off.append(max(float((state.conv[name] - kept[name]).abs().max()) for name in kept))
            state.conv = kept
            assert source.k is not None and source.v is not None
            state.k, state.v = source.k[:INTERVAL], source.v[:INTERVAL]
        request.prefill(whole[INTERVAL : INTERVAL + 1])
        hits[way] = Hit(len(request.step()), off)
    crossing = next(step for step, past in enumerate(made.past) if past >= 0)
    return Measured(made.past[crossing], lens[crossing + 1], cold, hits)


def load_way(folder: Path, *edits: tuple[str, str], **how: bool) -> Way:
    """A way with the update function as it is, or as ``edits`` make it."""
    return Way(load_copy(draft_conv_state, folder, *edits).update_draft_conv_state_ref, **how)


def test_in_a_model(tmp_path, record_property):
    """The first step after a hit on a decode-made checkpoint, one token to go, against a cold one.

    With a wrong window the first draft is seldom right.
    """
    checkpoint.write_checkpoint(tmp_path / "tiny")
    model = emulator.Model(tmp_path / "tiny")
    early = ("rows[offset : offset + window]", "rows[offset - 1 : offset - 1 + window]")
    # Of two heads' four front rows, three are a warm-up.
    state = "torch.cat([cache[slot, : max(window - front, 0)], own])"
    reading = (state, "torch.cat([own[:1], cache[slot, :2], own[3:]])")
    ways = {
        "ours": load_way(tmp_path),
        "ours, state cleared": load_way(tmp_path, cleared=True),
        "one row early": load_way(tmp_path, early),
        "two rows of a cleared state": load_way(tmp_path, reading, cleared=True),
    }
    prompts = equality.draw_prompts(24, range(52, 64), architecture.VOCABULARY, seed=9)
    measured = [measure(model, ways, tokens) for tokens in prompts]
    differ, off, means = summarize(measured, record_property)
    assert differ["ours"] == differ["ours, state cleared"]
    # SGLang starts the convolutions of front rows from zeros, which leaves the last bits.
    assert off["ours"] < 1 and differ["ours"] <= 3 and means["cold"] > 2.5
    assert off["one row early"] > 10 and means["one row early"] < 1.5
    assert differ["two rows of a cleared state"] > 2 * differ["ours"]


def test_eight_heads(tmp_path, record_property):
    """A window is off only in heads whose tokens are not verified while its slot can be written.

    In the last row before the boundary, head ``i`` has the token ``i`` places after the boundary.
    """
    checkpoint.write_checkpoint(tmp_path / "tiny", mtp_heads=8)
    model = emulator.Model(tmp_path / "tiny")
    crossing = ("min(offset, boundary) > 0", "min(offset - reach, boundary) > 0")
    ways = {
        "ours": load_way(tmp_path),
        "ours, without overlap": load_way(tmp_path, overlap=False),
        "saved at the crossing only": load_way(tmp_path, crossing),
    }
    prompts = equality.draw_prompts(12, range(52, 64), architecture.VOCABULARY, seed=9)
    measured = [measure(model, ways, tokens) for tokens in prompts]
    off = dict.fromkeys(ways, 0)
    for one in measured:
        for way, hit in one.hits.items():
            verified = one.past + (one.next if way == "ours" else 0)
            heads = [head for head, distance in enumerate(hit.off) if distance > 1]
            assert all(head > verified for head in heads), (way, one)
            off[way] += len(heads)
    summarize(measured, record_property)
    # Without overlap the second write goes to the other slot, and does no harm there.
    assert off["ours"] < off["saved at the crossing only"] == off["ours, without overlap"]


def summarize(
    measured: list[Measured], record_property: Callable[[str, object], None]
) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
    """By way: how many first steps differ from cold ones, how far off windows are, mean tokens."""
    ways = measured[0].hits
    differ = {way: sum(one.hits[way].tokens != one.cold for one in measured) for way in ways}
    off = {way: max(max(one.hits[way].off) for one in measured) for way in ways}
    means = {way: fmean(one.hits[way].tokens for one in measured) for way in ways}
    means["cold"] = fmean(one.cold for one in measured)
    record_property(
        "table",
        "\n".join(
            f"{way:28} first step after a hit {means[way]:.2f}, cold {means['cold']:.2f}, "
            f"{differ[way]} of {len(measured)} differ; windows off by {off[way]:.2f}"
            for way in ways
        ),
    )
    return differ, off, means
