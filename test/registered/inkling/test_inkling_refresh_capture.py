"""The refresh and SGLang's own checkpoint scatter, captured in real CUDA graphs, without a server.

The conv pool after each replay is compared, bit for bit, with one that is written row by row.
"""

from __future__ import annotations

import importlib
import random
import sys
import unittest
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from inkling_sconv import names
from inkling_sconv.plugin.backend import InklingSconvBackend
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe.backend import Rig, State
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")

DRAFT_EXTEND = "DRAFT_EXTEND_V2"
MAX_ROWS, SLOTS, WIDTH, WINDOW, CHUNK = 8, 40, 256, 3, 64
STEPS = 25


class Subject(NamedTuple):
    """A class to test, and whether it is to leave draft-extend alone."""

    cls: type
    exempt: bool


def installed() -> type:
    module = importlib.import_module(names.BACKEND_MODULE)
    return probe.find_backends(module)[0]


def ours(**form: bool) -> type:
    """Our method on the installed host; ``form`` is for ``_alloc_inert_tracking``."""

    def alloc(self) -> None:
        super(cls, self)._alloc_graph_buffers()
        InklingSconvBackend._alloc_inert_tracking(self, **form)

    refresh = InklingSconvBackend._refresh_track_conv_indices
    members = {"_alloc_graph_buffers": alloc, "_refresh_track_conv_indices": refresh}
    cls = type("Ours", (installed(),), members)
    return cls


def subjects() -> dict[str, Subject]:
    """Ours in both forms of draft-extend; the installed one where it should hold."""
    found = {
        "ours": Subject(ours(), exempt=True),
        "ours, inert": Subject(ours(exempt_draft_extend=False), exempt=False),
    }
    state = probe.classify(installed()).state
    if state in (State.GUARDED, State.EXEMPT):
        found["installed"] = Subject(installed(), exempt=state is State.EXEMPT)
    return found


class Step:
    """A live batch of at most ``rows`` requests, and what it must leave in the conv pool."""

    def __init__(self, seed: int, rows: int):
        draw = random.Random(seed)
        self.live = draw.randint(1, rows)
        lengths = [draw.randint(1, 200) for _ in range(self.live)]
        self.starts = [sum(lengths[:r]) for r in range(self.live + 1)]
        self.starts += [self.starts[-1]] * (rows - self.live)
        self.prefix = [64 * draw.randint(0, 5) for _ in range(self.live)]
        self.mask = [length >= CHUNK and draw.random() < 0.7 for length in lengths]
        self.seqlens = [
            prefix + length if tracks else -1
            for prefix, length, tracks in zip(self.prefix, lengths, self.mask, strict=True)
        ]
        self.slots = draw.sample(range(1, SLOTS), self.live)

    def write(self, pool: torch.Tensor, hidden: torch.Tensor) -> None:
        """Row by row, in Python integers."""
        for r in range(self.live):
            if self.mask[r]:
                aligned = (self.seqlens[r] - self.prefix[r]) // CHUNK * CHUNK
                end = self.starts[r] + aligned
                pool[self.slots[r]] = hidden[end - WINDOW : end]


class Captured:
    """One graph: the scatter, and in front of it the refresh if ``records_refresh``."""

    def __init__(
        self, subject: type, mode: str, rows: int, *, tracked: bool, records_refresh: bool
    ):
        from sglang.srt.models.inkling_common.sconv import fused_gather_scatter_to_sconv_cache

        self.rows, self.records_refresh = rows, records_refresh
        self.rig = Rig(subject, max_rows=MAX_ROWS, window=WINDOW, chunk_size=CHUNK, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        self.pool = torch.randn(SLOTS, WINDOW, WIDTH, device="cuda", generator=generator).bfloat16()
        self.hidden = torch.randn(
            MAX_ROWS * 200, WIDTH, device="cuda", generator=generator
        ).bfloat16()
        zeros = [0] * rows
        fields = {"mask": [False] * rows, "track_seqlens": zeros, "prefix_lens": zeros}
        self.batch = self.rig.make_batch(
            mode, rows, **(fields if tracked else {}), dtypes=(torch.int64, torch.int64)
        )
        self.starts = torch.tensor(
            [4 * r for r in range(rows + 1)], dtype=torch.int32, device="cuda"
        )
        self.rig.backend.sconv_metadata.query_start_loc = self.starts
        # Recorded too, so that a graph with neither refresh nor scatter is not an empty one.
        self.runs = torch.zeros(1, dtype=torch.int64, device="cuda")

        def scatter() -> None:
            indices = self.rig.backend.sconv_metadata.track_conv_indices
            if indices is not None:
                fused_gather_scatter_to_sconv_cache(
                    hidden_states=self.hidden,
                    sconv_cache=self.pool,
                    track_conv_indices=indices,
                    mask=self.batch.mamba_track_mask,
                    dst_indices=self.batch.mamba_track_indices,
                )

        def body() -> None:
            self.runs.add_(1)
            if records_refresh:
                self.refresh()
            scatter()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.refresh()
            body()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            body()

    def refresh(self) -> None:
        self.rig.backend._refresh_track_conv_indices(self.batch, True)

    def replay(self, step: Step) -> None:
        """As a runner does it: fields changed in place, what is past the live rows cleared."""

        def put(target: torch.Tensor, values: list[int]) -> None:
            target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype))
            target[len(values) :].zero_()

        self.starts.copy_(torch.tensor(step.starts, dtype=torch.int32))
        put(self.batch.mamba_track_mask, step.mask)
        put(self.batch.mamba_track_indices, step.slots)
        put(self.batch.mamba_track_seqlens, step.seqlens)
        put(self.batch.extend_prefix_lens, step.prefix)
        if not self.records_refresh:
            self.refresh()
        self.graph.replay()


