"""The load of the soak test, and its checks, against servers that do what they should not."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_server
import pytest
from inkling_sconv.proof import equality, server
from inkling_sconv.proof.server import Server, ServerError
from test_verify import FAKE, marked

REGISTERED = Path(__file__).resolve().parents[1] / "registered" / "inkling"
sys.path.insert(0, str(REGISTERED))

import load  # noqa: E402
import test_inkling_soak  # noqa: E402

TOTAL, SIZE, SEED = 300, 75, 3
MIB = 2**20


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Server]]:
    marker = f"FAKE_SERVER_OF_{os.getpid()}_{time.monotonic_ns()}"

    def start(mode: str = "healthy", **options: Any) -> Server:
        environment = {"FAKE_SERVER": mode, marker: "1"}
        options = {"start_seconds": 30, "request_seconds": 30, "command": FAKE, **options}
        arguments = ("--enable-metrics",)
        return Server(tmp_path, arguments, tmp_path / "log", environment=environment, **options)

    yield start
    assert marked(marker) == []


@pytest.fixture
def soaked(start, tmp_path) -> Callable[[str], tuple[load.Soak, str, equality.Comparison]]:
    """A load on a fake server: what it left, the log, and the answers rescored."""

    def soaked(mode: str = "healthy") -> tuple[load.Soak, str, equality.Comparison]:
        rounds = load.plan(TOTAL, fake_server.VOCABULARY, SEED, SIZE)
        with start(mode) as running:
            found = load.soak(running, rounds, fake_server.VOCABULARY, settle_seconds=1.0)
            kept = load.scored(found.outcomes)
            answers = [outcome.answer for outcome in kept]
            rescored = equality.rescore_answers(running, [outcome.ids for outcome in kept], answers)
        return found, (tmp_path / "log").read_text(), rescored

    return soaked


def complaints(found: load.Soak, log: str, rescored: equality.Comparison) -> dict[str, Any]:
    """The checks that fail."""
    checks = {
        "failed": load.failed(found.outcomes),
        "missing": load.missing(found.outcomes, TOTAL),
        "untested": load.untested(log, fake_server.RUNNING),
        "rescored": [] if rescored.exact else [rescored],
        "disagreeing": load.disagreeing(found.outcomes),
        "leaked": load.leaked(found),
        "grown": load.grown("resident", found.resident, 64 * MIB),
    }
    return {name: lines for name, lines in contract.items() if lines}


# -------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("total, size", ((300, 75), (300, 500), (20_000, 500), (1000, 1000)))
def test_the_plan_has_every_shape(total, size):
    rounds = load.plan(total, 2048, 0, size)
    jobs = [job for jobs in rounds for job in jobs]
    turns = [(job, ids, new) for job in jobs for ids, new in job.turns]
    shapes = Counter(job.shape for job, _, _ in turns)
    assert len(turns) == total and len(rounds) == max(1, round(total / size))
    assert set(shapes) == set(load.SHAPES)
    assert shapes["wave"] == load.WAVE * len(rounds)
    assert all(0 < token < 2047 for _, ids, _ in turns for token in ids)
    # Nothing that the tiny server would have to cut short.
    for job in jobs:
        longest = sum(len(ids) + new for ids, new in job.turns)
        assert longest + load.PAGE < 3072
    assert any(job.scored for job in jobs) and any(job.streamed for job in jobs)


def test_the_plan_follows_from_the_seed():
    assert load.plan(300, 2048, 7) == load.plan(300, 2048, 7) != load.plan(300, 2048, 8)


def test_most_requests_of_the_plan_are_short():
    turns = [t for jobs in load.plan(20_000, 2048, 0) for job in jobs for t in job.turns]
    short = sum(new <= 40 and len(ids) <= 800 for ids, new in turns)
    assert short > 0.85 * len(turns)


def test_a_wave_outgrows_the_pool_of_the_gpu_test():
    """In pages of 24: all eight get in with one each, and end with four."""
    (first, *_), *_ = load.plan(300, 2048, 0)
    text, new = first.turns[0]
    assert len(text) <= load.PAGE
    assert load.WAVE <= 24 < load.WAVE * -(-(len(text) + new) // load.PAGE)


def test_a_round_that_is_too_small():
    with pytest.raises(ValueError, match="a round of 12 requests"):
        load.plan(12, 2048, 0)


# -------------------------------------------------------------------------------------- soak


def test_a_healthy_server_passes(soaked):
    found, log, rescored = soaked()
    assert complaints(found, log, rescored) == {}
    shapes = Counter(outcome.shape for outcome in found.outcomes)
    ends = Counter(outcome.end for outcome in found.outcomes)
    assert shapes.total() == TOTAL and set(shapes) == set(load.SHAPES)
    assert shapes["wave"] == 4 * load.WAVE and shapes["closed"] == ends[load.End.CLOSED] == 1
    assert ends[load.End.ABORTED] >= 2 and ends[load.End.FAILED] == 0
    assert rescored.compared > 1000 and "4 texts" not in rescored.detail
    assert len(found.idle) == 4 and found.flushes == 2 and found.start == found.end
    # The wave and the repeated prompts, whatever else met twice.
    assert len(load.repeated(found.outcomes)) >= load.WAVE + 1


@pytest.mark.parametrize(
    "mode, failing",
    {
        "corrupts": {"rescored"},
        "drifts": {"disagreeing", "rescored"},
        "leaks": {"leaked"},
        "leaks-unseen": {"leaked"},
        "grows": {"grown"},
        "never-retracts": {"untested"},
        "never-queues": {"untested"},
        "never-hits": {"missing"},
        "ignores-aborts": {"missing"},
    }.items(),
)
def test_what_is_wrong_is_found(soaked, mode, failing):
    assert set(complaints(*soaked(mode))) == failing


def test_one_corrupt_logprob_is_counted(soaked):
    _, _, rescored = soaked("corrupts")
    answers = int(rescored.detail.partition(" ")[0])
    assert 0 < rescored.differing <= answers and 0 < rescored.largest < 1e-12


def test_a_server_that_is_gone_raises(start):
    with start("status-500") as running, pytest.raises(ServerError, match="/generate: status 500"):
        load.soak(running, [], fake_server.VOCABULARY)


def test_a_load_ends_at_a_failure(start):
    rounds = load.plan(TOTAL, fake_server.VOCABULARY, SEED, SIZE)
    with start("dies") as running:
        found = load.soak(running, rounds, fake_server.VOCABULARY)
    assert 0 < len(load.failed(found.outcomes)) == len(found.outcomes) <= load.WAVE + load.CLIENTS
    assert load.missing(found.outcomes, TOTAL) and load.leaked(found)


def test_a_server_without_metrics(tmp_path):
    with (
        Server(tmp_path, (), tmp_path / "log", command=FAKE) as running,
        pytest.raises(ServerError, match="no sglang:kv_available_tokens"),
    ):
        load.soak(running, [], fake_server.VOCABULARY)


def job(shape: str, *, streamed: bool = False) -> load.Job:
    return load.Job(shape, (((1, 2, 3), 40),), streamed=streamed)


@pytest.mark.parametrize(
    "mode, streamed, error",
    (
        ("status-500", False, "status 500: 'Internal Server Error'"),
        ("orphan", False, r"no answer \((ServerDisconnected|ClientOS)Error\)"),
        ("hangs", False, r"no answer \(\w*TimeoutError\)"),
        ("dies-mid-stream", True, r"no answer \((ClientPayloadError|the stream broke off)"),
        ("stops-mid-stream", True, r"no answer \(the stream broke off after 6 tokens\)"),
        ("stream-broken-json", True, r"not an answer \(JSONDecodeError"),
    ),
)
def test_a_request_that_fails_says_how(start, mode, streamed, error):
    with start(mode, request_seconds=1) as running:
        clients = load.Clients(running, "a")
        outcomes = clients.run([job("fresh", streamed=streamed)] * 4, clients=2)
    # A client stops at its first failure.
    assert [outcome.end for outcome in outcomes] == [load.End.FAILED] * 2
    for line in load.failed(outcomes):
        assert line.startswith("fresh a-0000000") and "\n" not in line
        assert re.search(error, line), line


def test_an_abort_that_nobody_asked_for_is_a_failure():
    aborted = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert load._tokens(aborted, 5, None, may_be_aborted=True) == (1,)
    with pytest.raises(load._UnusableError, match="aborted, unasked"):
        load._tokens(aborted, 5, None, may_be_aborted=False)


@pytest.mark.parametrize(
    "answer, error",
    (
        ({"error": {"message": "out of pages"}}, "error: .*out of pages"),
        ({"output_ids": ["a"]}, "output_ids: "),
    ),
)
def test_what_is_no_answer(answer, error):
    with pytest.raises(load._UnusableError, match=error):
        load._tokens(answer, 5, None, may_be_aborted=False)


def test_an_id_is_no_beginning_of_another(start):
    """SGLang aborts by the beginning of the id."""
    with start() as running:
        clients = load.Clients(running, "a")
        clients.asked = 1
        jobs = [job("aborted", streamed=True), *[job("fresh", streamed=True)] * 12]
        outcomes = clients.run(jobs, clients=4)
    assert Counter(o.end for o in outcomes)[load.End.WHOLE] == 12


# ------------------------------------------------------------------------------------ checks


def soak_of(*stops: load.Counters) -> load.Soak:
    return load.Soak([], stops[0], stops[-1], list(stops[1:-1]), [], [], 1, 1.0)


FULL = load.Counters({"full": load.Pool(100, 0, 0), "mamba": load.Pool(48, 0, 0)}, 0, 0)
CACHED = load.Counters({"full": load.Pool(60, 40, 0), "mamba": load.Pool(40, 8, 0)}, 0, 0)
HELD = load.Counters({"full": load.Pool(60, 39, 1), "mamba": load.Pool(40, 8, 0)}, 0, 0)
LOST = load.Counters({"full": load.Pool(60, 40, 0), "mamba": load.Pool(40, 7, 0)}, 0, 0)


def test_slots_that_are_back_are_no_leak():
    assert load.leaked(soak_of(FULL, CACHED, CACHED, FULL)) == []


@pytest.mark.parametrize(
    "stops, complaint",
    (
        ((FULL, HELD, FULL), "full: 99 of 100 slots are back at stop 1"),
        ((FULL, CACHED, LOST, FULL), "mamba: 47 of 48 slots are back at stop 2"),
        ((FULL, CACHED, CACHED), "mamba: Pool(available=48"),
        ((FULL, FULL), "the pools were never looked at"),
        ((FULL, FULL, replace(FULL, running=1)), "the server was not idle"),
        ((replace(FULL, pools={"full": load.Pool(0, 0, 0)}),) * 3, "full: a pool of 0 slots"),
    ),
)
def test_a_leak_is_named(stops, complaint):
    assert any(line.startswith(complaint) for line in load.leaked(soak_of(*stops)))


@pytest.mark.parametrize(
    "samples, bound, grew",
    (
        ([100 * MIB] * 20, 0, False),
        # Warming up is no growth.
        ([50 * MIB, 90 * MIB, *[100 * MIB] * 18], 0, False),
        ([(100 + n) * MIB for n in range(20)], 16 * MIB, True),
        ([(100 + n) * MIB for n in range(20)], 17 * MIB, False),
        ([], 100 * MIB, True),
        ([100 * MIB], 100 * MIB, True),
        ([0, 0], 100 * MIB, True),
    ),
)
def test_growth(samples, bound, grew):
    assert bool(load.grown("memory", samples, bound)) is grew


def test_what_the_log_tells():
    log = (
        "[x] Prefill batch, #new-seq: 1, #running-req: 3, #queue-req: 24, #pending-token: 9\n"
        "[x] Decode batch, #running-req: 8, #full token: 5, #queue-req: 7\n"
        "[x] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 256\n"
        "[x] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 128\n"
    )
    assert (load.retracted(log), load.most(log, "running"), load.most(log, "queue")) == (3, 8, 24)
    assert load.untested(log, 8) == []
    assert load.untested(log, 9) == ["8 requests ran at most, not 9"]
    assert len(load.untested("", 8)) == 3


# -------------------------------------------------------------------------------------- kill


@pytest.fixture
def killed(start) -> Callable[..., tuple[load.Killed, list[load.Job], Server]]:
    def killed(mode: str = "healthy", after: int = 60, bound: float = 20, total: int = TOTAL):
        (jobs,) = load.plan(total, fake_server.VOCABULARY, SEED, total)
        with start(mode) as running:
            found = load.kill(running, jobs, after, bound)
        assert running.processes() == {}
        return found, running

    return killed


def test_clients_of_a_killed_scheduler_get_an_error(killed, start):
    found, first = killed()
    assert load.silent(found, TOTAL, 20) == []
    assert 60 <= len(found.outcomes) < TOTAL and 0 < len(found.cut_off) <= load.CLIENTS
    assert found.seconds < 20 and found.ended is not None
    assert all("no answer (" in outcome.error for outcome in found.cut_off)
    with pytest.raises(ServerError, match="/generate: no answer"):
        first.generate([[1, 2]], 3)
    # A restart serves, and says the same.
    answered = {o.ids: o.tokens for o in found.outcomes if o.end is load.End.WHOLE}
    with start() as second:
        for ids, tokens in list(answered.items())[:10]:
            assert tuple(second.generate([ids], len(tokens))[0]["output_ids"]) == tokens


def test_a_server_that_stays_silent_is_found(killed):
    found, _ = killed("unwatched", bound=2)
    assert load.silent(found, TOTAL, 2)[0] == "clients still wait after 2 s"
    assert found.ended is None


def test_a_kill_after_the_load_tests_nothing(killed):
    found, _ = killed(after=10**6, total=60)
    assert load.silent(found, 60, 20) == [
        "no request was cut off: nothing was tested",
        "the load was over before the scheduler was killed",
    ]


def test_an_error_that_says_nothing_is_found():
    bare = load.Outcome("fresh", (1,), 1, load.End.FAILED)
    assert len(load.silent(load.Killed([bare], 1.0, 1.0), 5, 20)) == 1


def test_a_server_without_a_scheduler(tmp_path):
    with (
        Server(tmp_path, (), tmp_path / "log", command=FAKE) as running,
        pytest.raises(ServerError, match="0 processes are called sglang::scheduler"),
    ):
        load.kill(running, [], 0, 1)


# ------------------------------------------------------------------------------------ server


def test_processes_have_their_titles(start):
    running = start()
    assert running.processes() == {} and running.resident() == 0
    with running:
        titles = running.processes()
        assert len(titles) == 2 and running.process.pid in titles
        assert "fake_server.py" in titles[running.process.pid]
        (scheduler,) = (pid for pid, title in titles.items() if title.startswith(load.SCHEDULER))
        assert os.getpgid(scheduler) == running.process.pid
        assert 2 * MIB < running.resident() < 500 * MIB
        os.kill(scheduler, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while running.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running.processes() == {} and running.resident() == 0


def test_get(start):
    with start() as running:
        assert "sglang:kv_used_tokens" in running.get("/metrics")
    with pytest.raises(ServerError, match="/metrics: no answer"):
        running.get("/metrics")


def test_get_an_error_status(start, monkeypatch):
    with start() as running:
        answer = type("Answer", (), {"status_code": 404, "text": "Not Found"})
        monkeypatch.setattr(running.session, "get", lambda *_, **__: answer)
        with pytest.raises(ServerError, match="/metrics: status 404: 'Not Found'"):
            running.get("/metrics")


@pytest.mark.parametrize(
    ("printed", "own"),
    (
        ("7, 700\n8, 20\n9, 5000\n", 720 * MIB),
        ("9, 5000\n", None),
        ("7, [N/A]\n", None),
        ("", None),
    ),
)
def test_gpu_memory_is_the_server_s_own(tmp_path, monkeypatch, printed, own):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    running = SimpleNamespace(processes=lambda: {7: "sglang::scheduler", 8: "python"})
    assert test_inkling_soak.own_gpu_bytes(running) == own


def test_gpu_memory_without_the_driver_s_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert test_inkling_soak.own_gpu_bytes(SimpleNamespace(processes=dict)) is None


@pytest.mark.parametrize(
    ("of", "beside", "outcome"),
    (
        ("the server", True, "failed"),
        ("the device", False, "failed"),
        ("the device", True, "skipped"),
    ),
)
def test_gpu_memory_is_not_judged_where_it_is_others_too(monkeypatch, of, beside, outcome):
    monkeypatch.setattr(test_inkling_soak, "BESIDE", beside)
    monkeypatch.setitem(test_inkling_soak.FIGURES, "gpu of", of)
    test = test_inkling_soak.TestSoak("test_memory_is_flat")
    flat, growing = [2**30] * 20, [n * 2**30 for n in range(1, 21)]
    test.soak = SimpleNamespace(gpu=growing, resident=flat)
    with pytest.raises(unittest.SkipTest if outcome == "skipped" else AssertionError, match="GPU"):
        test.test_memory_is_flat()
    # Its own memory is judged in any case.
    test.soak = SimpleNamespace(gpu=flat, resident=growing)
    with pytest.raises(AssertionError, match="resident"):
        test.test_memory_is_flat()
