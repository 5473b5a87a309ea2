"""``benchmark/bench_server.py``: what it reads out of traces, and its verdicts on fake servers."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_server
import decode_trace
import fake_trace
import pytest
from decode_trace import DRAFT, OTHER, OUTSIDE, VERIFY, TraceError
from hypothesis import given, settings
from hypothesis import strategies as st

TEST = Path(__file__).resolve().parent.parent
PATH = Path("a/DECODE.trace.json.gz")
FLOATS = 1800  # 6 prompts x 300 tokens
# Two graphs, and two launches between them.
OPERATIONS = len(fake_trace.VERIFY) + len(fake_trace.DRAFT) + 2


def profile(events: list[dict[str, Any]], batch: int = 1) -> decode_trace.Profile:
    return decode_trace.profile(events, batch, PATH)


# --------------------------------------------------------------------------------- traces


@pytest.mark.parametrize("spans", (True, False))
def test_what_a_step_does(spans):
    found = profile(fake_trace.trace(12, spans=spans))
    # The last one may have been cut.
    assert found.operations == [OPERATIONS] * 11 and found.unplaced == 0
    assert found.microseconds == [2.0 * OPERATIONS] * 11
    counts = {part: figures["operations"] for part, figures in found.parts.items()}
    assert counts == {VERIFY: [3] * 11, DRAFT: [3] * 11, OUTSIDE: [2] * 11}
    draft, verify = found.graphs
    assert (draft.kind, draft.operations, draft.microseconds) == (DRAFT, 3, 6.0)
    assert (verify.kind, verify.elapsed, verify.per_step) == (VERIFY, 8.0, 1.0)
    assert verify.names == {"gemm": 2, "rms_norm": 1}
    assert ("spans" in found.marks) is spans


def test_a_graph_for_every_draft_step():
    drafts = (fake_trace.DRAFT, fake_trace.DRAFT[1:], fake_trace.DRAFT[1:])
    found = profile(fake_trace.trace(6, draft=drafts))
    assert found.operations == [OPERATIONS + 4] * 5
    kinds = [(graph.kind, graph.operations, graph.per_step) for graph in found.graphs]
    assert kinds == [(DRAFT, 3, 1.0), (DRAFT, 2, 2.0), (VERIFY, 3, 1.0)]


def test_graphs_are_told_apart_by_the_names_in_them():
    found = profile(fake_trace.trace(4) + later(fake_trace.trace(4, verify=("gemm",)), 4))
    assert [(g.kind, g.operations) for g in found.graphs] == [(DRAFT, 3), (VERIFY, 3), (VERIFY, 1)]
    assert [g.per_step for g in found.graphs] == [1.0, 4 / 7, 3 / 7]
    assert found.operations == [OPERATIONS] * 4 + [OPERATIONS - 2] * 3


def test_a_graph_of_neither_kind():
    events = fake_trace.trace(4)
    for start in range(0, 4000, 1000):
        events += placed("cudaGraphLaunch", 100 + start, start + 250.0, ["embed"])
    found = profile(events)
    assert found.parts[OTHER]["operations"] == [1, 1, 1]
    assert [g.kind for g in found.graphs] == [DRAFT, OTHER, VERIFY]


def test_only_steps_of_the_batch_size_count():
    events = fake_trace.trace(3) + later(fake_trace.trace(5, batch=8, verify=("gemm",)), 3)
    assert profile(events, batch=8).operations == [OPERATIONS - 2] * 4
    # The third one ends where the first one of the other size begins.
    assert profile(events, batch=1).operations == [OPERATIONS] * 3
    with pytest.raises(TraceError, match="no whole decode step of 2 requests"):
        profile(events, batch=2)


def test_a_prefill_in_between_is_no_step():
    prefill = [span("step[EXTEND bs=1 toks=128]", 2500.0)]
    prefill += placed("cudaLaunchKernel", 999, 2510.0, ["prefill"] * 50)
    found = profile(fake_trace.trace(6) + prefill)
    assert found.operations == [OPERATIONS] * 5


@pytest.mark.parametrize("lost", ("launch", "correlation", "args", "text", "list"))
def test_what_has_no_launch_is_in_no_step(lost):
    events = fake_trace.trace(4)
    stray = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1200.0, "dur": 500.0}
    about: dict[str, Any] = {
        "launch": {"args": {"correlation": 10**6}},
        "correlation": {"args": {"stream": 7}},
        "args": {},
        "text": {"args": {"correlation": "12"}},
        "list": {"args": {"correlation": [12]}},
    }
    found = profile([{**stray, **about[lost]}, *events])
    assert found.unplaced == 1 and found.operations == [OPERATIONS] * 3


@pytest.mark.parametrize("steps, spans", ((0, True), (1, True), (1, False)))
def test_too_few_steps(steps, spans):
    events = fake_trace.trace(steps, spans=spans) or placed("cudaLaunchKernel", 1, 5.0, ["gemm"])
    with pytest.raises(TraceError, match=r"nothing of the GPU|no whole decode step"):
        profile(events)


def test_a_trace_of_the_host_alone():
    host = [event for event in fake_trace.trace(5) if event.get("cat") == "user_annotation"]
    with pytest.raises(TraceError) as caught:
        profile(host)
    assert str(caught.value) == f"{PATH}: nothing of the GPU in it"


CUT = "the file ends too early, or is damaged"
NO_TRACES = {
    "empty": (b"", "not JSON"),
    "two bytes": (b"\x1f\x8b", CUT),
    "no end": (gzip.compress(b'{"traceEvents": []}')[:-3], CUT),
    "a beginning": (gzip.compress(bytes(range(256)) * 99)[:40], CUT),
    "damaged": (b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 40, CUT),
    "half of the JSON": (gzip.compress(b'{"traceEvents": [{'), "not JSON"),
    "deep JSON": (gzip.compress(b"[" * 100_000), "not JSON"),
    "a list": (gzip.compress(b"[1]"), "no traceEvents in it"),
    "events by name": (gzip.compress(b'{"traceEvents": {}}'), "no traceEvents in it"),
    "plain": (b"plain text", "Not a gzipped file (b'pl')"),
}


@pytest.mark.parametrize("content, error", NO_TRACES.values(), ids=NO_TRACES)
def test_a_file_that_is_no_trace(tmp_path, content, error):
    file = tmp_path / "t.json.gz"
    file.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        decode_trace.read(file)
    assert str(caught.value) == f"{file}: {error}"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match=r"t\.json: No such file or directory$"):
        decode_trace.read(tmp_path / "t.json")


@settings(deadline=None)
@given(st.data())
def test_one_broken_event_changes_no_other(data):
    events = fake_trace.trace(6)
    key = data.draw(st.sampled_from(("cat", "name", "ts", "dur", "args")))
    number = data.draw(st.integers(1, len(events) - 1))
    whole = [OPERATIONS] * 5
    value = data.draw(st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
    events[number] = {**events[number], key: value}
    try:
        found = profile(events)
    except TraceError:
        return
    assert sum(a != b for a, b in zip(found.operations, whole, strict=False)) <= 2
    json.dumps(found.__dict__ | {"graphs": []}, allow_nan=False)


def later(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The same, ``steps`` steps later, with correlation ids of its own."""
    moved = []
    for event in events[1:]:
        about = dict(event["args"])
        if "correlation" in about:
            about["correlation"] += 10_000
        moved.append({**event, "ts": event["ts"] + steps * fake_trace.STEP, "args": about})
    return moved


