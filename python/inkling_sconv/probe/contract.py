"""The contract as checks of a backend class and of the runners around it, on CPU tensors."""

import enum
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from inkling_sconv import names
from inkling_sconv.errors import describe_error
from inkling_sconv.probe import runners
from inkling_sconv.probe.backend import Rig, State

GRAPH_MODES = ("DRAFT_EXTEND_V2", "EXTEND")


class Verdict(str, enum.Enum):
    """Outcome of a check."""

    HOLDS = "holds"
    LIMIT = "limit"
    """Unmet, but the server's answers stay right; it costs speed or accepted tokens."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Row:
    """The outcome of one check."""

    asked: str
    """The requirement."""
    change: str
    """The upstream pull request or release that introduced it; ``ours`` if there is none."""
    verdict: Verdict
    seen: str
    """What the tree did, in one line."""
    fix: str = ""
    """Name of the fix that makes this check hold, or empty."""


class _UnmetError(Exception):
    """The tree does not meet the requirement; the message is what it did."""


@dataclass(frozen=True)
class _Check:
    asked: str
    change: str
    run: Callable[[type], str]
    if_unmet: Verdict
    fix: str


_CHECKS: list[_Check] = []


def _check(
    asked: str, change: str, if_unmet: Verdict = Verdict.BROKEN, *, fix: str = ""
) -> Callable[[Callable[[type], str]], Callable[[type], str]]:
    """Add a function that takes a backend class and returns what it found, in one line."""

    def add(run: Callable[[type], str]) -> Callable[[type], str]:
        _CHECKS.append(_Check(asked, change, run, if_unmet, fix))
        return run

    return add


def check_backend(backend: type) -> Iterator[Row]:
    """Run every check on ``backend``.

    A check that raises anything unexpected counts as broken, and no fix is known to cure that.
    """
    for check in _CHECKS:
        fix = check.fix
        try:
            seen, verdict = check.run(backend), Verdict.HOLDS
        except _UnmetError as error:
            seen, verdict = str(error), check.if_unmet
        except Exception as error:
            seen, verdict, fix = describe_error(error), Verdict.BROKEN, ""
        yield Row(check.asked, check.change, verdict, " ".join(seen.split()), fix)


def _require(condition: Any, seen: str) -> None:
    if not condition:
        raise _UnmetError(seen)


def _capture(rig: Rig, mode: str, requests: int = 3) -> tuple[Any, torch.Tensor | None]:
    batch = rig.make_batch(mode, requests)
    indices = rig.refresh(batch, [4 * r for r in range(requests + 1)], on_graph_path=True)
    return batch, indices


@_check("a draft-extend capture needs no prefix lengths", "#35042")
def _draft_extend_starts(backend: type) -> str:
    _, indices = _capture(Rig(backend), "DRAFT_EXTEND_V2")
    return "no indices" if indices is None else "inert indices"


@_check("a prefill capture needs no track metadata", "#34043, #35042")
def _prefill_starts(backend: type) -> str:
    _, indices = _capture(Rig(backend), "EXTEND")
    return "no indices" if indices is None else "inert indices"


@_check("warm-up and capture on one batch agree", "#35042")
def _second_call_agrees(backend: type) -> str:
    for mode in GRAPH_MODES:
        rig = Rig(backend)
        batch, first = _capture(rig, mode)
        first = None if first is None else first.clone()
        second = rig.refresh(batch, [0, 4, 8, 12], on_graph_path=True)
        same = first is second or (
            first is not None and second is not None and torch.equal(first, second)
        )
        _require(same, f"{mode}: first call {first}, second call {second}")
    return "same indices twice, both modes"


SCATTER = "a prefill capture records the checkpoint scatter"
TRACKING = "prefill graphs track under speculation"


@_check(SCATTER, "#34043")
def _scatter_is_recorded(backend: type) -> str:
    batch, indices = _capture(Rig(backend), "EXTEND")
    _require(indices is not None, "no indices: the graph records no checkpoint scatter")
    mask = batch.mamba_track_mask
    _require(mask is not None and not mask.any(), f"its mask is not inert: {mask}")
    _require(not batch.mamba_track_indices.any(), "its rows point at live slots")
    return "indices there, every row masked off"


@_check("a live batch without prefix lengths is refused", "#33023")
def _live_batch_is_refused(backend: type) -> str:
    indices = _refresh_without_prefix(backend, on_graph_path=False)
    _require(isinstance(indices, str), f"accepted, with a made-up prefix: {indices}")
    return str(indices)


def _refresh_without_prefix(backend: type, *, on_graph_path: bool) -> torch.Tensor | str | None:
    """Return the indices of one tracked row without a prefix length, or ``raises ERROR``."""
    rig = Rig(backend)
    batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        return rig.refresh(batch, [0, 64], on_graph_path=on_graph_path)
    except Exception as error:
        return f"raises {type(error).__name__}"


def _make_live_batches(rig: Rig, count: int) -> Iterator[tuple[Any, list[int]]]:
    """``count`` random batches, each with its ``query_start_loc``; the same ones every time."""
    draw = random.Random(0)
    for _ in range(count):
        requests = draw.randint(1, 8)
        live = draw.randint(0, requests)
        starts = [0]
        for _ in range(requests):
            starts.append(starts[-1] + draw.randint(1, 300))
        batch = rig.make_batch(
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


def _refresh_tracked(
    rig: Rig, requests: int, live: int | None = None, *, on_graph_path: bool = True
) -> torch.Tensor:
    """Refresh ``requests`` tracked rows of 64 new tokens each; only ``live`` rows have lengths."""
    live = requests if live is None else live
    batch = rig.make_batch(
        "EXTEND",
        requests,
        mask=[True] * requests,
        track_seqlens=[64] * live,
        prefix_lens=[0] * live,
    )
    starts = [64 * r for r in range(requests + 1)]
    indices = rig.refresh(batch, starts, on_graph_path=on_graph_path)
    if indices is None:
        raise _UnmetError("no indices")
    return indices


@_check("the window is the reference's on random live batches", "#33023")
def _window_is_right(backend: type) -> str:
    rig = Rig(backend)
    for i, (batch, starts) in enumerate(_make_live_batches(rig, 100)):
        for on_graph_path in (False, True):
            got = rig.refresh(batch, starts, on_graph_path=on_graph_path)
            if got is None:
                raise _UnmetError(f"batch {i}: no indices")
            want = rig.compute_reference(batch)
            _require(torch.equal(got, want), f"batch {i}: got {got.tolist()}, want {want.tolist()}")
    return "200 of 200 equal, eager and on the graph path"


@_check("every index is a row of the token buffer", "#33023")
def _indices_are_in_bounds(backend: type) -> str:
    rig = Rig(backend)
    for batch, starts in _make_live_batches(rig, 100):
        got = rig.refresh(batch, starts, on_graph_path=True)
        if got is None:
            raise _UnmetError("no indices")
        inside = int(got.min()) >= 0 and int(got.max()) < starts[-1]
        _require(inside, f"{got.tolist()} in a buffer of {starts[-1]} tokens")
    return "100 of 100 batches in bounds"


@_check("padded rows are zero, not the last step's", "#33023")
def _padded_rows_are_zero(backend: type) -> str:
    rig = Rig(backend)
    _refresh_tracked(rig, 4)
    got = _refresh_tracked(rig, 4, live=1)
    _require(not got[1:].any(), f"rows past the live one: {got}")
    return "3 of 3 padded rows zero"


@_check("graphs find the indices at one address", "#33023")
def _address_is_fixed(backend: type) -> str:
    rig = Rig(backend)
    found = {_refresh_tracked(rig, requests).data_ptr() for requests in (2, 8, 1)}
    _require(len(found) == 1, f"{len(found)} addresses for 3 sizes")
    return "1 address for 3 sizes"


@_check("nothing is read on the host", "#33023")
def _host_reads_nothing(backend: type) -> str:
    for on_graph_path in (False, True):
        _refresh_tracked(Rig(backend, device="meta"), 3, live=2, on_graph_path=on_graph_path)
    return "runs on meta tensors, where a read raises"


@_check(
    "draft-extend leaves mamba_track_indices alone", "0.5.22", Verdict.LIMIT, fix="draft-extend"
)
def _draft_extend_is_exempt(backend: type) -> str:
    batch, _ = _capture(Rig(backend), "DRAFT_EXTEND_V2")
    kept = batch.mamba_track_indices is None
    _require(kept, "points it at slot 0, so draft checkpoints are lost")
    return "left None"


@_check("no prefix is made up for rows that may be tracked", "ours, rule 9", Verdict.LIMIT)
def _no_prefix_is_made_up(backend: type) -> str:
    indices = _refresh_without_prefix(backend, on_graph_path=True)
    _require(
        isinstance(indices, str),
        "a live mask on the graph path gets zeros; no known runner sends one",
    )
    return str(indices)


@_check("a step with no tokens gives index 0", "ours, rule 10", Verdict.LIMIT)
def _no_tokens_give_zero(backend: type) -> str:
    rig = Rig(backend)
    batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64], prefix_lens=[0])
    got = rig.refresh(batch, [0, 0], on_graph_path=True)
    _require(got is not None and not got.any(), f"{got if got is None else got.tolist()}")
    return "0"


# The checks below are about the runners around the class.


@_check(TRACKING, "#34043", fix="prefill-tracking")
def _prefill_tracks_under_speculation(backend: type) -> str:
    module = importlib.import_module(names.PREFILL_RUNNER_MODULE)
    _require(
        runners.tracks_conv_windows(module, speculative=False), "the prefill runner never tracks"
    )
    _require(
        runners.tracks_conv_windows(module, speculative=True),
        "the prefill runner does not track under speculation",
    )
    return "the prefill runner tracks with and without speculation"


@_check("no stale track row is left past the live batch", "#34184", fix="prefill-rows")
def _prefill_rows_are_fresh(backend: type) -> str:
    stale = runners.leaves_stale_rows(importlib.import_module(names.PREFILL_RUNNER_MODULE))
    _require(not stale, "loading one request after three leaves stale track rows")
    return "loading one request after three leaves no stale rows"


@_check(
    "draft-extend graphs keep the draft's checkpoints",
    "0.5.22",
    Verdict.LIMIT,
    fix="draft-checkpoint",
)
def _draft_checkpoints_are_kept(backend: type) -> str:
    dropped = _run_draft_probe(runners.drops_draft_checkpoints, names.DRAFT_EXTEND_RUNNER_MODULE)
    _require(not dropped, "the capture's batch has no slots; after a hit the draft starts cold")
    return "the capture's batch has slots"


@_check(
    "the draft's checkpoint is the window that ends on its boundary",
    "ours",
    Verdict.LIMIT,
    fix="draft-window",
)
def _draft_window_is_right(backend: type) -> str:
    wrong = _run_draft_probe(runners.misplaces_draft_checkpoints, names.SHORT_CONVOLUTION_MODULE)
    _require(not wrong, "the wrong window; after a hit the draft may propose other tokens")
    return "the right window, with and without front rows"


@_check(
    "the draft's conv state is cleared once",
    "0.5.20",
    Verdict.LIMIT,
    fix="draft-state",
)
def _draft_state_is_cleared_once(backend: type) -> str:
    again = _run_draft_probe(runners.clears_draft_states_again, names.DRAFT_WORKER_MODULE)
    _require(not again, "every draft-extend clears it; without front rows the draft reads zeros")
    return "only the prefill clears it"


def _run_draft_probe(probe: Callable[[ModuleType], bool], name: str) -> bool:
    # The draft never changes the output, so a check that cannot run is a limit too.
    try:
        return probe(importlib.import_module(name))
    except Exception as error:
        raise _UnmetError(f"could not run: {describe_error(error)}") from error


def excuse_early_return(found: Sequence[Row], state: State) -> list[Row]:
    """Downgrade the scatter's check to a limit if the prefill runner always brings track metadata.

    Only a capture without track metadata makes an untracked refresh return early and leave the
    scatter out of the graph. A prefill runner that tracks puts the metadata into every capture.
    """
    tracks = any(row.asked == TRACKING and row.verdict is Verdict.HOLDS for row in found)
    if not (state is State.UNTRACKED and tracks):
        return list(found)
    seen = "no indices without track metadata; the runner puts it into every capture"
    return [
        replace(row, verdict=Verdict.LIMIT, seen=seen)
        if row.asked == SCATTER and row.verdict is Verdict.BROKEN
        else row
        for row in found
    ]
