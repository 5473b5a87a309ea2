"""The refresh and SGLang's own checkpoint scatter in real CUDA graphs, without a server.

After each replay the conv pool must equal, bit for bit, one that is written row by row.
"""

import importlib
import random
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from inkling_sconv import names
from inkling_sconv.plugin.backend import InklingSconvBackend
from inkling_sconv.probe.backend import Rig, State, classify, find_backends
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")

DRAFT_EXTEND = "DRAFT_EXTEND_V2"
MAX_ROWS, SLOTS, WIDTH, WINDOW, CHUNK = 8, 40, 256, 3, 64
STEPS = 25


def find_installed() -> type:
    return find_backends(importlib.import_module(names.BACKEND_MODULE))[0]


def graft(**form: bool) -> type:
    """Our method on the installed class; ``form`` goes to ``_alloc_inert_tracking``."""

    def alloc(self) -> None:
        super(cls, self)._alloc_graph_buffers()
        InklingSconvBackend._alloc_inert_tracking(self, **form)

    refresh = InklingSconvBackend._refresh_track_conv_indices
    members = {names.ALLOC_GRAPH_BUFFERS: alloc, names.REFRESH: refresh}
    cls = type("Ours", (find_installed(),), members)
    return cls


def list_subjects() -> dict[str, tuple[type, bool]]:
    """Each class to test, and whether it leaves draft-extend alone.

    Ours in both forms of draft-extend, and the installed class if it has the guard.
    """
    found = {"ours": (graft(), True), "ours, inert": (graft(exempt_draft_extend=False), False)}
    state = classify(find_installed()).state
    if state in (State.GUARDED, State.EXEMPT):
        found["installed"] = (find_installed(), state is State.EXEMPT)
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
    """One graph: the scatter, after the refresh if ``records_refresh``."""

    def __init__(
        self, subject: type, mode: str, rows: int, *, tracked: bool, records_refresh: bool = True
    ):
        from sglang.srt.models.inkling_common.sconv import fused_gather_scatter_to_sconv_cache

        self.records_refresh = records_refresh
        self.rig = Rig(subject, max_rows=MAX_ROWS, window=WINDOW, chunk_size=CHUNK, device="cuda")
        self.pool = torch.randn(SLOTS, WINDOW, WIDTH, device="cuda").bfloat16()
        self.hidden = torch.randn(MAX_ROWS * 200, WIDTH, device="cuda").bfloat16()
        zeros = [0] * rows
        fields = {"mask": [False] * rows, "track_seqlens": zeros, "prefix_lens": zeros}
        self.batch = self.rig.make_batch(
            mode, rows, **(fields if tracked else {}), dtypes=(torch.int64, torch.int64)
        )
        self.metadata = self.rig.backend.sconv_metadata
        self.metadata.query_start_loc = self.rig.make_tensor(
            [4 * r for r in range(rows + 1)], torch.int32
        )
        # Recorded too, so that a graph with neither refresh nor scatter is not an empty one.
        self.runs = torch.zeros(1, dtype=torch.int64, device="cuda")

        def run() -> None:
            self.runs.add_(1)
            if records_refresh:
                self.refresh()
            if self.metadata.track_conv_indices is not None:
                fused_gather_scatter_to_sconv_cache(
                    hidden_states=self.hidden,
                    sconv_cache=self.pool,
                    track_conv_indices=self.metadata.track_conv_indices,
                    mask=self.batch.mamba_track_mask,
                    dst_indices=self.batch.mamba_track_indices,
                )

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.refresh()
            run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def refresh(self) -> None:
        self.rig.backend._refresh_track_conv_indices(self.batch, True)

    def load(self, step: Step) -> None:
        """Change the fields in place, as a runner does, and clear what is past the live rows."""
        for target, values in (
            (self.metadata.query_start_loc, step.starts),
            (self.batch.mamba_track_mask, step.mask),
            (self.batch.mamba_track_indices, step.slots),
            (self.batch.mamba_track_seqlens, step.seqlens),
            (self.batch.extend_prefix_lens, step.prefix),
        ):
            target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype))
            target[len(values) :].zero_()
        if not self.records_refresh:
            self.refresh()


def capture_untracked(subject: type, mode: str) -> Iterator[tuple[Captured, bool]]:
    """A capture without metadata of each size, and whether its replay changed the pool."""
    for rows in range(1, MAX_ROWS + 1):
        captured = Captured(subject, mode, rows, tracked=False)
        before, runs = captured.pool.clone(), captured.runs.clone()
        captured.hidden.normal_()
        captured.graph.replay()
        assert torch.equal(captured.runs, runs + 1)
        yield captured, not torch.equal(captured.pool, before)


def count_wrong_replays(subject: type, records_refresh: bool) -> int:
    """How many of ``STEPS`` replays per size leave another pool than the one written row by row."""
    wrong = 0
    for rows in (1, 2, 5, 8):
        captured = Captured(subject, "EXTEND", rows, tracked=True, records_refresh=records_refresh)
        expected = captured.pool.clone()
        for seed in range(STEPS):
            captured.hidden.normal_()
            step = Step(1000 * rows + seed, rows)
            captured.load(step)
            captured.graph.replay()
            step.write(expected, captured.hidden)
            wrong += not torch.equal(captured.pool, expected)
            expected.copy_(captured.pool)
    return wrong


def count_wrong_inert_captures(subject: type, mode: str) -> int:
    """How many sizes of a capture without metadata write to the pool, or record no scatter."""
    wrong = 0
    for captured, wrote in capture_untracked(subject, mode):
        # A live mask in the captured buffer shows that the scatter is in the graph.
        mask, before = captured.batch.mamba_track_mask, captured.pool.clone()
        if mask is not None:
            mask.fill_(True)
            captured.graph.replay()
            mask.fill_(False)
        wrong += wrote or mask is None or torch.equal(captured.pool, before)
    return wrong


def count_wrong_exempt_captures(subject: type) -> int:
    """How many sizes of a draft-extend capture get indices or fields, or write to the pool."""
    fields = (names.TRACK_MASK, names.TRACK_INDICES, names.TRACK_SEQLENS)
    return sum(
        wrote
        or captured.metadata.track_conv_indices is not None
        or any(getattr(captured.batch, name) is not None for name in fields)
        for captured, wrote in capture_untracked(subject, DRAFT_EXTEND)
    )


def refuses_live_batch(subject: type) -> bool:
    """Whether an eager batch without prefix lengths raises."""
    rig = Rig(subject, device="cuda")
    batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        rig.refresh(batch, [0, 64], on_graph_path=False)
    except Exception:
        return True
    return False


@harness.needs_gpu
class TestRefreshCapture(unittest.TestCase):
    def test_replays(self) -> None:
        for name, (subject, _) in list_subjects().items():
            for records_refresh in (True, False):
                with self.subTest(name, records_refresh=records_refresh):
                    self.assertEqual(count_wrong_replays(subject, records_refresh), 0)

    def test_captures_without_metadata(self) -> None:
        for name, (subject, exempt) in list_subjects().items():
            with self.subTest(name):
                self.assertEqual(count_wrong_inert_captures(subject, "EXTEND"), 0)
                if exempt:
                    self.assertEqual(count_wrong_exempt_captures(subject), 0)
                else:
                    self.assertEqual(count_wrong_inert_captures(subject, DRAFT_EXTEND), 0)

    def test_a_live_batch_without_prefix_lengths_is_refused(self) -> None:
        for name, (subject, _) in list_subjects().items():
            with self.subTest(name):
                self.assertTrue(refuses_live_batch(subject))


if __name__ == "__main__":
    unittest.main()
