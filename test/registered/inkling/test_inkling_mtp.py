"""Inkling with its own MTP heads and CUDA graphs: it starts, and state reuse is exact to the bit.

One GPU, no download. Each class starts one server on the tiny checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import sys
import unittest
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from harness import harmless
from inkling_sconv.codemod import shape
from inkling_sconv.proof import equality
from inkling_sconv.proof.architecture import VOCABULARY
from inkling_sconv.proof.server import BASE_OPTIONS, MTP_OPTIONS, Server, ServerError
from sglang.test.ci.ci_register import register_cuda_ci
from torch import Tensor

register_cuda_ci(est_time=2000, stage="base-b", runner_config="1-gpu-large")

CRASH = "AttributeError: 'NoneType' object has no attribute 'shape'"
KL_THRESHOLD = 1e-9
PROMPTS, NEW_TOKENS = 6, 300
CHECKPOINT = 128
# Around the distance of two checkpoints.
LENGTHS = (100, 128, 333, 700, 1025, 1400)


def fork_reason() -> str | None:
    """Why the crashing fork cannot be made of the installed SGLang."""
    if harness.NO_GPU:
        return harness.NO_GPU
    shape = shape.read_shape(find(None).backend.read_bytes())
    return "draft-extend is exempt in this SGLang" if shape is source.Shape.EXEMPT else None


def server(name: str, environment: dict[str, str], *options: str) -> Server:
    log = harness.LOGS / f"server-{name}.log"
    everything = (*BASE_OPTIONS, *MTP_OPTIONS, *options)
    return Server(harness.checkpoint(), everything, log, environment=environment)


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestCrashingFork(unittest.TestCase):
    """The tree between #34043 and #35042, without us."""

    def test_dies_at_start_up(self) -> None:
        environment = harness.environment(harness.crashing_fork(), INKLING_SCONV="off")
        with self.assertRaises(ServerError) as caught, server("crash", environment):
            pass
        harness.record("mtp-crash", error=str(caught.exception).partition("; ")[0])
        self.assertIn(CRASH, str(caught.exception))


DRAFT_FIXES = ("draft-checkpoint", "draft-window")


def made(running: Server, fix: str) -> bool:
    """Whether the server's log says that it made this fix, or this SGLang has no need of it."""
    log = running.log.read_text(errors="replace")
    mended = re.search(rf": {fix} \(.*; mended\.$", log, re.MULTILINE)
    return mended is not None or harmless(fix) is not None


