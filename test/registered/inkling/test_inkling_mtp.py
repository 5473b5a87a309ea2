"""Inkling with its own MTP heads and CUDA graphs: it starts, and state reuse is exact to the bit.

One GPU, no download. Each class starts one server on the tiny checkpoint, or a few.
"""

import json
import re
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import server_plugins
from inkling_sconv.proof import equality
from inkling_sconv.proof.architecture import VOCABULARY
from inkling_sconv.proof.server import (
    LAZY_OPTION,
    Server,
    ServerError,
    find_prefill_graph,
    list_mtp_options,
)
from inkling_sconv.proof.verify import LENGTHS, NEW_TOKENS, PROMPTS, SUFFIX
from sglang.test.ci.ci_register import register_cuda_ci
from torch import Tensor

register_cuda_ci(est_time=2000, stage="base-b", runner_config="1-gpu-large")

CRASH = "AttributeError: 'NoneType' object has no attribute 'shape'"
KL_THRESHOLD = 1e-9
CHECKPOINT = 128
DRAFT_FIXES = ("draft-checkpoint", "draft-window")


def make_server(name: str, environment: dict[str, str]) -> Server:
    return harness.make_server(name, environment, *list_mtp_options(2))


def make_fork_environment(*plugins: Path, **variables: str) -> dict[str, str]:
    """The crashing fork with our plugin, which cures it, and test plugins."""
    variables = {"INKLING_SCONV": "auto", **variables}
    return harness.make_environment(*plugins, harness.make_crashing_fork(), **variables)


def draw_inputs() -> list[list[int]]:
    return equality.draw_prompts(PROMPTS, LENGTHS, VOCABULARY)


def draw_suffixes(seed: int) -> list[list[int]]:
    return equality.draw_prompts(PROMPTS, [SUFFIX], VOCABULARY, seed=seed)


def compare_steps(server: Server) -> equality.Comparison:
    """Tokens per decode step on prefixes that decoding made: suffixes from one token on."""
    prefixes = equality.extend_by_decoding(server, draw_inputs(), NEW_TOKENS)
    suffixes = equality.draw_prompts(PROMPTS, [1, 2, 5, 20, 150], VOCABULARY, seed=5)
    return equality.compare_steps_after_hit(server, prefixes, suffixes, 96)


def compare_first_step(server: Server) -> tuple[equality.Comparison, float, float]:
    """First decode step, one token past checkpoints that decoding made; means of hit and cold."""
    lengths = range(CHECKPOINT - 12, CHECKPOINT)
    inputs = equality.draw_prompts(24, lengths, VOCABULARY, seed=9)
    prefixes = equality.extend_by_decoding(server, inputs, 34)
    inputs = [ids[: CHECKPOINT + 1] for ids in prefixes]
    return equality.compare_first_step_after_hit(server, inputs)


def compare_prefill_made_hit(server: Server) -> equality.Comparison:
    """Hits on prefixes that were prefilled four at once, in one graph, and one by one."""
    at_once = equality.draw_prompts(4, (130, 200, 256, 300), VOCABULARY, seed=2)
    alone = equality.draw_prompts(4, (256, 700, 1100, 2000), VOCABULARY, seed=10)
    server.flush()
    server.generate(at_once, 0)
    for prefix in alone:
        server.generate([prefix], 0)
    prefixes = [*at_once, *alone]
    suffixes = equality.draw_prompts(len(prefixes), [SUFFIX], VOCABULARY, seed=3)
    return equality.compare_hit_with_cold(server, "prefill-made hit", prefixes, suffixes, 64)


@harness.needs_crashing_fork
class TestCrashingFork(unittest.TestCase):
    """The tree between #34043 and #35042, without us."""

    def test_dies_at_start_up(self) -> None:
        environment = make_fork_environment(INKLING_SCONV="off")
        with self.assertRaises(ServerError) as caught, make_server("crash", environment):
            pass
        harness.record("mtp-crash", error=str(caught.exception).partition("; ")[0])
        self.assertIn(CRASH, str(caught.exception))


