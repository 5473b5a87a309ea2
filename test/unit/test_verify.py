"""``verify`` against servers that are wrong in many ways: right verdict, no process left."""

import contextlib
import ctypes
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fake_server
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_sconv import cli
from inkling_sconv.proof import equality, server, verify
from inkling_sconv.proof.server import Server, ServerError
from typer.testing import CliRunner

TEST = Path(__file__).resolve().parent.parent
FLOATS = verify.PROMPTS * verify.NEW_TOKENS
PR_SET_CHILD_SUBREAPER = 36
META, SCORES = "meta_info", "meta_info/output_token_logprobs"


@pytest.fixture(scope="module")
def one_server(tmp_path_factory) -> Iterator[Server]:
    with fake_server.make_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def spoil(one_server) -> Callable[[str], Server]:
    """A running server with a fault in its answers. All tests share the process."""

    def spoil(fault: str) -> Server:
        one_server.post("/fault", fault)
        return one_server

    return spoil


def run_verify(running: Server, **options: Any) -> verify.Result:
    """What ``verify`` finds on a server, which may be running already."""
    steps: list[str] = []
    context = contextlib.nullcontext(running) if running.process else running
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Server", lambda *_, **__: context)
        result = verify.verify(
            Path(), running.log, steps.append, vocabulary=fake_server.VOCABULARY, **options
        )
    assert steps and result.log == str(running.log) and running.log.is_file()
    assert result.passed is (result.error is None)
    assert result.passed or result.error.endswith(f"; log: {running.log}")
    # Strict JSON has no NaN and no Infinity.
    json.dumps(asdict(result), allow_nan=False)
    return result


