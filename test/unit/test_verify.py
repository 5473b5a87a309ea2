"""``verify`` against servers that do what servers do: right verdict, no process left, log kept."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import fake_server
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inkling_sconv import cli
from inkling_sconv.proof import equality, server, verify
from inkling_sconv.proof.server import Server, ServerError
from typer.testing import CliRunner

TEST = Path(__file__).resolve().parent.parent
FAKE = (sys.executable, "-S", str(TEST / "fake_server.py"))
FLOATS = 1800  # 6 prompts x 300 tokens
PR_SET_CHILD_SUBREAPER = 36


def marked(marker: str) -> list[str]:
    """The processes with ``marker`` in their environment, zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # An ended process has no environment to read, and may be gone altogether.
        with contextlib.suppress(OSError):
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture
def marker() -> Iterator[str]:
    """In the environment of every server of a test, none of which may be left after it."""
    mark = f"FAKE_SERVER_OF_{os.getpid()}_{time.monotonic_ns()}"
    yield mark
    assert marked(mark) == []


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)


@pytest.fixture
def start(marker, tmp_path) -> Callable[..., Server]:
    def start(mode: str = "healthy", **options: Any) -> Server:
        environment = {"FAKE_SERVER": mode, marker: "1"}
        options = {"start_seconds": 30, "request_seconds": 30, "command": FAKE, **options}
        return Server(tmp_path, (), tmp_path / "log", environment=environment, **options)

    return start


@pytest.fixture
def seen(marker, tmp_path) -> Callable[..., verify.Result]:
    """What ``verify`` finds on a fake server; its log is named, and there."""

    def seen(mode: str, **options: Any) -> verify.Result:
        log, steps = tmp_path / "log", []
        options = {"start_seconds": 30, "request_seconds": 30, "command": FAKE, **options}
        result = verify.verify(
            tmp_path,
            log,
            steps.append,
            vocabulary=fake_server.VOCABULARY,
            environment={"FAKE_SERVER": mode, marker: "1"},
            **options,
        )
        assert steps and result.log == str(log) and log.is_file()
        assert result.passed is (result.error is None)
        if result.error is not None:
            assert result.error.endswith(f"log: {log}") and "\n" not in result.error
        # Strict JSON: no NaN and no Infinity in it.
        json.dumps(result.as_dict(), allow_nan=False)
        return result

    return seen


# ------------------------------------------------------------------------------- verdicts


