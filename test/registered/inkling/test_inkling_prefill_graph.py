"""Inkling with full prefill CUDA graphs, without MTP: state reuse is exact to the bit.

One GPU, no download. Each class starts one server on the tiny checkpoint.
"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from inkling_sconv.proof import equality
from inkling_sconv.proof.architecture import VOCABULARY
from inkling_sconv.proof.server import LAZY_OPTION
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=700, stage="base-b", runner_config="1-gpu-large")

GRAPH_OPTIONS = ("--cuda-graph-backend-prefill=full",)
# A speculative algorithm that keeps the prefill graph where EAGLE disables it.
NGRAM = (
    "--speculative-algorithm=NGRAM",
    "--speculative-ngram-max-bfs-breadth=1",
    "--speculative-num-draft-tokens=4",
)


class PrefillServer(harness.OneServer):
    kind = "prefill"
    options = GRAPH_OPTIONS

    def compare_prefill_made_hit(self) -> equality.Comparison:
        """Prefill several requests in one replay, then prompts one by one; compare hits on these.

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


class IsExact(PrefillServer):
    def test_decode_equals_a_cold_prefill(self) -> None:
        inputs = equality.draw_prompts(6, (100, 128, 333, 700), VOCABULARY)
        comparison, _ = equality.compare_decode_with_prefill(self.server, inputs, 200)
        self.figures[comparison.name] = comparison
        self.assertTrue(comparison.exact, comparison)

    def test_prefill_made_hit_equals_cold(self) -> None:
        comparison = self.compare_prefill_made_hit()
        self.assertTrue(comparison.exact, comparison)

    def test_decode_made_hit_equals_cold(self) -> None:
        inputs = equality.draw_prompts(6, (100, 128, 333, 700), VOCABULARY)
        prefixes = equality.extend_by_decoding(self.server, inputs, 200)
        suffixes = equality.draw_prompts(6, (150,), VOCABULARY, seed=1)
        comparison = equality.compare_hit_with_cold(
            self.server, "decode-made hit", prefixes, suffixes, 64
        )
        self.figures[comparison.name] = comparison
        self.assertTrue(all(comparison.cached), comparison)
        self.assertTrue(comparison.exact, comparison)


class Differs(PrefillServer):
    """With the fixes off, the test above must turn red."""

    variables = ("INKLING_SCONV_FIXES=none",)

    def test_prefill_made_hit_differs(self) -> None:
        comparison = self.compare_prefill_made_hit()
        self.assertGreater(comparison.differing, 0, comparison)


@harness.needs_gpu
class TestExtraBuffer(IsExact, unittest.TestCase):
    """Without speculation."""

    name = "extra-buffer"


@harness.needs_gpu
class TestExtraBufferLazy(IsExact, unittest.TestCase):
    name, options = "extra-buffer-lazy", (*GRAPH_OPTIONS, LAZY_OPTION)


@harness.needs_harm("prefill-rows")
class TestWithoutFixes(Differs, unittest.TestCase):
    name = "without-fixes"


@harness.needs_gpu
class TestNgram(IsExact, unittest.TestCase):
    name, options = "ngram", (*GRAPH_OPTIONS, *NGRAM)
    variables = ("INKLING_SCONV_FIXES=prefill-rows,prefill-tracking",)


@harness.needs_harm("prefill-tracking")
class TestNgramWithoutFixes(Differs, unittest.TestCase):
    name, options = "ngram-without-fixes", (*GRAPH_OPTIONS, *NGRAM)


@harness.needs_crashing_fork
class TestCrashingForkWithPlugin(IsExact, unittest.TestCase):
    """Our refresh on the path where a replay brings live masks."""

    name = "plugin"

    @classmethod
    def make_environment(cls) -> dict[str, str]:
        return harness.make_environment(harness.make_crashing_fork(), INKLING_SCONV="auto")


if __name__ == "__main__":
    unittest.main()