class MtpIsExact(harness.OneServer):
    """Tests of one server: everything is equal, float by float."""

    kind = "mtp"
    options = list_mtp_options(2)
    keeps_draft_checkpoints = False
    """If they are lost, the draft starts from another window after a hit than on a cold run."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # Fixes may be on by default, or by a variable of whoever runs this.
        has_fixes = all(harness.has_fix(cls.server, fix) for fix in DRAFT_FIXES)
        cls.keeps_draft_checkpoints |= has_fixes
        cls.figures["prefill graph"] = find_prefill_graph(cls.server.log)
        cls.inputs = draw_inputs()

    def check(self, comparison: equality.Comparison, cached: bool = True) -> None:
        self.figures[comparison.name] = comparison
        if cached:
            self.assertTrue(all(comparison.cached), comparison)
        self.assertTrue(comparison.exact, comparison)

    def test_decode_equals_a_cold_prefill(self) -> None:
        found = equality.compare_decode_with_prefill(self.server, self.inputs, NEW_TOKENS)
        comparison, answers = found
        accept_length = equality.compute_accept_length(answers)
        distinct = min(len(set(answer["output_ids"])) for answer in answers)
        self.figures |= {"accept length": accept_length, "distinct tokens in 300": distinct}
        self.check(comparison, cached=False)
        self.assertGreater(accept_length, 1.5)
        self.assertGreaterEqual(distinct, 100)

    def test_decode_made_hit_equals_cold(self) -> None:
        prefixes = equality.extend_by_decoding(self.server, self.inputs, NEW_TOKENS)
        suffixes, name = draw_suffixes(seed=1), "decode-made hit"
        self.check(equality.compare_hit_with_cold(self.server, name, prefixes, suffixes, 64))

    def test_prefill_made_hit_equals_cold(self) -> None:
        self.check(compare_prefill_made_hit(self.server))

    def test_branches_of_a_conversation_equal_cold(self) -> None:
        turns = equality.extend_by_decoding(self.server, self.inputs, NEW_TOKENS)[2:4]
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
        # Newer releases name the sizes at the end.
        sizes = re.findall(r"target verify CUDA graph (?:begin|end)\. .*?bs=\[([0-9, ]+)\]", log)
        self.figures["captured"] = sizes
        self.assertEqual(sizes[:1], [", ".join(map(str, range(1, 9)))])
        self.assertRegex(log, r"draft[ _]extend.*end")

    def test_tokens_per_step_after_a_hit(self) -> None:
        comparison = compare_steps(self.server)
        self.figures[comparison.name] = comparison
        self.assertIn("6 of 6 outputs the same", comparison.detail)

    def test_first_step_after_a_hit(self) -> None:
        comparison, hit, cold = compare_first_step(self.server)
        self.figures[comparison.name] = comparison
        self.assertEqual({*comparison.cached}, {CHECKPOINT})
        if self.keeps_draft_checkpoints:
            # The windows are close to a cold run's, not equal.
            self.assertGreater(hit, 0.9 * cold, comparison)

    def test_sglang_s_own_kl_helpers(self) -> None:
        from sglang.test import kl_test_utils as kl

        model = str(harness.make_checkpoint())
        prompts = equality.draw_prompts(48, (300, 900, 1700), VOCABULARY, seed=6)
        # The helpers look in memory first, so they download nothing.
        kl._cached_input_ids[f"{model}_{kl.DEFAULT_PROMPT_TOKENS}_{len(prompts)}"] = prompts
        thresholds = {model: {"kl_div": KL_THRESHOLD}}
        for kind in ("", "_prefill_cache_hit", "_decode_cache_hit"):
            helper = getattr(kl, f"test_input_output_logprobs_match{kind}_helper")
            with self.subTest(helper.__name__):
                helper(self.server.url, thresholds, model, max_samples=6, max_new_tokens=200)
        self.figures["kl_test_utils"] = f"3 helpers below {KL_THRESHOLD}"

    def test_sglang_s_own_multi_turn_helpers(self) -> None:
        from sglang.test import kl_multiturn_utils as kl

        turns = [equality.draw_prompts(4, [150], VOCABULARY, seed=7 + turn) for turn in range(2)]
        kl.test_input_output_logprobs_match_helper(
            self.server.url,
            str(harness.make_checkpoint()),
            KL_THRESHOLD,
            self.inputs[2:],
            turn_suffixes=turns,
            max_new_tokens=150,
            assert_decode_cached_tokens=kl.make_mamba_decode_assert(CHECKPOINT),
            # Greedy, so that a failure is the same from run to run.
            sampling_temperature=0,
        )
        self.figures["kl_multiturn_utils"] = f"3 turns below {KL_THRESHOLD}"


@harness.needs_crashing_fork
class TestCrashingForkWithPlugin(MtpIsExact, unittest.TestCase):
    name = "plugin"
    keeps_draft_checkpoints = True

    @classmethod
    def make_environment(cls) -> dict[str, str]:
        return make_fork_environment()

    def test_the_plugin_says_so(self) -> None:
        log = self.server.log.read_text(errors="replace")
        self.assertIn("is crashing", log)
        self.assertIn("replaced _refresh_track_conv_indices", log)


@harness.needs_crashing_fork
class TestCrashingForkEightHeads(TestCrashingForkWithPlugin):
    name = "plugin-eight-heads"
    heads = 8
    options = list_mtp_options(8)


@harness.needs_crashing_fork
class TestCrashingForkApplied(MtpIsExact, unittest.TestCase):
    name = "applied"

    @classmethod
    def make_environment(cls) -> dict[str, str]:
        tree = harness.make_applied_tree(harness.make_crashing_fork())
        return harness.make_environment(tree, INKLING_SCONV="off")


@harness.needs_gpu
class TestInstalled(MtpIsExact, unittest.TestCase):
    """The SGLang that is installed, with whatever plugins it has."""

    name = "installed"


@harness.needs_gpu
class TestEightHeads(MtpIsExact, unittest.TestCase):
    """Like ``TestInstalled``, with as many heads as released checkpoints have."""

    name = "eight-heads"
    heads = 8
    options = list_mtp_options(8)


@harness.needs_gpu
class TestLazy(MtpIsExact, unittest.TestCase):
    """Like ``TestInstalled``; a request has its second checkpoint slot near boundaries only."""

    name = "lazy"
    options = (*list_mtp_options(2), LAZY_OPTION)

    def test_the_server_is_lazy(self) -> None:
        info = json.loads(self.server.get("/server_info"))
        self.assertEqual(info["mamba_radix_cache_strategy"], "extra_buffer_lazy")


@harness.needs_gpu
class TestFast(MtpIsExact, unittest.TestCase):
    """Our method and the draft's fixes on any release, here without prefill graphs."""

    name = "fast"
    options = (*list_mtp_options(2), "--cuda-graph-backend-prefill=disabled")
    keeps_draft_checkpoints = True
    variables = ("INKLING_SCONV=fast", f"INKLING_SCONV_FIXES={','.join(DRAFT_FIXES)}")


