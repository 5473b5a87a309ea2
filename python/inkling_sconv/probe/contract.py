"""The contract as questions to a backend class and to the runners around it, on CPU tensors."""

from __future__ import annotations

import enum
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from inkling_sconv import names
from inkling_sconv.probe import runners
from inkling_sconv.probe.backend import Rig, State

GRAPH_MODES = ("DRAFT_EXTEND_V2", "EXTEND")


class Verdict(str, enum.Enum):
    """What a check says of a tree."""

    HOLDS = "holds"
    LIMIT = "limit"
    """Known, and harmless to what the server answers."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Row:
    """One check's answer: what was asked, which upstream change it belongs to, what was seen.

    ``fix`` is the one of ``INKLING_SCONV_FIXES`` that mends it, if any does.
    """

    asked: str
    change: str
    verdict: Verdict
    seen: str
    fix: str = ""


class _BrokenError(Exception):
    """What was seen is not what the contract asks for."""


@dataclass(frozen=True)
class _Check:
    asked: str
    change: str
    run: Callable[[type], str]
    otherwise: Verdict
    fix: str


_CHECKS: list[_Check] = []


def _check(
    asked: str, change: str, otherwise: Verdict = Verdict.BROKEN, *, fix: str = ""
) -> Callable[[Callable[[type], str]], Callable[[type], str]]:
    def add(run: Callable[[type], str]) -> Callable[[type], str]:
        _CHECKS.append(_Check(asked, change, run, otherwise, fix))
        return run

    return add


def check_backend(backend: type) -> Iterator[Row]:
    """Ask ``backend`` everything. A check that raises is broken; what is seen is the exception."""
    for check in _CHECKS:
        try:
            seen, verdict = check.run(backend), Verdict.HOLDS
        except _BrokenError as error:
            seen, verdict = str(error), check.otherwise
        except Exception as error:
            seen, verdict = f"{type(error).__name__}: {error}", Verdict.BROKEN
        yield Row(check.asked, check.change, verdict, " ".join(seen.split()), check.fix)


def _require(condition: Any, seen: str) -> None:
    if not condition:
        raise _BrokenError(seen)


def _capture(rig: Rig, mode: str, requests: int = 3) -> tuple[Any, torch.Tensor | None]:
    batch = rig.batch(mode, requests)
    indices = rig.refresh(batch, [4 * r for r in range(requests + 1)], on_graph_path=True)
    return batch, indices


@_check("draft-extend captures without prefix lengths", "#35042")
def _draft_extend_starts(backend: type) -> str:
    _, indices = _capture(Rig(backend), "DRAFT_EXTEND_V2")
    return "no indices" if indices is None else "inert indices"


@_check("prefill captures without track metadata", "#34043, #35042")
def _prefill_starts(backend: type) -> str:
    _, indices = _capture(Rig(backend), "EXTEND")
    return "no indices" if indices is None else "inert indices"


@_check("warm-up and capture on one batch agree", "#35042")
def _second_call(backend: type) -> str:
    for mode in GRAPH_MODES:
        rig = Rig(backend)
        batch, first = _capture(rig, mode)
        first = None if first is None else first.clone()
        second = rig.refresh(batch, [0, 4, 8, 12], on_graph_path=True)
        same = first is second or (
            first is not None and second is not None and torch.equal(first, second)
        )
        _require(same, f"{mode}: {first} then {second}")
    return "same indices twice, both modes"


SCATTER = "a prefill capture records the checkpoint scatter"
TRACKING = "prefill graphs track under speculation"


@_check(SCATTER, "#34043")
def _scatter_recorded(backend: type) -> str:
    batch, indices = _capture(Rig(backend), "EXTEND")
    _require(indices is not None, "no indices: the scatter drops out of the graph")
    mask = batch.mamba_track_mask
    _require(mask is not None and not mask.any(), f"its mask is not inert: {mask}")
    _require(not batch.mamba_track_indices.any(), "its rows point at live slots")
    return "indices there, every row masked off"


@_check("a live batch without prefix lengths is refused", "#33023")
def _live_refused(backend: type) -> str:
    rig = Rig(backend)
    batch = rig.batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        indices = rig.refresh(batch, [0, 64], on_graph_path=False)
    except Exception as error:
        return f"raises {type(error).__name__}"
    raise _BrokenError(f"passes, with a made-up prefix: {indices}")


def _random_batches(rig: Rig, count: int) -> Iterator[tuple[Any, list[int]]]:
    draw = random.Random(0)
    for _ in range(count):
        requests = draw.randint(1, 8)
        live = draw.randint(0, requests)
        starts = [0]
        for _ in range(requests):
            starts.append(starts[-1] + draw.randint(1, 300))
        batch = rig.batch(
            "EXTEND",
            requests,
            mask=[draw.random() < 0.5 for _ in range(requests)],
            track_seqlens=[draw.randint(0, 2000) for _ in range(live)],
            prefix_lens=[draw.randint(0, 2000) for _ in range(draw.randint(live, requests))],
            dtypes=(
                draw.choice((torch.int32, torch.int64)),
                draw.choice((torch.int32, torch.int64)),
            ),
        )
        yield batch, starts


@_check("the window is the reference's on random live batches", "#33023")
def _window(backend: type) -> str:
    rig = Rig(backend)
    for number, (batch, starts) in enumerate(_random_batches(rig, 100)):
        for on_graph_path in (False, True):
            got = rig.refresh(batch, starts, on_graph_path=on_graph_path)
            _require(got is not None, f"batch {number}: no indices")
            assert got is not None
            want = rig.reference(batch)
            _require(torch.equal(got, want), f"batch {number}: {got.tolist()} not {want.tolist()}")
    return "200 of 200 equal, eager and on the graph path"


@_check("every index is a row of the token buffer", "#33023")
def _in_bounds(backend: type) -> str:
    rig = Rig(backend)
    low, high = 0, -1
    for batch, starts in _random_batches(rig, 100):
        got = rig.refresh(batch, starts, on_graph_path=True)
        if got is None:
            raise _BrokenError("no indices")
        low = min(low, int(got.min()))
        high = max(high, int(got.max()) - starts[-1])
        _require(low >= 0 and high < 0, f"{got.tolist()} in a buffer of {starts[-1]} tokens")
    return "100 of 100 batches in bounds"


@_check("padded rows are zero, not the last step's", "#33023")
def _padded_tail(backend: type) -> str:
    rig = Rig(backend)
    full = {"mask": [True] * 4, "track_seqlens": [64] * 4, "prefix_lens": [0] * 4}
    starts = [0, 64, 128, 192, 256]
    rig.refresh(rig.batch("EXTEND", 4, **full), starts, on_graph_path=True)  # type: ignore[arg-type]
    short = {"mask": [True] * 4, "track_seqlens": [64], "prefix_lens": [0]}
    got = rig.refresh(rig.batch("EXTEND", 4, **short), starts, on_graph_path=True)  # type: ignore[arg-type]
    _require(got is not None and not got[1:].any(), f"rows past the live one: {got}")
    return "3 of 3 padded rows zero"


@_check("graphs find the indices at one address", "#33023")
def _address(backend: type) -> str:
    rig = Rig(backend)
    found = set()
    for requests in (2, 8, 1):
        live = [64] * requests
        batch = rig.batch(
            "EXTEND",
            requests,
            mask=[True] * requests,
            track_seqlens=live,
            prefix_lens=[0] * requests,
        )
        got = rig.refresh(batch, [64 * r for r in range(requests + 1)], on_graph_path=True)
        _require(got is not None, "no indices")
        assert got is not None
        found.add(got.data_ptr())
    _require(len(found) == 1, f"{len(found)} addresses for 3 sizes")
    return "1 address for 3 sizes"


@_check("nothing is read on the host", "#33023")
def _no_sync(backend: type) -> str:
    rig = Rig(backend, device="meta")
    batch = rig.batch("EXTEND", 3, mask=[True] * 3, track_seqlens=[64] * 2, prefix_lens=[0] * 3)
    for on_graph_path in (False, True):
        rig.refresh(batch, [0, 64, 128, 192], on_graph_path=on_graph_path)
    return "runs on meta tensors, where a read raises"


@_check("draft-extend leaves mamba_track_indices alone", "0.5.22", Verdict.LIMIT)
def _draft_extend_exempt(backend: type) -> str:
    batch, _ = _capture(Rig(backend), "DRAFT_EXTEND_V2")
    _require(
        batch.mamba_track_indices is None,
        "points it at slot 0: draft tracking into the dummy slot, and draft checkpoints not kept",
    )
    return "left None"


@_check("no prefix is made up for rows that may be tracked", "ours, rule 9", Verdict.LIMIT)
def _refuses_unmasked(backend: type) -> str:
    rig = Rig(backend)
    batch = rig.batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        rig.refresh(batch, [0, 64], on_graph_path=True)
    except Exception as error:
        return f"raises {type(error).__name__}"
    raise _BrokenError("a live mask on the graph path gets zeros; no known runner sends one")


@_check("a step with no tokens gives index 0", "ours, rule 10", Verdict.LIMIT)
def _no_tokens(backend: type) -> str:
    rig = Rig(backend)
    batch = rig.batch("EXTEND", 1, mask=[True], track_seqlens=[64], prefix_lens=[0])
    got = rig.refresh(batch, [0, 0], on_graph_path=True)
    _require(got is not None and not got.any(), f"{got if got is None else got.tolist()}")
    return "0"


# The rest asks the runners around the class. Each is what one of fixes.py mends.


@_check(TRACKING, "#34043", fix="prefill-tracking")
def _tracks_under_speculation(backend: type) -> str:
    module = importlib.import_module(names.PREFILL_RUNNER_MODULE)
    _require(
        runners.tracks_conv_windows(module, speculative=False), "the prefill runner never tracks"
    )
    _require(
        runners.tracks_conv_windows(module, speculative=True),
        "the prefill runner leaves tracking out when a speculative algorithm is on",
    )
    return "the prefill runner tracks with and without"


@_check("no stale track row is left past the live batch", "#34184", fix="prefill-rows")
def _stale_rows(backend: type) -> str:
    stale = runners.leaves_stale_rows(importlib.import_module(names.PREFILL_RUNNER_MODULE))
    _require(not stale, "after a batch of three, one of one still tracks rows past its own")
    return "after a batch of three, one of one tracks its own row only"


@_check(
    "draft-extend graphs keep the draft's checkpoints",
    "0.5.22",
    Verdict.LIMIT,
    fix="draft-checkpoint",
)
def _draft_checkpoints_kept(backend: type) -> str:
    dropped = _asked_of_the_draft(runners.drops_draft_checkpoints, names.DRAFT_EXTEND_RUNNER_MODULE)
    _require(not dropped, "a capture has no slots for them; after a hit the draft starts cold")
    return "a capture has slots for them"


@_check(
    "the draft's checkpoint is the window that ends on its boundary",
    "ours",
    Verdict.LIMIT,
    fix="draft-window",
)
def _draft_window(backend: type) -> str:
    wrong = _asked_of_the_draft(runners.misplaces_draft_checkpoints, names.SHORT_CONVOLUTION_MODULE)
    _require(not wrong, "it is another window; after a hit the draft may propose other tokens")
    return "it is, with and without front rows"


@_check(
    "the draft's conv state is cleared once",
    "0.5.20",
    Verdict.LIMIT,
    fix="draft-state",
)
def _draft_state_kept(backend: type) -> str:
    again = _asked_of_the_draft(runners.clears_draft_states_again, names.DRAFT_WORKER_MODULE)
    _require(not again, "each draft-extend does it again; without front rows the draft reads it")
    return "by the prefill"


def _asked_of_the_draft(question: Callable[[ModuleType], bool], name: str) -> bool:
    # What the draft proposes changes no answer, so a draft that cannot be asked is no breakage.
    try:
        return question(importlib.import_module(name))
    except Exception as error:
        raise _BrokenError(f"could not be asked: {type(error).__name__}: {error}") from error


def reconcile_scatter(found: Sequence[Row], state: State) -> list[Row]:
    """The rows of a backend in ``state``, with the scatter's as its runner makes it.

    Where the runner's captures bring track metadata, what an untracked method does without it
    reaches no graph.
    """
    tracks = any(row.asked == TRACKING and row.verdict is Verdict.HOLDS for row in found)
    if not (state is State.UNTRACKED and tracks):
        return list(found)
    seen = "the runner's captures bring metadata; without it there are no indices"
    return [
        replace(row, verdict=Verdict.LIMIT, seen=seen)
        if row.asked == SCATTER and row.verdict is Verdict.BROKEN
        else row
        for row in found
    ]