def test_a_healthy_server_passes(seen):
    result = seen("healthy")
    assert result.passed, result
    decoded, hit = result.comparisons
    assert (decoded.compared, decoded.differing, decoded.largest) == (FLOATS, 0, 0.0)
    # 149 scored tokens of the suffix and 32 more, six times.
    assert (hit.compared, hit.differing) == (6 * 181, 0)
    assert hit.cached == tuple((n + 300) // 128 * 128 for n in verify.LENGTHS)
    assert result.accept_length == 2.0 and result.distinct_tokens > 100


def test_one_ulp_is_one_differing_float(seen):
    result = seen("one-ulp")
    decoded, hit = result.comparisons
    assert "logprobs differ" in result.error
    assert (decoded.compared, decoded.differing) == (FLOATS, 1) and hit.exact
    prompt = equality.draw_prompts(6, verify.LENGTHS, fake_server.VOCABULARY)[-1]
    last = fake_server.logprobs(fake_server.continued(prompt, 300))[-1]
    assert decoded.largest == math.ulp(math.nextafter(last, 0)) > 0


def test_a_hit_that_changes_logprobs_fails(seen):
    result = seen("stale")
    decoded, hit = result.comparisons
    # Only the cached request says something else: what it generates.
    assert "logprobs differ" in result.error and decoded.exact and hit.differing == 6 * 32


@pytest.mark.parametrize("mode", fake_server.NO_NUMBER)
def test_a_logprob_that_is_no_number_differs(seen, mode):
    result = seen(mode)
    decoded = result.comparisons[0]
    assert "logprobs differ" in result.error
    assert (decoded.compared, decoded.differing) == (FLOATS, 1) and decoded.largest == 0.0
    assert "1 not finite" in decoded.detail


@pytest.mark.parametrize(
    "mode, error",
    {
        "never-hits": "the prefix cache was not hit",
        "does-not-speculate": "the server did not speculate",
        "never-flushes": "the prefix cache was not emptied",
        "refuses-to-flush": "/flush_cache?timeout=30: status 400",
        "status-500": "/generate: status 500: 'Internal Server Error'",
    }.items(),
)
def test_what_was_not_shown_fails(seen, mode, error):
    assert error in seen(mode).error


@pytest.mark.parametrize("mode", [*fake_server.RUBBISH, *fake_server.RUBBISH_SCORES])
def test_rubbish_is_named(seen, mode):
    result = seen(mode)
    assert result.error.startswith("server: /generate: "), result.error
    assert len(result.error) < 500


# --------------------------------------------------------------------- servers that end


def test_a_crash_at_start(seen):
    error = seen("crashes").error
    crash = "AttributeError: 'NoneType' object has no attribute 'shape'"
    assert error.startswith(f"{crash}; server: it ended with 1 before it served; log: ")


def test_an_end_without_an_exception(seen):
    assert seen("quits").error.startswith("server: it ended with 3 before it served; log: ")


@pytest.mark.parametrize(
    "mode, why",
    {
        "never-listens": "",
        "never-serves": "",
        "silent-health": "",
        "unhealthy": " (/health: status 503)",
    }.items(),
)
def test_one_that_never_serves(seen, mode, why):
    start = time.monotonic()
    error = seen(mode, start_seconds=1).error
    assert error.startswith(f"server: it did not serve within 1 s{why}; log: ")
    assert time.monotonic() - start < 6


def test_one_that_never_answers(seen):
    error = seen("hangs", request_seconds=0.5).error
    assert error.startswith("server: /generate: no answer (ReadTimeout); log: ")


def test_death_in_a_request(seen):
    error = seen("dies").error
    assert error.startswith("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert "/generate: no answer" in error


def test_a_leader_that_dies_before_its_child(seen):
    assert "/generate: no answer" in seen("orphan").error


def test_neither_it_nor_its_child_heed_sigterm(start):
    with start("stubborn") as running:
        assert os.getpgid(running.process.pid) == running.process.pid
    assert running.process.returncode == -signal.SIGKILL


def test_a_command_that_is_not_there(start):
    with pytest.raises(FileNotFoundError, match="nowhere"), start(command=("nowhere",)):
        pass


def test_a_child_that_nobody_reaps_is_not_waited_for(start):
    """As in a container whose process 1 reaps nothing."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        with start("orphan") as running:
            with pytest.raises(ServerError):
                running.generate([[1, 2]], 3)
            begin, group = time.monotonic(), running.process.pid
        assert time.monotonic() - begin < 0.9
        # Of its group alone: this process has other children, which go on.
        with pytest.raises(ChildProcessError):
            while True:
                os.waitpid(-group, 0)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_proxy_is_not_asked(start, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with start(start_seconds=5) as running:
        assert len(running.stream([1, 2], 5)) == 3


def test_ports_are_not_those_of_outgoing_connections():
    """They could be taken while a server of a minute's start-up does not listen yet."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {server._free_port() for _ in range(50)}
    assert len(ports) > 40 and not any(low <= port <= high for port in ports)
    # SGLang takes further ports up to some thousands above.
    assert max(ports) < 65535 - 10_000


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        port = taken.getsockname()[1]
        draws = iter([port, port, 23456])
        monkeypatch.setattr(server.random, "randrange", lambda *_: next(draws))
        assert server._free_port() == 23456


# ------------------------------------------------------------------------------- streams


def test_a_stream_is_grouped_by_steps(start):
    with start() as running:
        groups = running.stream([1, 2, 3], 11)
        comparison = equality.compare_steps_after_hit(running, [[5] * 200], [[6] * 40], 20)
    assert [len(group) for group in groups] == [2, 2, 2, 2, 2, 1]
    assert [1, 2, 3, *chain.from_iterable(groups)] == fake_server.continued([1, 2, 3], 11)
    assert comparison.exact and comparison.detail.endswith("1 of 1 outputs the same")


def test_a_first_step_is_that_of_a_prefill_of_one_token(start):
    # The fake prefill gives two.
    with start() as running, pytest.raises(ServerError, match="2 tokens came of the prefill"):
        equality.compare_first_step_after_hit(running, [[5] * 200])


def test_a_first_step_that_a_hit_shortens(start, monkeypatch):
    with start() as running:
        # Four inputs after a hit, then the same cold.
        steps = iter([1, 3, 1, 2, 3, 3, 2, 2])
        monkeypatch.setattr(running, "stream", lambda *_: [[1], [0] * next(steps), [2, 2]])
        comparison, hit, cold = equality.compare_first_step_after_hit(running, [[5] * 200] * 4)
    assert (comparison.compared, comparison.differing, comparison.largest) == (4, 2, 2.0)
    assert (hit, cold) == (1.75, 2.5) and len(comparison.cached) == 4
    assert comparison.detail == "1.75 tokens after a hit, 2.50 cold"


@pytest.mark.parametrize(
    "mode, error",
    {
        "dies-mid-stream": "RuntimeError: CUDA error: device-side assert triggered; server: stream",
        "stops-mid-stream": "stream: 6 tokens of 20",
        "status-500": "stream: status 500: 'Internal Server Error'",
        **dict.fromkeys(fake_server.STREAM_RUBBISH, "stream: "),
    }.items(),
)
def test_a_stream_that_breaks_off(start, mode, error):
    with start(mode) as running, pytest.raises(ServerError) as caught:
        running.stream([1, 2, 3], 20)
    assert error in str(caught.value) and str(caught.value).endswith(f"log: {running.log}")


# --------------------------------------------------------------------------- last exception


@pytest.mark.parametrize(
    "text, last",
    (
        ("", None),
        ("ready\n", None),
        ("Traceback:\n  File\nKeyError: 'a'\n\nDuring ...\nValueError: b\nbye\n", "ValueError: b"),
        ("[2026-01-01 00:00:00 TP0] torch.OutOfMemoryError: x\n", "torch.OutOfMemoryError: x"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("\xff\x00RuntimeError: no\nan Error: no\nno errors: 0 Error\n", None),
    ),
)
def test_last_exception(tmp_path, text, last):
    (tmp_path / "log").write_bytes(text.encode("latin-1"))
    assert server.last_exception(tmp_path / "log") == last


def test_last_exception_without_a_log(tmp_path):
    assert server.last_exception(tmp_path / "none") is None


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"text_config": {"vocab_size": fake_server.VOCABULARY}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def command(marker, model, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    def command(mode: str, *options: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                str(TEST / "fake_verify.py"),
                "verify",
                f"--model={model}",
                f"--log={tmp_path / 'log'}",
                *options,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(TEST.parent / "python"),
                "COLUMNS": "200",
                "FAKE_SERVER": mode,
                marker: "1",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return command


def test_the_command_passes(command):
    process = command("healthy")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "passed" and "accept length 2.00" in out
    assert "suffix on a decode-made prefix" in out


def test_the_command_fails(command, tmp_path):
    process = command("crashes")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in out + err
    (line,) = out.splitlines()
    assert line.startswith("failed: AttributeError: ") and line.endswith(f"log: {tmp_path / 'log'}")


@pytest.mark.parametrize("mode, code", {"healthy": 0, "crashes": 1, "nan-logprob": 1}.items())
def test_one_json_object(command, mode, code):
    process = command(mode, "--json")
    out, err = process.communicate(timeout=60)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    result = json.loads(out, parse_constant=refuse)
    assert process.returncode == code and "Traceback" not in err
    assert result["passed"] is (code == 0) and set(result) == set(verify.Result().as_dict())


@pytest.mark.parametrize("mode", ("hangs", "stubborn-hangs"))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_a_signal_ends_the_server(command, marker, tmp_path, mode, number):
    process = command(mode)
    wait_for(tmp_path / "log", "generating")
    assert len(marked(marker)) == 2 + (mode == "stubborn-hangs")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode > 0 and "Traceback" not in out + err
    assert marked(marker) == [] and "generating" in (tmp_path / "log").read_text()


def test_a_second_signal_kills_the_server(command, marker, tmp_path):
    process = command("stubborn-hangs")
    wait_for(tmp_path / "log", "generating")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode > 0 and "Traceback" not in out + err and marked(marker) == []


def test_a_signal_before_it_serves(command, marker, tmp_path):
    process = command("never-listens")
    wait_for(tmp_path / "log", "serving")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode > 0 and "Traceback" not in out + err and marked(marker) == []


def test_nohup_is_respected(command, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = command("never-listens", "--timeout=2")
        wait_for(tmp_path / "log", "serving")
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=30)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert process.returncode == 1 and "did not serve within 2 s" in out


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (log.is_file() and text in log.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in the log"
        time.sleep(0.05)


def one_line(*options: object) -> str:
    result = CliRunner().invoke(cli.app, ["verify", *map(str, options)])
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("inkling-sconv: ")
    return line


def test_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one_line() == "inkling-sconv: verify: there is no GPU here"
    assert one_line("--json") == "inkling-sconv: verify: there is no GPU here"


@pytest.mark.parametrize("name", ("sglang", "torch"))
def test_without_a_package(monkeypatch, name):
    find = verify.importlib.util.find_spec
    monkeypatch.setattr(
        verify.importlib.util, "find_spec", lambda n, *a: None if n == name else find(n, *a)
    )
    assert "is not installed for this Python" in one_line()


@pytest.mark.parametrize(
    "config, error",
    (
        (None, "No such file or directory"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "names no vocab_size"),
        (b'{"vocab_size": "2048"}', "names no vocab_size"),
        (b'{"vocab_size": true}', "names no vocab_size"),
        (b'{"vocab_size": 2}', "vocab_size 2"),
        (b'{"vocab_size": -5}', "vocab_size -5"),
    ),
)
def test_a_model_that_is_none(monkeypatch, tmp_path, config, error):
    monkeypatch.setattr(verify, "missing", lambda: None)
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    line = one_line("--model", tmp_path)
    assert error in line and str(tmp_path / "config.json") in line


def test_a_model_that_is_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "missing", lambda: None)
    (tmp_path / "model").touch()
    assert "Not a directory" in one_line("--model", tmp_path / "model")


def test_a_log_that_cannot_be_written(monkeypatch, model, tmp_path):
    monkeypatch.setattr(verify, "missing", lambda: None)
    assert "Is a directory" in one_line("--model", model, "--log", tmp_path)
    assert "No such file" in one_line("--model", model, "--log", tmp_path / "none" / "log")


@pytest.mark.parametrize("seconds", ("0", "-1", "nan"))
def test_a_timeout_that_is_none(monkeypatch, model, seconds):
    monkeypatch.setattr(verify, "missing", lambda: None)
    assert "--timeout" in one_line("--model", model, f"--timeout={seconds}")


# -------------------------------------------------------------------------------- compare

FLOAT = st.floats(allow_nan=True, allow_infinity=True)
LISTS = st.lists(st.lists(FLOAT, max_size=5), max_size=5)


@settings(deadline=None)
@given(LISTS, LISTS)
def test_compare_is_symmetric_and_bounded(left, right):
    one, other = equality.compare("a", left, right), equality.compare("a", right, left)
    assert one == other
    assert 0 <= one.differing <= one.compared
    assert math.isfinite(one.largest) and one.largest >= 0
    assert one.exact is (one.compared > 0 and one.differing == 0)


@settings(deadline=None)
@given(LISTS, LISTS)
def test_compare_counts_every_position(left, right):
    one = equality.compare("a", left, right)
    lengths = [max(len(a), len(b)) for a, b in zip(left, right, strict=False)]
    unpaired = [*left[len(right) :], *right[len(left) :]]
    assert one.compared == sum(lengths) + sum(max(len(floats), 1) for floats in unpaired)


@settings(deadline=None)
@given(LISTS)
def test_a_list_differs_from_itself_only_in_nan(floats):
    one = equality.compare("a", floats, floats)
    assert one.differing == sum(math.isnan(x) for xs in floats for x in xs)
    assert one.largest == 0.0


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e9, -1e-9), min_size=1), min_size=1), st.data())
def test_a_changed_float_is_found(floats, data):
    row = data.draw(st.integers(0, len(floats) - 1))
    column = data.draw(st.integers(0, len(floats[row]) - 1))
    changed = [[*xs] for xs in floats]
    changed[row][column] = math.nextafter(floats[row][column], data.draw(st.sampled_from((-1, 1))))
    changed[row][column] = math.nextafter(changed[row][column], math.inf)
    difference = abs(changed[row][column] - floats[row][column])
    one = equality.compare("a", floats, changed)
    assert (one.differing, one.largest) == (int(difference > 0), difference)


@settings(deadline=None)
@given(st.lists(st.lists(FLOAT.filter(lambda x: x == x)), min_size=1), st.data())
def test_a_float_too_few_is_found(floats, data):
    row = data.draw(st.integers(0, len(floats) - 1))
    longer = [[*xs] for xs in floats]
    longer[row].append(0.0)
    assert equality.compare("a", floats, longer).differing == 1
    assert equality.compare("a", floats, [*floats, []]).differing == 1


def test_nothing_compared_is_not_exact():
    assert not equality.compare("a", [], []).exact and not equality.compare("a", [[]], [[]]).exact


# ------------------------------------------------------------------------------- any answer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = node.items() if isinstance(node, dict) else enumerate(node[:3])
    for key, value in inner if isinstance(node, dict | list) else ():
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))
        else:
            yield (*path, key)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_answer_raises_anything_but_a_server_error(tmp_path, data):
    """One value of a right answer is replaced with any other."""
    running = Server(tmp_path, (), tmp_path / "log")
    model = fake_server.Model()
    victim = data.draw(st.integers(0, 5))
    calls = 0

    def post(path: str, body: Any = None) -> Any:
        nonlocal calls
        if body is None:
            return model.flush()
        calls += 1
        answers = model.generate(body)
        if calls - 1 == victim:
            path = data.draw(st.sampled_from([*paths(answers)]))
            if not path:
                return data.draw(JSON)
            node = answers
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = data.draw(JSON)
        return answers

    running.post = post
    prompts = equality.draw_prompts(2, [130], fake_server.VOCABULARY)
    with contextlib.suppress(ServerError):
        _, answers = equality.compare_decode_with_prefill(running, prompts, 3)
        assert equality.compute_accept_length(answers) >= 0
        comparison = equality.compare_hit_with_cold(running, "hit", prompts, [[1, 2], [3, 4]], 2)
        json.dumps(comparison.__dict__, allow_nan=False)