class DraftIsBehind:
    """With a fix of the draft's checkpoints left out, the tests above must turn red."""

    name: str
    fixes: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    logged = ""

    def test_the_first_step_gives_fewer_tokens(self) -> None:
        environment = harness.make_environment(
            *map(harness.make_plugin, self.plugins),
            # On guarded trees, a checkpoint would have no destination otherwise.
            INKLING_SCONV="fast",
            INKLING_SCONV_FIXES=",".join(self.fixes) or "none",
        )
        with make_server(self.name, environment) as server:
            for fix in self.fixes:
                self.assertTrue(harness.has_fix(server, fix), fix)
            self.assertIn(self.logged, server.log.read_text(errors="replace"))
            steps = compare_steps(server)
            first, hit, cold = compare_first_step(server)
        harness.record(f"mtp-{self.name}", **{steps.name: steps, first.name: first})
        self.assertEqual({*first.cached}, {CHECKPOINT})
        self.assertLess(hit, cold - 0.5, first)


@harness.needs_harm("draft-window")
class TestWithoutFixes(DraftIsBehind, unittest.TestCase):
    name = "without-fixes"


@harness.needs_harm("draft-checkpoint")
class TestWithoutDraftWindow(DraftIsBehind, unittest.TestCase):
    """Checkpoints are kept as SGLang keeps them: not the window that ends on the boundary."""

    name, fixes = "without-draft-window", ("draft-checkpoint",)


@harness.needs_harm("draft-window")
class TestZeroedDraftState(DraftIsBehind, unittest.TestCase):
    """Zeros where the draft's conv checkpoint should be."""

    name, fixes, plugins = "zeroed-draft-state", DRAFT_FIXES, ("zero_draft_checkpoints",)
    logged = server_plugins.ZEROED