def decoded(
    running: Server, inputs: list[list[int]], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """Prefixes that decoding made, in a cache that holds nothing else."""
    running.flush()
    answers = running.generate(inputs, new_tokens)
    return [[*i, *a["output_ids"]] for i, a in zip(inputs, answers, strict=True)]


def tokens_per_step(running: Server, prefixes: list[list[int]]) -> equality.Comparison:
    """After a hit on each prefix against cold: suffixes from one token on."""
    suffixes = equality.draw_prompts(PROMPTS, [1, 2, 5, 20, 150], VOCABULARY, seed=5)
    return equality.compare_steps_after_hit(running, prefixes, suffixes, 96)


def first_step(running: Server) -> tuple[equality.Comparison, float, float]:
    """One token past checkpoints that decoding made, with its mean after a hit, and cold."""
    lengths = range(CHECKPOINT - 12, CHECKPOINT)
    made = decoded(running, equality.draw_prompts(24, lengths, VOCABULARY, seed=9), 34)
    return equality.compare_first_step_after_hit(running, [ids[: CHECKPOINT + 1] for ids in made])


class MtpIsExact:
    """Cases for one server, which ``start`` gives."""

    name: str
    options: tuple[str, ...] = ()
    keeps_draft_checkpoints = False
    """Where they are not kept, the draft may start from another window than a cold one."""

    @classmethod
    def environment(cls) -> dict[str, str]:
        raise NotImplementedError

    @classmethod
    def setUpClass(cls) -> None:
        cls.stack = contextlib.ExitStack()
        cls.server = cls.stack.enter_context(server(cls.name, cls.environment(), *cls.options))
        # Fixes may be on by default, or by a variable of whoever runs this.
        if all(made(cls.server, fix) for fix in DRAFT_FIXES):
            cls.keeps_draft_checkpoints = True
        cls.inputs = equality.draw_prompts(PROMPTS, LENGTHS, VOCABULARY)
        cls.figures: dict[str, object] = {}

    @classmethod
    def tearDownClass(cls) -> None:
        harness.record(f"mtp-{cls.name}", **cls.figures)
        cls.stack.close()

    def check(self, comparison: equality.Comparison, cached: bool = True) -> None:
        self.figures[comparison.name] = comparison
        if cached:
            self.assertTrue(all(comparison.cached), comparison)
        self.assertTrue(comparison.exact, comparison)

    def test_decode_equals_a_cold_prefill(self) -> None:
        comparison, answers = equality.compare_decode_with_prefill(
            self.server, self.inputs, NEW_TOKENS
        )
        accept_length = equality.compute_accept_length(answers)
        distinct = min(len(set(answer["output_ids"])) for answer in answers)
        self.figures |= {"accept length": accept_length, "distinct tokens in 300": distinct}
        self.check(comparison, cached=False)
        self.assertGreater(accept_length, 1.5)
        self.assertGreaterEqual(distinct, 100)

    def test_decode_made_hit_equals_cold(self) -> None:
        suffixes = equality.draw_prompts(PROMPTS, [150], VOCABULARY, seed=1)
        self.check(
            equality.compare_hit_with_cold(
                self.server, "decode-made hit", decoded(self.server, self.inputs), suffixes, 64
            )
        )

    def test_prefill_made_hit_equals_cold(self) -> None:
        prefixes = equality.draw_prompts(
            PROMPTS, (256, 300, 700, 1100, 1537, 2000), VOCABULARY, seed=2
        )
        suffixes = equality.draw_prompts(PROMPTS, [150], VOCABULARY, seed=3)
        self.server.flush()
        self.server.generate(prefixes, 0)
        self.check(
            equality.compare_hit_with_cold(self.server, "prefill-made hit", prefixes, suffixes, 64)
        )

    def test_branches_of_a_conversation_equal_cold(self) -> None:
        turns = decoded(self.server, self.inputs)[2:4]
        # Two branches each: the second reuses what the first left, up to where they part.
        prefixes = [*turns, *turns]
        suffixes = equality.draw_prompts(4, [140, 150, 160, 170], VOCABULARY, seed=4)
        self.check(equality.compare_hit_with_cold(self.server, "branches", prefixes, suffixes, 200))

    def test_every_padded_size_replays_the_same(self) -> None:
        alone = self.server.generate(self.inputs[:1], 64)[0]["output_ids"]
        for size in range(2, 9):
            batch = equality.draw_prompts(size - 1, LENGTHS, VOCABULARY, seed=size)
            self.server.flush()
            answers = self.server.generate([self.inputs[0], *batch], 64)
            self.assertEqual(answers[0]["output_ids"], alone, f"at batch size {size}")

    def test_every_size_was_captured(self) -> None:
        log = self.server.log.read_text(errors="replace")
        sizes = re.findall(r"target verify CUDA graph begin.*?bs=\[([0-9, ]+)\]", log)
        self.figures["captured"] = sizes
        self.assertEqual(sizes[:1], [", ".join(map(str, range(1, 9)))])
        self.assertRegex(log, r"draft[ _]extend.*end")

    def test_tokens_per_step_after_a_hit(self) -> None:
        comparison = tokens_per_step(self.server, decoded(self.server, self.inputs))
        self.figures[comparison.name] = comparison
        self.assertIn("6 of 6 outputs the same", comparison.detail)
        if self.keeps_draft_checkpoints:
            self.assertTrue(comparison.exact, comparison)

    def test_first_step_after_a_hit(self) -> None:
        comparison, hit, cold = first_step(self.server)
        self.figures[comparison.name] = comparison
        self.assertEqual({*comparison.cached}, {CHECKPOINT})
        if self.keeps_draft_checkpoints:
            # A head after the first may have kept a token that was not verified yet.
            self.assertLessEqual(comparison.differing, len(comparison.cached) // 8, comparison)
            self.assertGreater(hit, cold - 0.15, comparison)

    def test_sglang_s_own_kl_helpers(self) -> None:
        from sglang.test import kl_test_utils as kl

        model = str(harness.checkpoint())
        prompts = equality.draw_prompts(48, (300, 900, 1700), VOCABULARY, seed=6)
        # In memory, where the helpers look first: nothing is downloaded.
        kl._cached_input_ids[f"{model}_{kl.DEFAULT_PROMPT_TOKENS}_{len(prompts)}"] = prompts
        thresholds = {model: {"kl_div": KL_THRESHOLD}}
        helpers = (
            kl.test_input_output_logprobs_match_helper,
            kl.test_input_output_logprobs_match_prefill_cache_hit_helper,
            kl.test_input_output_logprobs_match_decode_cache_hit_helper,
        )
        for helper in helpers:
            with self.subTest(helper.__name__):
                helper(self.server.url, thresholds, model, max_samples=6, max_new_tokens=200)
        self.figures["kl_test_utils"] = f"{len(helpers)} helpers below {KL_THRESHOLD}"

    def test_sglang_s_own_multi_turn_helpers(self) -> None:
        from sglang.test import kl_multiturn_utils as kl

        turns = [equality.draw_prompts(4, [150], VOCABULARY, seed=7 + turn) for turn in range(2)]
        kl.test_input_output_logprobs_match_helper(
            self.server.url,
            str(harness.checkpoint()),
            KL_THRESHOLD,
            self.inputs[2:],
            turn_suffixes=turns,
            max_new_tokens=150,
            assert_decode_cached_tokens=kl.make_mamba_decode_assert(CHECKPOINT),
            # Sampling is checked by others; greedy keeps a failure the same from run to run.
            sampling_temperature=0,
        )
        self.figures["kl_multiturn_utils"] = f"3 turns below {KL_THRESHOLD}"


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestCrashingForkWithPlugin(MtpIsExact, unittest.TestCase):
    name = "plugin"
    keeps_draft_checkpoints = True

    @classmethod
    def environment(cls) -> dict[str, str]:
        return harness.environment(harness.crashing_fork(), INKLING_SCONV="auto")

    def test_the_plugin_says_so(self) -> None:
        log = self.server.log.read_text(errors="replace")
        self.assertIn("is crashing", log)
        self.assertIn("replaced _refresh_track_conv_indices", log)


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestCrashingForkApplied(MtpIsExact, unittest.TestCase):
    name = "applied"

    @classmethod
    def environment(cls) -> dict[str, str]:
        return harness.environment(harness.applied(harness.crashing_fork()), INKLING_SCONV="off")


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestInstalled(MtpIsExact, unittest.TestCase):
    """The SGLang that is installed, with whatever plugins it has."""

    name = "installed"

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {}


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestLazy(MtpIsExact, unittest.TestCase):
    """Like ``TestInstalled``; a request has its second checkpoint slot near boundaries only."""

    name = "lazy"
    options = ("--mamba-radix-cache-strategy=extra_buffer_lazy",)

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {}

    def test_the_server_is_lazy(self) -> None:
        said = json.loads(self.server.get("/server_info"))
        self.assertEqual(said["mamba_radix_cache_strategy"], "extra_buffer_lazy")


@unittest.skipIf(harness.NO_GPU, harness.NO_GPU or "")
class TestFast(MtpIsExact, unittest.TestCase):
    """Our method and the draft's fixes on whatever release."""

    name = "fast"
    keeps_draft_checkpoints = True

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {"INKLING_SCONV": "fast", "INKLING_SCONV_FIXES": ",".join(DRAFT_FIXES)}


class DraftIsBehind:
    """Fixes of the draft's checkpoints left out: what the cases above must see, they see."""

    name: str
    fixes: tuple[str, ...] = ()

    @classmethod
    def environment(cls) -> dict[str, str]:
        # On guarded trees a checkpoint has a destination with our method only.
        return {"INKLING_SCONV": "fast", "INKLING_SCONV_FIXES": ",".join(cls.fixes) or "none"}

    def test_steps_after_a_hit_differ(self) -> None:
        with server(self.name, self.environment()) as running:
            for fix in self.fixes:
                self.assertTrue(made(running, fix), fix)
            self.look_at(running)
            inputs = equality.draw_prompts(PROMPTS, LENGTHS, VOCABULARY)
            steps = tokens_per_step(running, decoded(running, inputs))
            first, hit, cold = first_step(running)
        harness.record(f"mtp-{self.name}", **{steps.name: steps, first.name: first})
        self.assertGreater(steps.differing, 0, steps)
        self.assertEqual({*first.cached}, {CHECKPOINT})
        self.assertLess(hit, cold - 0.5, first)

    def look_at(self, running: Server) -> None:
        pass


@unittest.skipIf(harmless("draft-window"), harmless("draft-window") or "")
class TestWithoutFixes(DraftIsBehind, unittest.TestCase):
    name = "without-fixes"


@unittest.skipIf(harmless("draft-checkpoint"), harmless("draft-checkpoint") or "")
class TestWithoutDraftWindow(DraftIsBehind, unittest.TestCase):
    """Checkpoints are kept, as SGLang keeps them: not the window that ends on the boundary."""

    name, fixes = "without-draft-window", ("draft-checkpoint",)


@unittest.skipIf(harmless("draft-window"), harmless("draft-window") or "")
class TestZeroedDraftState(DraftIsBehind, unittest.TestCase):
    """Zeros where the draft's conv checkpoint should be."""

    name, fixes = "zeroed-draft-state", DRAFT_FIXES
    MARK = "the draft's checkpoints are zeros"

    @classmethod
    def environment(cls) -> dict[str, str]:
        # In the kernel alone: what the plugin drives on the CPU is right.
        package = harness.mutated(
            "drafts.py",
            (
                "tl.store(kept + w * cache_row, tl.where(at < STATE, old, new), mask=inside)",
                "tl.store(kept + w * cache_row, tl.where(inside, 0.0, old), mask=inside)",
            ),
            (
                "class InklingShortConvolution:",
                f'print("{cls.MARK}", flush=True)\n\n\nclass InklingShortConvolution:',
            ),
        )
        return harness.environment(package, **super().environment())

    def look_at(self, running: Server) -> None:
        self.assertIn(self.MARK, running.log.read_text(errors="replace"))


@unittest.skipIf(harmless("draft-state"), harmless("draft-state") or "")
class TestWithoutBoundaryFix(unittest.TestCase):
    """Where each step reads the draft's conv state, the accept length shows what is in it."""

    def test_the_accept_length_falls_where_the_state_is_cleared(self) -> None:
        servers = {
            "none": {"INKLING_SCONV_FIXES": "none"},
            "draft-state": {"INKLING_SCONV_FIXES": "draft-state"},
            "fork": harness.environment(harness.crashing_fork(), INKLING_SCONV="auto"),
        }
        with concurrent.futures.ThreadPoolExecutor() as pool:
            lengths = pool.map(self.accept_length, servers, servers.values())
            found = dict(zip(servers, lengths, strict=True))
        harness.record("mtp-without-boundary-fix", **found)
        self.assertLess(found["none"], 1.5)
        self.assertGreater(found["draft-state"], 2.0)
        self.assertGreater(found["fork"], 2.0)

    def accept_length(self, name: str, environment: dict[str, str]) -> float:
        variables = {**environment, "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX": "0"}
        with server(f"boundary-{name}", variables) as running:
            inputs = equality.draw_prompts(PROMPTS, LENGTHS, VOCABULARY)
            return equality.compute_accept_length(running.generate(inputs, NEW_TOKENS))


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestDraftExtendForms(unittest.TestCase):
    """Draft-extend exempt against inert tracking: the same answers, the same conv pools."""

    def test_exempt_and_inert_leave_the_same(self) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            (exempt, pools), (inert, others) = pool.map(self.seen, ("exempt", "inert"))
        steps = equality.compare("tokens per decode step", exempt[0], inert[0])
        logprobs = equality.compare("logprobs", exempt[1], inert[1])
        rows = differing = 0
        for mine, theirs in zip(pools, others, strict=True):
            # [layers, slots, window, channels]; slot 0 is the dummy that inert tracking writes.
            same = (mine[:, 1:] == theirs[:, 1:]).all(-1)
            rows, differing = rows + same.numel(), differing + int((~same).sum())
        harness.record(
            "mtp-forms", steps=steps, logprobs=logprobs, rows=rows, rows_differing=differing
        )
        self.assertTrue(steps.exact, steps)
        self.assertTrue(logprobs.exact, logprobs)
        self.assertGreater(rows, 0)
        self.assertEqual(differing, 0)

    def seen(self, form: str) -> tuple[tuple[list[list[float]], list[list[float]]], list[Tensor]]:
        """Tokens per step and logprobs of one server, and its conv pools when all is done."""
        package, pools = harness.dumping()
        variables = harness.environment(
            harness.crashing_fork(),
            INKLING_SCONV="auto",
            INKLING_SCONV_FIXES="none",
            INKLING_SCONV_DRAFT_EXTEND=form,
            # How often a start-up is asked for its health is chance, and each answer takes slots.
            SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="0",
        )
        variables["PYTHONPATH"] = os.pathsep.join([str(package), variables["PYTHONPATH"]])
        with server(f"form-{form}", variables) as running:
            steps, logprobs = [], []
            # One by one: which slot a request gets then depends on the requests alone.
            for ids in equality.draw_prompts(PROMPTS, LENGTHS, VOCABULARY):
                groups = running.stream(ids, NEW_TOKENS)
                steps.append([float(len(group)) for group in groups])
                made = [*ids, *chain.from_iterable(groups)]
                (answer,) = running.generate([[*made, 5, 6, 7]], 64, scored_from=len(made))
                meta = answer["meta_info"]
                steps.append([float(meta["spec_verify_ct"])])
                logprobs.append([entry[0] for entry in meta["output_token_logprobs"]])
            return (steps, logprobs), harness.dumped(pools)


@unittest.skipIf(fork_reason(), fork_reason() or "")
class TestMutants(unittest.TestCase):
    """Wrong versions, on a real server: what the cases above must see, they see."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.figures: dict[str, object] = {}

    @classmethod
    def tearDownClass(cls) -> None:
        harness.record("mtp-mutants", **cls.figures)

    def test_guard_inside_the_inert_fill_dies(self) -> None:
        tree = harness.applied(
            harness.crashing_fork(),
            ("if prefix_lens is None and on_graph_path:", "if prefix_lens is None and filled:"),
            (
                "        if forward_batch.mamba_track_mask is None:\n",
                "        filled = forward_batch.mamba_track_mask is None\n        if filled:\n",
            ),
        )
        environment = harness.environment(tree, INKLING_SCONV="off")
        with self.assertRaises(ServerError) as caught, server("mutant-guard", environment):
            pass
        error = str(caught.exception).partition("; ")[0]
        self.figures["guard inside the inert fill"] = error
        self.assertIn("AttributeError", error)

    def test_window_one_row_late_differs(self) -> None:
        # In the kernel alone: what the plugin drives on the CPU is right.
        package = harness.mutated("kernels.py", ("(column - WINDOW)", "(column - WINDOW + 1)"))
        variables = harness.environment(harness.crashing_fork(), INKLING_SCONV="auto")
        variables["PYTHONPATH"] = os.pathsep.join([str(package), variables["PYTHONPATH"]])
        with server("mutant-window", variables) as running:
            prefixes = equality.draw_prompts(PROMPTS, (256, 300, 700, 1100), VOCABULARY, seed=2)
            suffixes = equality.draw_prompts(PROMPTS, [150], VOCABULARY, seed=3)
            running.generate(prefixes, 0)
            comparison = equality.compare_hit_with_cold(
                running, "prefill-made hit", prefixes, suffixes, 64
            )
        self.figures["window one row late"] = comparison
        self.assertTrue(all(comparison.cached), comparison)
        self.assertGreater(comparison.differing, 0, comparison)


if __name__ == "__main__":
    unittest.main()
