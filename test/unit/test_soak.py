"""The load of the soak test, and its checks, against servers that are wrong in many ways."""

import functools
import re
import sys
import unittest
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_server
import pytest
from inkling_sconv.proof import equality
from inkling_sconv.proof.server import Server, ServerError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "inkling"))

import load
import test_inkling_soak

TOTAL, SIZE, SEED = 300, 75, 3
VOCABULARY = fake_server.VOCABULARY
METRICS = ("--enable-metrics",)
MIB = 2**20


@pytest.fixture
def start(start):
    return functools.partial(start, arguments=METRICS)


def soak(running: Server) -> tuple[load.Soak, equality.Comparison, set[str]]:
    """What a load on a fake server leaves, its answers rescored, and the checks that fail."""
    rounds = load.plan_rounds(TOTAL, VOCABULARY, SEED, SIZE)
    with running:
        found = load.soak(running, rounds, VOCABULARY, settle_seconds=0.3)
        kept = load.select_scored(found.outcomes)
        answers = [outcome.answer for outcome in kept]
        rescored = equality.rescore_answers(running, [outcome.ids for outcome in kept], answers)
    checks = {
        "failures": load.list_failures(found.outcomes),
        "missing": load.find_missing(found.outcomes, TOTAL),
        "untested": load.find_untested(running.log.read_text(), fake_server.RUNNING),
        "rescored": not rescored.exact,
        "disagreements": load.find_disagreements(found.outcomes),
        "leaks": load.find_leaks(found),
        "growth": load.check_growth("resident", found.resident, 64 * MIB),
    }
    return found, rescored, {name for name, complaints in checks.items() if complaints}


@pytest.mark.parametrize("total, size", ((300, 75), (300, 500), (3000, 500), (1000, 1000)))
def test_the_plan_has_every_shape(total, size):
    rounds = load.plan_rounds(total, 2048, 0, size)
    jobs = [job for jobs in rounds for job in jobs]
    turns = [(job, ids, new) for job in jobs for ids, new in job.turns]
    shapes = Counter(job.shape for job, _, _ in turns)
    assert len(turns) == total and len(rounds) == max(1, round(total / size))
    assert set(shapes) == set(load.SHAPES) and shapes["wave"] == load.WAVE * len(rounds)
    assert all(0 < token < 2047 for _, ids, _ in turns for token in ids)
    # No request is too long for the tiny server's pool.
    longest = max(sum(len(ids) + new for ids, new in job.turns) for job in jobs)
    assert longest + load.PAGE < 3072
    assert any(job.scored for job in jobs) and any(job.streamed for job in jobs)
    short = sum(new <= 40 and len(ids) <= 800 for _, ids, new in turns)
    assert short > (0.85 if size == 500 else 0.8) * len(turns)


