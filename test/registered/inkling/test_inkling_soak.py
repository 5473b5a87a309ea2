"""A server with MTP and a small pool under thousands of requests: answers, slots, memory, death.

One GPU, no download. ``INKLING_SCONV_SOAK_REQUESTS`` is the number of requests, 3,000 by default.
"""

import os
import re
import subprocess
import sys
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import load
from inkling_sconv.proof import equality
from inkling_sconv.proof.architecture import VOCABULARY
from inkling_sconv.proof.server import Server, list_mtp_options
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=480, stage="base-b", runner_config="1-gpu-large")

REQUESTS = int(os.environ.get("INKLING_SCONV_SOAK_REQUESTS", "3000"))
# Set by whoever runs other servers on the GPU at the same time.
BESIDE = "INKLING_SCONV_SOAK_BESIDE" in os.environ
RUNNING = 8
OPTIONS = (
    *list_mtp_options(2),
    # 24 pages: room for any request, and not for what a wave of eight grows to. The sliding-window
    # pool has as many, so that only one pool is short.
    "--max-total-tokens=3072",
    "--swa-full-tokens-ratio=1.0",
    # SGLang asks for five per running request; eight are left for the prefix cache.
    "--max-mamba-cache-size=48",
    # Little is kept back for what a running request grows to; otherwise none would be retracted.
    "--schedule-conservativeness=0.1",
    "--enable-metrics",
    # Several times in the request that makes an idle server publish its counters.
    "--decode-log-interval=8",
    "--log-level-http=warning",
)
GPU_BOUND, RESIDENT_BOUND = 64 * 2**20, 256 * 2**20
KILLED_AFTER, KILL_LOAD, KILL_SECONDS = 200, 1000, 60

FIGURES: dict[str, Any] = {}
ANSWERS: dict[load.Tokens, load.Tokens] = {}


def measure_own_gpu(server: Server) -> int | None:
    """Bytes that the server's processes use on the device; None if the driver does not name them.

    It does not where there is no ``nvidia-smi``, or from within another PID namespace.
    """
    query = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    try:
        listed = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        return None
    used = dict(re.findall(r"^(\d+), (\d+)$", listed, re.MULTILINE))
    own = [int(used[str(pid)]) for pid in server.list_processes() if str(pid) in used]
    return sum(own) * 2**20 if own else None


def measure_whole_gpu() -> int:
    """Bytes in use on the device, whoever uses them."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def make_server(name: str) -> Server:
    return harness.make_server(name, {}, *OPTIONS)


@harness.needs_gpu
class TestSoak(unittest.TestCase):
    """``setUpClass`` puts the load on a server, then kills it. The tests check what that left."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.addClassCleanup(lambda: harness.record("soak", **FIGURES))
        with make_server("soak") as server:
            own = measure_own_gpu(server) is not None
            FIGURES["gpu of"] = "the server" if own else "the device"
            measure = (lambda: measure_own_gpu(server) or 0) if own else measure_whole_gpu
            rounds = load.plan_rounds(REQUESTS, VOCABULARY, seed=0)
            cls.soak = load.soak(server, rounds, VOCABULARY, measure)
            # Read before the kill, which adds to it.
            cls.log = server.log.read_text(errors="replace")
            cls.keep_figures()
            if failures := load.list_failures(cls.soak.outcomes):
                raise server.make_error(f"{len(failures)} requests failed: {failures[0]}")
            scored = load.select_scored(cls.soak.outcomes)
            answers = [o.answer for o in scored if o.answer]
            cls.rescored = equality.rescore_answers(server, [o.ids for o in scored], answers)
            FIGURES["rescored"] = cls.rescored
            (jobs,) = load.plan_rounds(KILL_LOAD, VOCABULARY, seed=1, size=KILL_LOAD)
            cls.killed = load.kill(server, jobs, KILLED_AFTER, KILL_SECONDS)
            cut_off = cls.killed.cut_off
            FIGURES["killed"] = {
                "cut off": len(cut_off),
                "seconds": cls.killed.seconds,
                "server ended after": cls.killed.ended,
                "error": cut_off[0].error if cut_off else None,
            }
        cls.left = FIGURES["processes left"] = server.list_processes()

    @classmethod
    def keep_figures(cls) -> None:
        soak = cls.soak
        for ids, outcomes in load.group_repeated(soak.outcomes).items():
            ANSWERS[ids] = max((o.tokens for o in outcomes), key=len)
        ends = Counter(outcome.end for outcome in soak.outcomes)
        FIGURES.update(
            {
                "requests": len(soak.outcomes),
                "seconds": soak.seconds,
                "shapes": Counter(outcome.shape for outcome in soak.outcomes),
                "ends": {end: ends[end] for end in load.ENDS},
                "flushes": len(soak.resident),
                "retracted": load.count_retracted(cls.log),
                "most running": load.find_most(cls.log, "running"),
                "most queued": load.find_most(cls.log, "queue"),
                "prompts asked again": len(ANSWERS),
                "start": soak.start,
                "end": soak.end,
                "looked at": len(soak.idle),
                "gpu": soak.gpu,
                "resident": soak.resident,
            }
        )

    def test_every_shape_was_there(self) -> None:
        self.assertEqual(load.find_missing(self.soak.outcomes, REQUESTS), [])

    def test_requests_queued_and_were_retracted(self) -> None:
        self.assertEqual(load.find_untested(self.log, RUNNING), [])

    def test_a_cold_prefill_gives_the_same_floats(self) -> None:
        self.assertTrue(self.rescored.exact, self.rescored)

    def test_the_same_prompt_has_the_same_answer(self) -> None:
        self.assertEqual(load.find_disagreements(self.soak.outcomes), [])

    def test_no_slot_leaked(self) -> None:
        self.assertEqual(load.find_leaks(self.soak), [])

    def test_memory_is_flat(self) -> None:
        self.assertEqual(load.check_growth("resident", self.soak.resident, RESIDENT_BOUND), [])
        if BESIDE and FIGURES["gpu of"] == "the device":
            self.skipTest("GPU memory: others use it, and the driver names no process here")
        self.assertEqual(load.check_growth("GPU", self.soak.gpu, GPU_BOUND), [])

    def test_clients_of_a_killed_scheduler_get_an_error(self) -> None:
        self.assertEqual(load.check_killed(self.killed, KILL_LOAD, KILL_SECONDS), [])

    def test_no_process_is_left(self) -> None:
        self.assertEqual(self.left, {})


@harness.needs_gpu
class TestSoakRestarted(unittest.TestCase):
    """Another server on the same model, after the first one's scheduler was killed."""

    def test_it_answers_as_the_first(self) -> None:
        if not ANSWERS:
            self.skipTest("needs the answers of TestSoak, in the same run")
        with make_server("soak-restarted") as server:
            same = [
                tuple(server.generate([ids], len(tokens))[0]["output_ids"]) == tokens
                for ids, tokens in ANSWERS.items()
            ]
        FIGURES["restarted"] = {"answers": len(same), "the same": sum(same)}
        harness.record("soak", **FIGURES)
        self.assertTrue(all(same), f"{sum(same)} of {len(same)} answers the same")


if __name__ == "__main__":
    unittest.main()