def live_replays_differ(subject: type, records_refresh: bool) -> int:
    """How many of ``STEPS`` replays per size leave another pool than the one written row by row."""
    differing = 0
    for rows in (1, 2, 5, 8):
        captured = Captured(subject, "EXTEND", rows, tracked=True, records_refresh=records_refresh)
        expected = captured.pool.clone()
        for seed in range(STEPS):
            captured.hidden.normal_()
            step = Step(1000 * rows + seed, rows)
            captured.replay(step)
            step.write(expected, captured.hidden)
            differing += not torch.equal(captured.pool, expected)
            expected.copy_(captured.pool)
    return differing


def inert_replays_differ(subject: type, mode: str) -> int:
    """How many sizes of a capture without metadata write to the pool, or record no scatter."""
    differing = 0
    for rows in range(1, MAX_ROWS + 1):
        captured = Captured(subject, mode, rows, tracked=False, records_refresh=True)
        before = captured.pool.clone()
        captured.hidden.normal_()
        captured.graph.replay()
        inert = torch.equal(captured.pool, before)
        # A live mask in the captured buffer shows that the scatter is in the graph.
        recorded = captured.batch.mamba_track_mask is not None
        if recorded:
            mask = captured.batch.mamba_track_mask
            mask.fill_(True)
            captured.graph.replay()
            recorded = not torch.equal(captured.pool, before)
            mask.fill_(False)
        differing += not (inert and recorded)
    return differing


def exempt_captures_differ(subject: type) -> int:
    """How many sizes of a draft-extend capture get indices or fields, or write to the pool."""
    differing = 0
    for rows in range(1, MAX_ROWS + 1):
        captured = Captured(subject, DRAFT_EXTEND, rows, tracked=False, records_refresh=True)
        before, runs = captured.pool.clone(), captured.runs.clone()
        captured.hidden.normal_()
        captured.graph.replay()
        batch, metadata = captured.batch, captured.rig.backend.sconv_metadata
        names = ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens")
        alone = metadata.track_conv_indices is None and all(
            getattr(batch, name) is None for name in names
        )
        replayed = torch.equal(captured.runs, runs + 1)
        differing += not (alone and replayed and torch.equal(captured.pool, before))
    return differing


@harness.needs_gpu
class TestRefreshCapture(unittest.TestCase):
    def test_replays_with_the_refresh_in_the_graph(self) -> None:
        for name, subject in subjects().items():
            with self.subTest(name):
                self.assertEqual(live_replays_differ(subject.cls, records_refresh=True), 0)

    def test_replays_with_the_refresh_in_front_of_the_graph(self) -> None:
        for name, subject in subjects().items():
            with self.subTest(name):
                self.assertEqual(live_replays_differ(subject.cls, records_refresh=False), 0)

    def test_captures_without_metadata_record_an_inert_scatter(self) -> None:
        for name, subject in subjects().items():
            with self.subTest(name):
                self.assertEqual(inert_replays_differ(subject.cls, "EXTEND"), 0)

    def test_draft_extend_captures_are_left_alone_or_inert(self) -> None:
        for name, (subject, exempt) in subjects().items():
            with self.subTest(name):
                if exempt:
                    self.assertEqual(exempt_captures_differ(subject), 0)
                else:
                    self.assertEqual(inert_replays_differ(subject, DRAFT_EXTEND), 0)

    def test_a_live_batch_without_prefix_lengths_is_refused(self) -> None:
        for name, subject in subjects().items():
            with self.subTest(name), self.assertRaises((RuntimeError, AttributeError)):
                rig = Rig(subject.cls, device="cuda")
                batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64])
                rig.refresh(batch, [0, 64], on_graph_path=False)


if __name__ == "__main__":
    unittest.main()