def test_the_plan_follows_from_the_seed():
    plans = [load.plan_rounds(300, 2048, seed) for seed in (7, 7, 8)]
    assert plans[0] == plans[1] != plans[2]
    with pytest.raises(ValueError, match="a round of 12 requests"):
        load.plan_rounds(12, 2048, 0)
    # A wave outgrows the GPU test's pool of 24 pages: all eight get in with one, and end with four.
    ids, new = plans[0][0][0].turns[0]
    assert len(ids) <= load.PAGE
    assert load.WAVE <= 24 < load.WAVE * -(-(len(ids) + new) // load.PAGE)


def test_a_healthy_server_passes(start):
    found, rescored, failing = soak(running := start())
    assert failing == set() and rescored.compared > 1000
    log = running.log.read_text()
    assert load.find_untested(log, 9) == ["8 requests ran at most, not 9"]
    # As SGLang writes it, once for all requests that it takes out of a batch.
    assert (
        load.count_retracted("Retract requests. #retracted_reqs: 2, #new_tokens_gained: 256") == 2
    )
    ends = Counter(outcome.end for outcome in found.outcomes)
    assert ends["closed"] == 1 and ends["aborted"] >= 2
    assert len(found.idle) == 4 and len(found.resident) == 2 and found.start == found.end
    # The wave and the repeated prompts, whatever else met twice.
    assert len(load.group_repeated(found.outcomes)) >= load.WAVE + 1


@pytest.mark.parametrize(
    "fault, expected",
    (
        ("corrupts", {"rescored"}),
        ("drifts", {"disagreements", "rescored"}),
        ("leaks", {"leaks"}),
        ("leaks-unseen", {"leaks"}),
        ("grows", {"growth"}),
        ("never-retracts", {"untested"}),
        ("never-queues", {"untested"}),
        ("never-hits", {"missing"}),
        ("ignores-aborts", {"missing"}),
    ),
)
def test_what_is_wrong_is_found(start, fault, expected):
    _, rescored, failing = soak(start(fault))
    assert failing == expected
    if fault == "corrupts":
        answers = int(rescored.detail.partition(" ")[0])
        assert 0 < rescored.differing <= answers and 0 < rescored.largest < 1e-12


def test_a_load_ends_at_a_failure(start):
    with start("dies") as running:
        rounds = load.plan_rounds(TOTAL, VOCABULARY, SEED, SIZE)
        found = load.soak(running, rounds, VOCABULARY)
    failures = load.list_failures(found.outcomes)
    assert 0 < len(failures) == len(found.outcomes) <= load.WAVE + load.CLIENTS
    assert load.find_missing(found.outcomes, TOTAL) and load.find_leaks(found)


def test_a_server_that_cannot_be_soaked(start):
    with start("status-500") as running, pytest.raises(ServerError, match="/generate: status 500"):
        load.soak(running, [], VOCABULARY)
    with start(arguments=()) as running:
        with pytest.raises(ServerError, match="no sglang:kv_available_tokens"):
            load.soak(running, [], VOCABULARY)
        with pytest.raises(ServerError, match="0 processes are called sglang::scheduler"):
            load.kill(running, [], 0, 1)


@pytest.mark.parametrize(
    "fault, streamed, error",
    (
        ("orphan", False, r"/generate: no answer \(ConnectionError\)"),
        ("dies-mid-stream", True, "RuntimeError: CUDA error: .*; server: "),
        ("stops-mid-stream", True, "6 tokens of 40"),
        ("aborts", False, "aborted, unasked: {"),
        ('={"error": {"message": "out of pages"}}', False, "not an answer .*out of pages"),
        ('output_ids/0="a"', False, r"not an answer \(TypeError\('output_ids'\)\)"),
    ),
)
def test_a_request_that_fails_says_how(start, fault, streamed, error):
    with start(fault) as running:
        jobs = [load.Job("fresh", (((1, 2, 3), 40),), streamed=streamed)] * 4
        outcomes = load.Clients(running, "a").run(jobs, clients=2)
    # A client stops at its first failure.
    assert [outcome.end for outcome in outcomes] == ["failed"] * 2
    for line in load.list_failures(outcomes):
        assert re.fullmatch(f"fresh a-0000000.: .*{error}.*", line), line


def test_no_id_is_the_beginning_of_another(start):
    """SGLang aborts by the beginning of the id."""
    turns = (((1, 2, 3), 40),)
    jobs = [load.Job(shape, turns, streamed=True) for shape in ("aborted", *["fresh"] * 12)]
    with start() as running:
        clients = load.Clients(running, "a")
        next(clients.numbers)
        outcomes = clients.run(jobs, clients=4)
    assert Counter(outcome.end for outcome in outcomes)["whole"] == 12


def test_slots_and_memory_that_do_not_come_back():
    full = load.Counters({"kv": load.Pool(100, 0, 0), "mamba": load.Pool(48, 0, 0)}, 0, 0)
    cached = replace(full, pools={**full.pools, "mamba": load.Pool(40, 8, 0)})
    for idle, end, complaint in (
        ([cached], cached, "mamba: Pool(available=48"),
        ([], full, "the pools were never looked at"),
        ([full], replace(full, running=1), "the server was not idle"),
    ):
        (line,) = load.find_leaks(load.Soak([], full, end, idle))
        assert line.startswith(complaint)
    # Warming up is no growth.
    warm = [50 * MIB, 90 * MIB, *[100 * MIB] * 18]
    steady = [(100 + n) * MIB for n in range(20)]
    assert not load.check_growth("memory", warm, 0)
    assert not load.check_growth("memory", steady, 17 * MIB)
    for samples, bound in ((steady, 16 * MIB), ([], MIB), ([MIB], MIB), ([0, 0], MIB)):
        assert len(load.check_growth("memory", samples, bound)) == 1


def kill(running: Server, after: int = 60, bound: float = 20, total: int = TOTAL) -> load.Killed:
    (jobs,) = load.plan_rounds(total, VOCABULARY, SEED, total)
    with running:
        found = load.kill(running, jobs, after, bound)
    assert running.list_processes() == {} and running.measure_memory() == 0
    return found


def test_clients_of_a_killed_scheduler_get_an_error(start):
    found = kill(first := start())
    assert load.check_killed(found, TOTAL, 20) == []
    assert 60 <= len(found.outcomes) < TOTAL and 0 < len(found.cut_off) <= load.CLIENTS
    assert found.seconds < 20 and found.ended is not None
    for outcome in found.cut_off:
        assert re.search("no answer|broke off|tokens of", outcome.error), outcome.error
    with pytest.raises(ServerError, match="/generate: no answer"):
        first.generate([[1, 2]], 3)
    with pytest.raises(ServerError, match="/metrics: no answer"):
        first.get("/metrics")
    # A restart serves, and says the same.
    answered = {o.ids: o.tokens for o in found.outcomes if o.end == "whole"}
    with start() as second:
        for ids, tokens in list(answered.items())[:10]:
            assert tuple(second.generate([ids], len(tokens))[0]["output_ids"]) == tokens


def test_a_server_that_stays_silent_is_found(start):
    with start() as running:
        titles = running.list_processes()
        assert len(titles) == 2 and "fake_server.py" in titles[running.process.pid]
        assert 2 * MIB < running.measure_memory() < 500 * MIB
    found = kill(start("unwatched"), bound=1)
    assert load.check_killed(found, TOTAL, 1)[0] == "clients still wait after 1 s"
    assert found.ended is None


def test_a_kill_after_the_load_tests_nothing(start):
    found = kill(start(), after=10**6, total=60)
    assert load.check_killed(found, 60, 20) == [
        "no request was cut off: nothing was tested",
        "the load was over before the scheduler was killed",
    ]


@pytest.mark.parametrize(
    "printed, own",
    (("7, 700\n8, 20\n9, 5000\n", 720 * MIB), ("9, 5000\n7, [N/A]\n", None), (None, None)),
)
def test_gpu_memory_is_the_server_s_own(tmp_path, monkeypatch, printed, own):
    if printed is not None:
        driver = tmp_path / "nvidia-smi"
        driver.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
        driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    running = SimpleNamespace(list_processes=lambda: {7: "sglang::scheduler", 8: "python"})
    assert test_inkling_soak.measure_own_gpu(running) == own


@pytest.mark.parametrize("beside", (False, True))
def test_gpu_memory_is_not_judged_where_others_use_it_too(monkeypatch, beside):
    test = test_inkling_soak.TestSoak("test_memory_is_flat")
    test.soak = SimpleNamespace(gpu=[n * 2**30 for n in range(1, 21)], resident=[2**30] * 20)
    monkeypatch.setattr(test_inkling_soak, "BESIDE", beside)
    for of in ("the server", "the device"):
        monkeypatch.setitem(test_inkling_soak.FIGURES, "gpu of", of)
        skips = beside and of == "the device"
        with pytest.raises(unittest.SkipTest if skips else AssertionError, match="GPU"):
            test.test_memory_is_flat()