@harness.needs_harm("draft-state")
class TestWithoutBoundaryFix(unittest.TestCase):
    """If each step reads the draft's conv state, the accept length shows what is in it."""

    def test_the_accept_length_falls_where_the_state_is_cleared(self) -> None:
        servers = {name: {"INKLING_SCONV_FIXES": name} for name in ("none", "draft-state")}
        servers["fork"] = make_fork_environment()
        with ThreadPoolExecutor() as pool:
            lengths = pool.map(self.measure_accept_length, servers, servers.values())
            found = dict(zip(servers, lengths, strict=True))
        harness.record("mtp-without-boundary-fix", **found)
        self.assertLess(found["none"], 1.5)
        self.assertGreater(found["draft-state"], 2.0)
        self.assertGreater(found["fork"], 2.0)

    def measure_accept_length(self, name: str, environment: dict[str, str]) -> float:
        variables = {**environment, "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX": "0"}
        with make_server(f"boundary-{name}", variables) as server:
            return equality.compute_accept_length(server.generate(draw_inputs(), NEW_TOKENS))


@harness.needs_crashing_fork
class TestDraftExtendForms(unittest.TestCase):
    """Draft-extend exempt against inert tracking: the same answers, the same conv pools."""

    def test_exempt_and_inert_leave_the_same(self) -> None:
        with ThreadPoolExecutor() as pool:
            exempt, inert = pool.map(self.run_server, ("exempt", "inert"))
        steps = equality.compare("tokens per decode step", exempt[0], inert[0])
        logprobs = equality.compare("logprobs", exempt[1], inert[1])
        rows = differing = 0
        for mine, theirs in zip(exempt[2], inert[2], strict=True):
            # [layers, slots, window, channels]; slot 0 is the dummy that inert tracking writes.
            same = (mine[:, 1:] == theirs[:, 1:]).all(-1)
            rows, differing = rows + same.numel(), differing + int((~same).sum())
        figures = {"rows": rows, "rows_differing": differing}
        harness.record("mtp-forms", steps=steps, logprobs=logprobs, **figures)
        self.assertTrue(steps.exact and logprobs.exact, (steps, logprobs))
        self.assertTrue(rows > 0 and differing == 0, figures)

    def run_server(self, form: str) -> tuple[list[list[float]], list[list[float]], list[Tensor]]:
        """Tokens per step and logprobs of one server, and its conv pools at the end."""
        pools = harness.make_folder()
        variables = {
            "INKLING_SCONV_FIXES": "none",
            "INKLING_SCONV_DRAFT_EXTEND": form,
            server_plugins.POOLS_VARIABLE: str(pools),
            # How often a start-up is asked for its health is chance, and each answer takes slots.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        environment = make_fork_environment(harness.make_plugin("dump_conv_pools"), **variables)
        with make_server(f"form-{form}", environment) as server:
            steps, logprobs = [], []
            # One by one: which slot a request gets then depends on the requests alone.
            for ids in draw_inputs():
                groups = server.stream(ids, NEW_TOKENS)
                steps.append([float(len(group)) for group in groups])
                prefix = [*ids, *chain.from_iterable(groups)]
                (answer,) = server.generate([[*prefix, 5, 6, 7]], 64, scored_from=len(prefix))
                meta = answer["meta_info"]
                steps.append([float(meta["spec_verify_ct"])])
                logprobs.append([entry[0] for entry in meta["output_token_logprobs"]])
            return steps, logprobs, harness.read_conv_pools(pools)


@harness.needs_crashing_fork
class TestMutants(unittest.TestCase):
    """Wrong versions, on a real server: the tests above must turn red."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.figures: dict[str, Any] = {}
        cls.addClassCleanup(lambda: harness.record("mtp-mutants", **cls.figures))

    def test_guard_inside_the_inert_fill_dies(self) -> None:
        tree = harness.make_applied_tree(
            harness.make_crashing_fork(),
            ("if prefix_lens is None and on_graph_path:", "if prefix_lens is None and filled:"),
            (
                "        if forward_batch.mamba_track_mask is None:\n",
                "        filled = forward_batch.mamba_track_mask is None\n        if filled:\n",
            ),
        )
        environment = harness.make_environment(tree, INKLING_SCONV="off")
        with self.assertRaises(ServerError) as caught, make_server("mutant-guard", environment):
            pass
        error = str(caught.exception).partition("; ")[0]
        self.figures["guard inside the inert fill"] = error
        self.assertIn("AttributeError", error)

    def test_window_one_row_late_differs(self) -> None:
        environment = make_fork_environment(harness.make_plugin("move_windows_one_row_late"))
        with make_server("mutant-window", environment) as server:
            comparison = compare_prefill_made_hit(server)
        self.figures["window one row late"] = comparison
        self.assertTrue(all(comparison.cached), comparison)
        self.assertGreater(comparison.differing, 0, comparison)


if __name__ == "__main__":
    unittest.main()