def test_a_healthy_server_passes(start):
    result = run_verify(start())
    assert result.passed, result
    decoded, hit, prefilled = result.comparisons
    assert (decoded.compared, decoded.differing, decoded.largest) == (FLOATS, 0, 0.0)
    # 149 scored tokens of the suffix and 32 more, six times.
    assert (hit.compared, hit.differing) == (prefilled.compared, prefilled.differing) == (1086, 0)
    assert hit.cached == tuple((n + 300) // 128 * 128 for n in verify.LENGTHS)
    assert prefilled.cached == tuple(n // 128 * 128 for n in verify.PREFIX_LENGTHS)
    assert 0 < result.start_seconds < result.seconds and result.heads == 2
    assert result.accept_length == 2.0 and result.distinct_tokens > 100


def test_a_server_without_speculation_passes_if_that_was_asked_for(spoil):
    result = run_verify(spoil("does-not-speculate"), heads=0)
    assert result.passed and result.accept_length == 0.0


@pytest.mark.parametrize(
    ("options", "given", "left_out"),
    (
        ({}, ("--speculative-num-steps=2", "--speculative-num-draft-tokens=3"), "lazy"),
        ({"heads": 8}, ("--speculative-num-steps=8", "--speculative-num-draft-tokens=9"), "lazy"),
        ({"lazy": True}, ("--mamba-radix-cache-strategy=extra_buffer_lazy",), "backend-prefill"),
        ({"heads": 0, "options": ("--x",)}, ("--x",), "speculative"),
    ),
)
def test_the_server_gets_what_was_asked_for(monkeypatch, tmp_path, options, given, left_out):
    seen: list[str] = []

    def start(model: Path, arguments: Sequence[str], log: Path) -> Any:
        seen.extend(arguments)
        raise ServerError("enough")

    monkeypatch.setattr(verify, "Server", start)
    result = verify.verify(Path(), tmp_path / "log", print, vocabulary=9, **options)
    assert result.error == "enough" and {*given} <= {*seen}
    assert not [argument for argument in seen if left_out in argument]
    # argparse takes the last of several.
    assert not options.get("lazy") or seen[-1] == given[0]


@pytest.mark.parametrize(
    ("line", "shown"),
    (
        ("backend=full, num_tokens=[256, 1024], avail mem=9.99 GB", "full (256, 1024 tokens)"),
        ("backend=Backend.BREAKABLE, num_tokens=[256], avail", "breakable (256 tokens)"),
        ("failed", "none"),
    ),
)
def test_the_prefill_graph_is_read_from_the_log(tmp_path, line, shown):
    log = tmp_path / "log"
    log.write_text(f"[x] Capture target prefill CUDA graph begin. {line}\nCapture draft prefill\n")
    assert server.find_prefill_graph(log) == shown


def test_one_ulp_is_one_differing_float(spoil):
    result = run_verify(spoil("one-ulp"))
    decoded, *hits = result.comparisons
    assert "logprobs differ" in result.error
    assert (decoded.compared, decoded.differing) == (FLOATS, 1)
    assert len(hits) == 2 and all(hit.exact for hit in hits)
    prompt = equality.draw_prompts(6, verify.LENGTHS, fake_server.VOCABULARY)[-1]
    last = fake_server.score(fake_server.extend(prompt, 300))[-1]
    assert decoded.largest == math.ulp(math.nextafter(last, 0)) > 0


def test_a_hit_that_changes_logprobs_fails(spoil):
    result = run_verify(spoil("stale"))
    decoded, *hits = result.comparisons
    # The fake changes only what a cached request generates.
    assert "logprobs differ" in result.error and decoded.exact
    assert [hit.differing for hit in hits] == [6 * 32] * 2


# SGLang's JSON writer sends null for what is no number, Python's NaN.
@pytest.mark.parametrize("value", ("null", "NaN", "-Infinity"))
def test_a_logprob_that_is_no_number_differs(spoil, value):
    result = run_verify(spoil(f"{SCORES}/5/0={value}"))
    decoded = result.comparisons[0]
    assert "logprobs differ" in result.error and "1 not finite" in decoded.detail
    assert (decoded.compared, decoded.differing, decoded.largest) == (FLOATS, 1, 0.0)


@pytest.mark.parametrize(
    "fault, error",
    (
        ("never-hits", "the prefix cache was not hit"),
        ("does-not-speculate", "the server did not speculate"),
        ("never-flushes", "the prefix cache was not emptied"),
        ("refuses-to-flush", "/flush_cache?timeout=30: status 400"),
        ("status-500", "/generate: status 500: 'Internal Server Error'"),
    ),
)
def test_what_was_not_shown_fails(spoil, fault, error):
    assert error in run_verify(spoil(fault)).error


WRONG_VALUES = {
    META: ("", "[]"),
    "output_ids": ("", "null", "[]"),
    "output_ids/0": ('"the"', "[1]"),
    SCORES: ("", "null", "[]"),
    f"{SCORES}/0": ("-1.0", "[]"),
    f"{SCORES}/0/0": ('"-1.0"', "true", f"1{'0' * 400}"),
    f"{META}/input_token_logprobs": ("", "null", "[]"),
    f"{META}/cached_tokens": ("", '"128"', "-1"),
    f"{META}/completion_tokens": ("",),
    f"{META}/spec_verify_ct": ('"7"',),
}
WRONG_TEXTS = (
    *("<html>busy</html>", "", "null", "[]", "[{}, {}, {}]", '["a", "a"]', '[{"text": "\xff"}]'),
    *('[{"meta_info": {}}, {', '{"meta_info": {}}', '{"error": {"message": "out of pages"}}'),
    *("[" * 100_000, f"[{'1' * 5000}]"),
)
UNUSABLE = [f"{path}={value}" for path, values in WRONG_VALUES.items() for value in values]


@pytest.mark.parametrize(
    "fault", (*UNUSABLE, *(f"={t}" for t in WRONG_TEXTS)), ids=lambda f: f[:50]
)
def test_an_unusable_answer_is_named(spoil, fault):
    running = spoil(fault)
    with pytest.raises(ServerError, match=r"^server: /generate: .{,480}$"):
        running.generate([[1, 2], [3, 4]], 3, scored_from=0)


NOT_SERVED = "server: it did not serve within 1 s"
NOT_STARTED = f"SGLang {version('sglang')} did not start: "


@pytest.mark.parametrize(
    "fault, error",
    (
        (
            "crashes",
            f"{NOT_STARTED}AttributeError: 'NoneType' object has no attribute 'shape'; "
            "server: it ended with 1 before it served; log: ",
        ),
        ("quits", "server: it ended with 3 before it served;"),
        ("never-listens", f"{NOT_SERVED};"),
        ("never-serves", f"{NOT_SERVED};"),
        ("silent-health", f"{NOT_SERVED};"),
        ("unhealthy", f"{NOT_SERVED} (/health: status 503);"),
        ("hangs", "server: /generate: no answer (ReadTimeout);"),
        ("dies", "RuntimeError: CUDA error: an illegal memory access was encountered; server:"),
        ("orphan", "server: /generate: no answer ("),
    ),
)
def test_a_server_that_fails(start, fault, error):
    seconds = 1 if NOT_SERVED in error else 30
    begin = time.monotonic()
    running = start(fault, start_seconds=seconds, request_seconds=1 if fault == "hangs" else 30)
    assert run_verify(running).error.startswith(error)
    assert time.monotonic() - begin < 10


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
            while os.waitpid(-group, 0):
                pass
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_proxy_is_not_asked(spoil, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert len(spoil("healthy").stream([1, 2], 5)) == 3


def test_a_port_is_free_and_none_of_outgoing_connections(monkeypatch):
    low, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert max(server.PORTS) < low
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        port = taken.getsockname()[1]
        draws = iter([port, port, 23456])
        monkeypatch.setattr(server.random, "randrange", lambda *_: next(draws))
        assert server.find_free_port() == 23456


def make_traceback(*frames: str, error: str) -> str:
    """A traceback as Python prints it; a frame is ``FILE FUNCTION``."""
    lines = ["Traceback (most recent call last):"]
    for file, function in map(str.split, frames):
        lines += [f'  File "{file}", line 7, in {function}', f"    {function}()", "    ^^^^^"]
    return "\n".join([*lines, error, ""])


IN_RUNNER = (
    "/usr/lib/asyncio/runners.py run",
    "/x/sglang/python/sglang/launch.py main",
    "/x/sglang/python/sglang/srt/a/b.py <lambda>",
)
IN_TORCH = (*IN_RUNNER, "/x/site-packages/torch/c.py d")
LEFT = make_traceback("/usr/lib/multiprocessing/e.py f", error="EOFError")


@pytest.mark.parametrize(
    ("text", "last"),
    (
        (
            make_traceback(*IN_TORCH, error="KeyError: 1"),
            "sglang/srt/a/b.py, <lambda>: KeyError: 1",
        ),
        # Its message has a line that looks like another one.
        (
            make_traceback(*IN_RUNNER, error="ImportError: none loads\n\nOSError: no libcuda"),
            "sglang/srt/a/b.py, <lambda>: ImportError: none loads",
        ),
        # As uvicorn and a scheduler log it, and what processes around them say afterwards.
        (
            f"[2026-01-01] ERROR:    {make_traceback(*IN_RUNNER, error='ValueError: a; b')}\n"
            f"[2026-01-01] ERROR: Application startup failed.\n{LEFT}KeyboardInterrupt\n",
            "sglang/srt/a/b.py, <lambda>: ValueError: a; b",
        ),
        # Of two, the later one; it does not get the place of the one before.
        (
            make_traceback(*IN_RUNNER, error="KeyError: 1")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + make_traceback("/x/sglang/srt/g.py h", error="pkg.OddError"),
            "sglang/srt/g.py, h: pkg.OddError",
        ),
        (make_traceback(*IN_RUNNER, error="SystemExit: 2") + LEFT, "EOFError"),
        (
            "usage: sglang serve [-h]\n[--a A]\nsglang serve: error: unrecognized arguments: --x\n",
            "sglang serve: error: unrecognized arguments: --x",
        ),
        ("launch_server.py: error: argument --a: invalid\n",) * 2,
        ("[2026-01-01] the cache: error: none\n", None),
    ),
)
def test_where_sglang_raised(tmp_path, text, last):
    (log := tmp_path / "log").write_text(text)
    assert server.find_last_exception(log) == (last and last.strip())


def test_an_end_without_sglang_has_no_version(tmp_path, monkeypatch):
    def fail(name: str) -> None:
        raise server.importlib.metadata.PackageNotFoundError(name)

    (log := tmp_path / "log").write_text("KeyError: 1\n")
    monkeypatch.setattr(server.importlib.metadata, "version", fail)
    error = Server(tmp_path, (), log).make_error("it ended", of_start=True)
    assert str(error) == f"SGLang did not start: KeyError: 1; server: it ended; log: {log}"


def test_find_last_exception(tmp_path):
    assert server.find_last_exception(tmp_path / "log") is None
    for text, last in (
        ("\xff\x00RuntimeError: no\nan Error: no\nno errors: 0 Error\n", None),
        ("  File\nKeyError: 'a'\n\nDuring ...\nValueError: b\nbye\n", "ValueError: b"),
        ("[2026-01-01 00:00:00 TP0] torch.OutOfMemoryError: x\n", "torch.OutOfMemoryError: x"),
    ):
        (tmp_path / "log").write_bytes(text.encode("latin-1"))
        assert server.find_last_exception(tmp_path / "log") == last


def test_a_stream_is_grouped_by_steps(spoil):
    running = spoil("healthy")
    groups = running.stream([1, 2, 3], 11)
    comparison = equality.compare_steps_after_hit(running, [[5] * 200], [[6] * 40], 20)
    assert [len(group) for group in groups] == [2, 2, 2, 2, 2, 1]
    assert [1, 2, 3, *itertools.chain.from_iterable(groups)] == fake_server.extend([1, 2, 3], 11)
    assert comparison.exact and comparison.detail.endswith("1 of 1 outputs the same")


def test_a_first_step_that_a_hit_shortens(spoil, monkeypatch):
    running = spoil("healthy")
    with pytest.raises(ServerError, match="2 tokens in the first message"):
        equality.compare_first_step_after_hit(running, [[5] * 200])
    # Four inputs after a hit, then the same cold.
    steps = iter([1, 3, 1, 2, 3, 3, 2, 2])
    monkeypatch.setattr(running, "stream", lambda *_: [[1], [0] * next(steps), [2, 2]])
    comparison, hit, cold = equality.compare_first_step_after_hit(running, [[5] * 200] * 4)
    assert (comparison.compared, comparison.differing, comparison.largest) == (4, 2, 2.0)
    assert (hit, cold) == (1.75, 2.5) and len(comparison.cached) == 4
    assert comparison.detail == "1.75 tokens after a hit, 2.50 cold"


@pytest.mark.parametrize(
    "fault, error",
    (
        ("stops-mid-stream", "stream: 6 tokens of 20"),
        ("status-500", "stream: status 500: 'Internal Server Error'"),
        ('stream={"error": {"message": "out of pages"}}', "stream: after 6 tokens: "),
        ('stream={"output_ids": [1,', "stream: broke off (JSONDecodeError)"),
        ('stream={"output_ids": null}', "stream: after 6 tokens: "),
        ('stream={"output_ids": "the tokens, as text"}', "stream: after 6 tokens: "),
        ('stream={"output_ids": []}', "stream: after 6 tokens: "),
    ),
)
def test_a_stream_that_breaks_off(spoil, fault, error):
    with pytest.raises(ServerError) as caught:
        spoil(fault).stream([1, 2, 3], 20)
    assert error in str(caught.value) and "; log: " in str(caught.value)


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    config = {"mtp_config": {"num_nextn_predict_layers": 2}, "text_config": {"vocab_size": 500}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.fixture
def command(marker, model, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    def command(fault: str, *options: str) -> subprocess.Popen[str]:
        files = (f"--model={model}", f"--log={tmp_path / 'log'}")
        package = {"PYTHONPATH": str(TEST.parent / "python"), "COLUMNS": "200"}
        return subprocess.Popen(
            [sys.executable, str(TEST / "fake_verify.py"), "verify", *files, *options],
            env={**os.environ, **package, "FAKE_SERVER": fault, marker: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return command


@pytest.mark.parametrize(
    "fault, options, code, shown",
    (
        ("healthy", (), 0, ("accept length 2.00", "suffix on a decode-made prefix", "passed\n")),
        ("crashes", (), 1, (f"failed: {NOT_STARTED}AttributeError: ", "; log: LOG\n")),
        (f"{SCORES}/5/0=NaN", ("--json",), 1, ('{"passed": false', "}\n")),
    ),
)
def test_the_command(command, tmp_path, fault, options, code, shown):
    process = command(fault, *options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in out + err, err
    assert all(text.replace("LOG", f"{tmp_path}/log") in out for text in shown), out
    if options:
        found = json.loads(out, parse_constant=lambda constant: pytest.fail(constant))
        assert set(found) == set(asdict(verify.Result()))


@pytest.mark.parametrize(
    "fault, shown, signals",
    (
        ("hangs", "generating", [signal.SIGINT]),
        ("hangs", "generating", [signal.SIGHUP]),
        ("stubborn-hangs", "generating", [signal.SIGTERM]),
        ("stubborn-hangs", "generating", [signal.SIGINT, signal.SIGINT]),
        ("never-listens", "serving", [signal.SIGTERM]),
    ),
)
def test_a_signal_ends_the_server(command, marker, tmp_path, fault, shown, signals):
    process = command(fault)
    wait_for(tmp_path / "log", shown)
    assert len(fake_server.find_marked(marker)) == 2 + fault.startswith("stubborn")
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3 * (len(signals) - 1))
    out, err = process.communicate(timeout=30)
    assert process.returncode > 0 and "Traceback" not in out + err
    assert fake_server.find_marked(marker) == [] and shown in (tmp_path / "log").read_text()


def test_nohup_is_respected(command, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = command("never-listens", "--timeout=2")
    signal.signal(signal.SIGHUP, previous)
    wait_for(tmp_path / "log", "serving")
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "did not serve within 2 s" in out


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (log.is_file() and text in log.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in the log"
        time.sleep(0.05)


def read_one_line(*options: object) -> str:
    """The line that the command prints where it cannot run."""
    result = CliRunner().invoke(cli.app, ["verify", *map(str, options)])
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("inkling-sconv: ")
    return line


def test_without_a_gpu_or_a_package(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for options in ((), ("--json",)):
        assert read_one_line(*options) == "inkling-sconv: verify: there is no GPU here"
    find = verify.importlib.util.find_spec
    for name in ("sglang", "torch"):
        hide = lambda n, *a, name=name: None if n == name else find(n, *a)  # noqa: E731
        monkeypatch.setattr(verify.importlib.util, "find_spec", hide)
        assert "is not installed for this Python" in read_one_line()


def test_bad_input_is_one_line(monkeypatch, model, tmp_path):
    monkeypatch.setattr(verify, "why_unavailable", lambda: None)
    config = model / "config.json"
    for options, error in (
        (("--model", model, "--log", tmp_path), "Is a directory"),
        (("--model", model, "--log", tmp_path / "none" / "log"), "No such file"),
        (("--model", model, "--timeout=0"), "--timeout"),
        (("--model", model, "--timeout=nan"), "--timeout"),
        (("--model", config), "Not a directory"),
        (("--model", tmp_path / "none"), "No such file or directory"),
        (("--model", model, "--heads=3"), "has 2 MTP heads, not 3; set --heads"),
        (("--model", model, "--heads=0"), "--heads"),
        (("--model", model, "--heads=x"), "--heads"),
    ):
        assert error in read_one_line(*options)
    for text, error in (
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "names no vocab_size"),
        (b'{"vocab_size": "2048"}', "names no vocab_size"),
        (b'{"vocab_size": true}', "names no vocab_size"),
        (b'{"vocab_size": 2}', "vocab_size 2"),
        (b'{"vocab_size": -5}', "vocab_size -5"),
    ):
        config.write_bytes(text)
        line = read_one_line("--model", model)
        assert error in line and str(config) in line


FLOAT = st.floats() | st.sampled_from([0.0, -0.0, 1.0, math.nextafter(1.0, 2)])
LISTS = st.lists(st.lists(FLOAT, max_size=4), max_size=4)


@settings(deadline=None)
@given(LISTS, LISTS)
def test_compare_counts_every_float(left, right):
    pairs = []
    for mine, theirs in itertools.zip_longest(left, right):
        if mine is None or theirs is None:
            pairs += [(x, None) for x in mine or theirs or [0.0]]
        else:
            pairs += itertools.zip_longest(mine, theirs)
    differences = [abs(a - b) for a, b in pairs if None not in (a, b)]
    for one in (equality.compare("a", left, right), equality.compare("a", right, left)):
        assert one.compared == len(pairs)
        assert one.differing == sum(None in pair or pair[0] != pair[1] for pair in pairs)
        assert one.largest == max([0.0, *filter(math.isfinite, differences)])
        assert one.exact is (one.compared > 0 and one.differing == 0)


FIELDS = fake_server.Model().answer([1, 2, 3], 2, 0)["meta_info"]
PATHS = [f"{META}/{name}{rest}" for name in FIELDS for rest in ("", "/0", "/0/0")]
VALUES = ("", "null", "true", "-1", f"{2**60}", "1.5", '"a"', "[]", "[[]]", "{}")


@pytest.mark.parametrize("path", (META, "output_ids", "output_ids/0", *PATHS))
def test_no_answer_raises_anything_but_a_server_error(tmp_path, monkeypatch, path):
    """Every value of an answer, at every point of the comparisons, is of every other kind."""
    running = Server(tmp_path, (), tmp_path / "log")
    prompts = equality.draw_prompts(2, [3], fake_server.VOCABULARY)
    for value, spoiled in itertools.product(VALUES, range(6)):
        model, faults = fake_server.Model(), iter(["healthy"] * spoiled + [f"{path}={value}"])

        def post(_: str, body: Any = None, model=model, faults=faults) -> Any:
            monkeypatch.setattr(fake_server, "fault", next(faults, "healthy") if body else "")
            return model.generate(body) if body else model.flush()

        running.post = post
        with contextlib.suppress(ServerError):
            _, answers = equality.compare_decode_with_prefill(running, prompts, 2)
            assert equality.compute_accept_length(answers) >= 0
            comparison = equality.compare_hit_with_cold(running, "hit", prompts, [[1], [3]], 2)
            json.dumps(comparison.__dict__, allow_nan=False)