def span(name: str, start: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": 10.0, "args": {}}


def placed(call: str, correlation: int, start: float, names: list[str]) -> list[dict[str, Any]]:
    about = {"ph": "X", "dur": 1.0, "args": {"correlation": correlation}}
    ran = [{**about, "cat": "kernel", "name": name, "ts": start + 9} for name in names]
    return [{**about, "cat": "cuda_runtime", "name": call, "ts": start}, *ran]


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """``modes`` names contenders and what the server of each does."""

    def command(modes: str, *options: str) -> subprocess.Popen[str]:
        names = [pair.split("=")[0] for pair in modes.split()]
        folders = ("python", "test", "benchmark")
        return subprocess.Popen(
            [
                sys.executable,
                str(TEST / "fake_bench.py"),
                f"--log-dir={tmp_path / 'logs'}",
                *options,
                "--contenders",
                *names,
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(TEST.parent / folder) for folder in folders),
                "FAKE_BENCH": modes,
                "http_proxy": "http://127.0.0.1:9",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return command


@pytest.fixture
def seen(command, tmp_path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Exit code, output and the JSON of a quick run."""

    def seen(modes: str, *options: str) -> tuple[int, str, dict[str, Any]]:
        file = tmp_path / "out.json"
        process = command(modes, "--quick", "--batches=1", f"--json={file}", *options)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in out + err, out + err
        return process.returncode, out, json.loads(file.read_text())

    return seen


def differing(report: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["differing"] for one in report["comparisons"] if one["differing"]}


def test_alike(seen, tmp_path):
    plot = tmp_path / "out.svg"
    code, out, report = seen(
        "exempt=healthy faithful=healthy checkpoints=healthy", f"--plot={plot}"
    )
    assert code == 0 and "differ from those of exempt" in out.splitlines()[-1]
    assert differing(report) == {}
    compared = {one["name"]: one["compared"] for one in report["comparisons"]}
    assert compared["faithful, exempt: logprobs, empty cache"] == FLOATS
    # 149 scored tokens of the suffix and 96 more, six times.
    assert compared["faithful, exempt: logprobs, cached prefix"] == 6 * 245
    assert compared["faithful, exempt: tokens per decode step"] == FLOATS / 2
    # Where the draft's checkpoints are kept, other drafts after a hit are no difference.
    assert f"faithful, exempt: {bench_server.ACCEPTED_ON_HITS}" in compared
    assert len(compared) == 11
    assert f"checkpoints, exempt: {bench_server.ACCEPTED_ON_HITS}" not in compared
    assert plot.stat().st_size > 1000
    assert list((tmp_path / "logs").glob("trace-exempt-1-*/*DECODE*"))


def test_differences_are_named(seen):
    code, out, report = seen(
        "exempt=healthy faithful=other-logprob fast=stale checkpoints=accepts-less"
    )
    assert code == 1
    found = differing(report)
    for name, count in (
        ("faithful, exempt: logprobs, empty cache", 6),
        ("fast, exempt: logprobs, cached prefix", 6 * 96),
        ("checkpoints, exempt: tokens per decode step", FLOATS),
    ):
        assert found[name] == count and f"differs: {name}" in out.splitlines()


def test_a_contender_that_does_not_start_leaves_the_others(seen, tmp_path):
    code, out, report = seen("exempt=healthy fast=crashes faithful=tracks-nothing")
    error = report["contenders"]["fast"]["error"]
    assert code == 1 and error.startswith("AttributeError: 'NoneType' object has no attribute")
    assert error.endswith(f"log: {tmp_path / 'logs/server-fast.log'}")
    assert out.splitlines()[-2] == f"failed: fast: {error}"
    assert len(report["comparisons"]) == 6 and differing(report) == {}
    # Fewer launches show.
    key = "launches per decode step, 1 request"
    steps = bench_server.PROFILED_STEPS - 1
    assert report["contenders"]["exempt"]["figures"][key] == [OPERATIONS] * steps
    assert report["contenders"]["faithful"]["figures"][key] == [OPERATIONS - 1] * steps
    (line,) = [line for line in out.splitlines() if key in line]
    assert f"{(OPERATIONS - 1) / OPERATIONS:.2f}x" in line


def test_what_was_not_measured_fails(seen):
    errors = {
        "writes-no-trace": "0 traces of decode steps in it",
        "cuts-the-trace": "the file ends too early, or is damaged",
        "never-hits": "the prefix cache was not hit",
        "status-500": "status 500",
    }
    names = ("exempt", "faithful", "fast", "checkpoints")
    code, _, report = seen(" ".join(f"{n}={m}" for n, m in zip(names, errors, strict=True)))
    assert code == 1
    for name, error in zip(names, errors.values(), strict=True):
        assert error in report["contenders"][name]["error"]


def test_rounds_begin_with_another(seen):
    code, out, report = seen("exempt=healthy faithful=healthy", "--rounds=2")
    assert code == 0
    started = [line.split()[2] for line in out.splitlines() if "starting a server" in line]
    assert started == ["exempt:", "faithful:", "faithful:", "exempt:"]
    assert len(report["contenders"]["exempt"]["figures"]["start-up, s"]) == 2


def test_in_turns(seen, tmp_path, capsys):
    options = ("--turns=3", "--batches=8")
    code, out, report = seen("exempt=healthy fast=accepts-less faithful=other-logprob", *options)
    assert code == 1
    for contender in report["contenders"].values():
        assert len(contender["figures"]["ms per decode step, 8 requests, in turns"]) == 3
    assert differing(report) == {
        "fast, exempt: accepted drafts, empty cache": 2 * 8,
        "faithful, exempt: logprobs, empty cache": 8,
    }
    assert out.count("starting a server") == 3 and "turn 0 of 3" in out
    assert "per step" not in out and "accept length" not in out
    # It can be shown again, and goes with nothing else.
    shown = (f"--earlier={tmp_path / 'out.json'}", "--contenders")
    assert bench_server.main(shown) == 1
    assert "ms per decode step, 8 requests, in turns" in capsys.readouterr().out
    assert "of --turns: can be shown, no more" in one_line(capsys, *shown, "--plot=out.svg")


def test_servers_take_turns(monkeypatch, tmp_path):
    """All are up before the first is asked; a step's time is the answer's by the most steps."""
    done: list[str] = []
    clock = [0.0]
    seconds = {"a": 0.5, "b": 0.25}

    class Stub:
        def __init__(self, model, options, log, *, environment):
            self.log, self.name = log, environment["NAME"]

        def __enter__(self):
            done.append(f"{self.name} up")
            self.log.write_text("")
            return self

        def __exit__(self, *_):
            done.append(f"{self.name} down")

        def flush(self):
            clock[0] += 100

        def generate(self, prompts, count):
            done.append(f"{self.name} {len(prompts)}")
            clock[0] += seconds[self.name] * len(prompts)
            steps = range(200, 200 + 25 * len(prompts), 25)
            meta = {"output_token_logprobs": [[-1.0, 1, None]] * count}
            ids = [1] * count
            return [{"output_ids": ids, "meta_info": {**meta, "spec_verify_ct": n}} for n in steps]

    monkeypatch.setattr(bench_server, "Server", Stub)
    monkeypatch.setattr(bench_server.time, "perf_counter", lambda: clock[0])
    written: list[int] = []
    entrants = [bench_server.Contender(name, {"NAME": name}) for name in "ab"]
    results = {name: bench_server.Result() for name in "ab"}
    options = bench_server.argparse.Namespace(turns=2, batches=[1, 2], log_dir=tmp_path)
    bench_server.in_turns(
        entrants, results, tmp_path, 500, options, print, lambda: written.append(len(done))
    )
    turn = ["a 1", "a 2", "b 1", "b 2"]
    back = ["b 1", "b 2", "a 1", "a 2"]
    assert done == ["a up", "b up", *turn, *back, *turn, "b down", "a down"]
    assert written == [6, 10, 14]
    for name, figures in ((name, result.figures) for name, result in results.items()):
        assert figures == {
            "ms per decode step, 1 request, in turns": [seconds[name] * 1e3 / 200] * 2,
            "ms per decode step, 2 requests, in turns": [2 * seconds[name] * 1e3 / 225] * 2,
        }


def test_turns_of_those_that_are_up(seen):
    modes = "faithful=dies exempt=healthy fast=crashes checkpoints=does-not-speculate"
    code, out, report = seen(modes, "--turns=3", "--batches", "1", "8")
    assert code == 1
    # The first one answered one request, and died at eight: with half of its answers nobody's are
    # compared.
    assert differing(report) == {"checkpoints, exempt: accepted drafts, empty cache": 9}
    figures = {name: one["figures"] for name, one in report["contenders"].items()}
    assert len(figures["exempt"]["ms per decode step, 1 request, in turns"]) == 3
    assert figures["fast"] == figures["faithful"] == figures["checkpoints"] == {}
    assert report["contenders"]["faithful"]["error"]
    assert "no spec_verify_ct" in report["contenders"]["checkpoints"]["error"]
    assert sum(line.startswith("failed: ") for line in out.splitlines()) == 3


def test_turns_that_are_interrupted_keep_what_there_is(command, tmp_path):
    file = tmp_path / "out.json"
    options = ("--turns=100000", "--batches=1", f"--json={file}")
    process = command("exempt=healthy fast=healthy", *options)
    for line in process.stdout:
        if "turn 10 of" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "bench_server: interrupted\n"
    figures = json.loads(file.read_text())["contenders"]["exempt"]["figures"]
    assert len(figures["ms per decode step, 1 request, in turns"]) >= 10
    assert (
        left(tmp_path / "logs/server-exempt.log") == left(tmp_path / "logs/server-fast.log") == []
    )


def test_beside_an_earlier_run(seen, tmp_path):
    _, _, report = seen("exempt=healthy")
    before = tmp_path / "before.json"
    before.write_text(json.dumps(report))
    code, _, after = seen("faithful=other-logprob", f"--earlier={before}")
    assert code == 1 and [*after["contenders"]] == ["exempt", "faithful"]
    assert after["contenders"]["exempt"] == report["contenders"]["exempt"]
    assert [*differing(after)] == ["faithful, exempt: logprobs, empty cache"]


def test_an_earlier_run_alone_needs_no_gpu(seen, tmp_path, capsys, monkeypatch):
    seen("exempt=healthy faithful=other-logprob")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    report = json.loads(file.read_text())
    # Of another machine.
    file.write_text(json.dumps(report | {"machine": {"device": "H200"}}))
    options = (f"--earlier={file}", "--contenders", f"--plot={picture}")
    assert bench_server.main(options) == 1
    out = capsys.readouterr().out
    assert out.startswith("device H200\n") and "launches per decode step, 1 request" in out
    assert "differs: faithful, exempt: logprobs, empty cache" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "content, error",
    {
        None: "No such file or directory",
        "{": "not what --json writes",
        "[]": "not what --json writes",
        "{}": "not what --json writes",
        '{"machine": {"device": "another"}, "contenders": {}}': "measured on {'device'",
    }.items(),
)
def test_an_earlier_run_that_is_none(command, tmp_path, content, error):
    before = tmp_path / "before.json"
    if content is not None:
        before.write_text(content)
    process = command("exempt=healthy", "--quick", f"--earlier={before}")
    _, err = process.communicate(timeout=60)
    (line,) = err.splitlines()
    assert process.returncode == 2 and line.startswith(f"bench_server: --earlier {before}: ")
    assert error in line


def test_sglang_s_own_client(command, tmp_path):
    """On the fake server: its options are still SGLang's, and its figures are found."""
    file = tmp_path / "out.json"
    process = command("exempt=healthy", "--repetitions=1", "--batches=8", f"--json={file}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    figures = json.loads(file.read_text())["contenders"]["exempt"]["figures"]
    for length in bench_server.FIRST_TOKEN_LENGTHS:
        milliseconds = figures[f"first token, prompt of {length}, ms"]
        assert len(milliseconds) == bench_server.FIRST_TOKEN_REQUESTS and min(milliseconds) > 0
    (speed,) = figures["output tokens/s, 8 requests at once"]
    assert speed > 0 and "launches per decode step, 8 requests" in figures


def test_a_signal_ends_the_server(command, tmp_path):
    process = command("exempt=hangs", "--quick")
    log = tmp_path / "logs/server-exempt.log"
    deadline = time.monotonic() + 30
    while not (log.is_file() and "serving" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "bench_server: interrupted\n"
    assert left(log) == []


def left(log: Path) -> list[str]:
    """What still runs of the server that wrote this log."""
    port = next(word for word in log.read_text().split() if word.startswith("--port="))
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(entry.read_text())
        except OSError:
            continue
    return [one for one in commands if port in one]


# ----------------------------------------------------------------------------- the options


def one_line(capsys, *options: str) -> str:
    try:
        code: Any = bench_server.main(options)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert code == 2 and out == "" and line.startswith("bench_server: ")
    return line


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one_line(capsys) == "bench_server: there is no GPU here"


@pytest.mark.parametrize(
    "option, error",
    {
        "--rounds=0": "'0' is not a positive whole number",
        "--repetitions=x": "'x' is not a positive whole number",
        "--batches=9": "the servers take 8 requests at once",
        "--batches=-1": "is not a positive whole number",
        "--contenders=slow": "invalid choice: 'slow'",
        "--plot=out.txt": "not a .pdf, .png or .svg",
        "--json=nowhere/out.json": "not a file in a folder that is there",
        "--json=/": "not a file in a folder that is there",
        "--json=/dev/null": "not a file in a folder that is there",
        "--nothing": "unrecognized arguments",
        "--turns=0": "'0' is not a positive whole number",
        "--turns=1 --plot=out.svg": "--turns: not beside an earlier run",
    }.items(),
)
def test_options_that_are_none(capsys, option, error):
    assert error in one_line(capsys, *option.split())


def test_no_contenders(capsys):
    assert one_line(capsys, "--contenders") == "bench_server: no contenders"


def test_a_log_folder_that_cannot_be(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_server.verify, "missing", lambda: None)
    (tmp_path / "file").touch()
    line = one_line(capsys, "--quick", f"--log-dir={tmp_path / 'file' / 'logs'}")
    assert "Not a directory" in line


def test_the_variables_of_ours_are_a_contender_s_own(monkeypatch):
    monkeypatch.setenv("INKLING_SCONV_DRAFT_EXTEND", "inert")
    before = dict(os.environ)
    with bench_server.clean_environment():
        assert "INKLING_SCONV_DRAFT_EXTEND" not in os.environ
    assert dict(os.environ) == before


def test_the_plugin_s_line_is_found(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "[2026] Import sglang.srt.layers.attention.linear.inkling_sconv_backend\n"
        "[2026-01-01 TP0] inkling_sconv 0.1.0: InklingShortConvAttnBackend is crashing\nbye\n"
    )
    assert bench_server.said(log) == "inkling_sconv 0.1.0: InklingShortConvAttnBackend is crashing"
    log.write_text("nothing")
    assert bench_server.said(log) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers())
def test_the_middle_is_the_same_in_any_order(figures, seed):
    shuffled = random.Random(seed).sample(figures, len(figures))
    median, spread = bench_server.middle(figures)
    assert bench_server.middle(shuffled) == (median, spread) and spread >= 0
    assert min(figures) <= median <= max(figures)
