"""Inkling with full prefill CUDA graphs, without MTP: state reuse is exact to the bit.

One GPU, no download, one server a class.
"""

from __future__ import annotations

import contextlib
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from harness import harmless
from inkling_sconv.codemod import shape
from inkling_sconv.proof import equality
from inkling_sconv.proof.architecture import VOCABULARY
from inkling_sconv.proof.server import BASE_OPTIONS, Server
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=700, stage="base-b", runner_config="1-gpu-large")

# Every further size costs 12 s of compilation.
GRAPH_OPTIONS = ("--cuda-graph-backend-prefill=full", "--cuda-graph-bs-prefill", "256", "1024")


class OneServer:
    """A server, and the suffixes on prefixes that its prefill graphs left, against cold."""

    name: str
    options: tuple[str, ...] = ()
    fixes: str | None = None

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {} if cls.fixes is None else {"INKLING_SCONV_FIXES": cls.fixes}

    @classmethod
    def setUpClass(cls) -> None:
        cls.stack = contextlib.ExitStack()
        options = [*BASE_OPTIONS, *GRAPH_OPTIONS, *cls.options]
        log = harness.LOGS / f"server-{cls.name}.log"
        cls.server = cls.stack.enter_context(
            Server(harness.checkpoint(), options, log, environment=cls.environment())
        )
        cls.figures: dict[str, object] = {}

    @classmethod
    def tearDownClass(cls) -> None:
        harness.record(f"prefill-{cls.name}", **cls.figures)
        cls.stack.close()

    def prefill_made_hit(self) -> equality.Comparison:
        """Several requests in one replay, then prompts one by one, then a suffix on each.

        Nothing is decoded in between: that would clear the track rows, which both runners share.
        """
        at_once = equality.draw_prompts(6, (140, 150, 160), VOCABULARY, seed=8)
        prefixes = equality.draw_prompts(6, (256, 300, 500, 640, 700, 900), VOCABULARY, seed=2)
        suffixes = equality.draw_prompts(6, (20, 150, 60), VOCABULARY, seed=3)
        self.server.flush()
        self.server.generate(at_once, 0)
        self.server.flush()
        # Each prompt is a replay of its own, the next ones smaller and larger.
        for prefix in prefixes:
            self.server.generate([prefix], 0)
        comparison = equality.compare_hit_with_cold(
            self.server, "prefill-made hit", prefixes, suffixes, 64
        )
        self.figures[comparison.name] = comparison
        self.assertTrue(all(comparison.cached), comparison)
        return comparison


class IsExact(OneServer):
    """Nothing differs."""

    def test_decode_equals_a_cold_prefill(self) -> None:
        inputs = equality.draw_prompts(6, (100, 128, 333, 700), VOCABULARY)
        comparison, _ = equality.compare_decode_with_prefill(self.server, inputs, 200)
        self.figures[comparison.name] = comparison
        self.assertTrue(comparison.exact, comparison)

    def test_prefill_made_hit_equals_cold(self) -> None:
        comparison = self.prefill_made_hit()
        self.assertTrue(comparison.exact, comparison)


class Differs(OneServer):
    """The fixes off, where the harm is there: what this file is here to see must be seen."""

    fixes = "none"

    def test_prefill_made_hit_differs(self) -> None:
        comparison = self.prefill_made_hit()
        self.assertGreater(comparison.differing, 0, comparison)


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestExtraBuffer(IsExact, unittest.TestCase):
    name = "extra-buffer"


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestExtraBufferLazy(IsExact, unittest.TestCase):
    name = "extra-buffer-lazy"
    options = ("--mamba-radix-cache-strategy=extra_buffer_lazy",)


@unittest.skipIf(harmless("prefill-rows"), harmless("prefill-rows") or "")
class TestWithoutFixes(Differs, unittest.TestCase):
    name = "without-fixes"


# A speculative algorithm that keeps the prefill graph where EAGLE disables it.
NGRAM = (
    "--speculative-algorithm=NGRAM",
    "--speculative-ngram-max-bfs-breadth=1",
    "--speculative-num-draft-tokens=4",
)


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestNgram(IsExact, unittest.TestCase):
    name = "ngram"
    options = NGRAM
    fixes = "prefill-rows,prefill-tracking"


@unittest.skipIf(harmless("prefill-tracking"), harmless("prefill-tracking") or "")
class TestNgramWithoutFixes(Differs, unittest.TestCase):
    name = "ngram-without-fixes"
    options = NGRAM


def fork_reason() -> str | None:
    """Why the crashing fork cannot be made of the installed SGLang."""
    shape = shape.read_shape(find(None).backend.read_bytes())
    exempt = "draft-extend is exempt in this SGLang" if shape is source.Shape.EXEMPT else None
    return harness.NO_GPU or exempt


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestCrashingForkWithPlugin(IsExact, unittest.TestCase):
    """Our refresh on the path where a replay brings live masks."""

    name = "plugin"

    @classmethod
    def environment(cls) -> dict[str, str]:
        return harness.environment(harness.crashing_fork(), INKLING_SCONV="auto")


if __name__ == "__main__":
    unittest.main()
