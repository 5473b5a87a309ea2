"""bench_decode_step.py on servers that are wrong in many ways, and the trace reader by itself."""

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_decode_step
import contenders
import decode_trace
import fake_server
import fake_trace
import pytest
import summary
from decode_trace import DRAFT, OTHER, OUTSIDE, VERIFY, TraceError
from hypothesis import given, settings
from hypothesis import strategies as st
from inkling_sconv.proof import server, verify
from rich.console import Console

STEPS = 20
FAULTS = {"other-token": "output_ids/0=1"}


def profile(events: list[dict[str, Any]], batch: int = 1) -> decode_trace.Profile:
    return decode_trace.profile_steps(events, batch, Path("trace.json"))


# ------------------------------------------------------------------------------------- the trace


def test_what_a_step_does():
    found = profile(fake_trace.trace(STEPS))
    assert found.launches == {
        part: [n] * (STEPS - 1) for part, n in ((VERIFY, 3), (DRAFT, 3), (OUTSIDE, 2))
    }
    assert found.microseconds[VERIFY] == [6.0] * (STEPS - 1)
    assert found.kernels[VERIFY] == {"gemm": 2, "rms_norm": 1}
    assert found.kernels[DRAFT] == dict.fromkeys(fake_trace.DRAFT, 1)
    assert found.unplaced == 0


def test_kernels_with_long_names_are_told_apart():
    found = profile(fake_trace.trace(STEPS, verify=("k" * 900 + "1", "k" * 900 + "2")))
    assert len(found.kernels[VERIFY]) == 2 and max(map(len, found.kernels[VERIFY])) <= 80


def test_a_graph_for_every_draft_step_and_one_of_neither_kind():
    found = profile(fake_trace.trace(STEPS, draft=(fake_trace.DRAFT, ("other",), fake_trace.DRAFT)))
    assert found.launches[DRAFT] == [6] * (STEPS - 1)
    assert found.kernels[OTHER] == {"other": 1}


@pytest.mark.parametrize("batch", (1, 8))
def test_only_whole_steps_of_the_batch_size_count(batch):
    events = fake_trace.trace(STEPS, batch=8)
    if batch == 8:
        assert len(profile(events, 8).launches[VERIFY]) == STEPS - 1
    else:
        with pytest.raises(TraceError, match="no whole decode step of 1 requests"):
            profile(events)


@pytest.mark.parametrize("lost", ("launch", "correlation"))
def test_an_operation_without_its_launch_is_in_no_step(lost):
    events = fake_trace.trace(STEPS)
    launch = [e for e in events if e.get("name") == "cudaGraphLaunch"][STEPS // 2]
    of_it = [
        e for e in events if e.get("args", {}).get("correlation") == launch["args"]["correlation"]
    ]
    ran = [event for event in of_it if event is not launch]
    for event in [launch] if lost == "launch" else ran:
        event["args"] = {}
    assert profile(events).unplaced == len(ran) > 0


@pytest.mark.parametrize("steps", (0, 1))
def test_too_few_steps(steps):
    with pytest.raises(TraceError, match=r"^.*trace\.json: no (GPU operation|whole decode step)"):
        profile(fake_trace.trace(steps))


@pytest.mark.parametrize(
    "content, error",
    (
        (None, "No such file"),
        (b"", "not JSON"),
        (b"\x1f\x8b", "ends too early"),
        (b"[", "Not a gzipped file"),
    ),
)
def test_a_file_that_is_no_trace(tmp_path, content, error):
    path = tmp_path / "x.json.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=error):
        decode_trace.read_events(path)
    plain = tmp_path / "x.json"
    for text, reason in (("{", "not JSON"), ("[" * 10**5, "not JSON"), ("{}", "no traceEvents")):
        plain.write_text(text)
        with pytest.raises(TraceError, match=reason):
            decode_trace.read_events(plain)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_one_broken_event_changes_no_other(data):
    events = fake_trace.trace(6)
    broken = dict(data.draw(st.sampled_from(events)))
    broken[data.draw(st.sampled_from(("ts", "dur", "name")))] = data.draw(
        st.sampled_from((None, [], float("nan")))
    )
    assert profile([*events, broken]).launches == profile(events).launches


# ------------------------------------------------------------------------------------- the script


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the script; a contender's name is what is wrong with its server."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)
    monkeypatch.setattr(verify, "read_vocabulary_size", lambda _: fake_server.VOCABULARY)
    monkeypatch.setattr(
        contenders,
        "make_environment",
        lambda name: {"FAKE_SERVER": FAULTS.get(name, name)},
    )

    def run(*names: str, heads: Sequence[int] = (2,)) -> tuple[int, dict[str, Any]]:
        options = bench_decode_step.parse_arguments(["stock", "--json", str(tmp_path / "out.json")])
        options.contenders, options.log_dir, options.heads = names, tmp_path, heads
        code = bench_decode_step.run(options, Console(width=200), command=fake_server.COMMAND)
        return code, json.loads((tmp_path / "out.json").read_text())

    return run


def test_alike(bench, capsys):
    code, report = bench("healthy", "tracks-nothing", heads=[2, 8])
    assert code == 0
    one, other, *eight = report["contenders"].values()
    assert len(eight) == 2
    for batch in ("1", "8"):
        assert one["batches"][batch]["launches"]["step"]["median"] == 8
        assert other["batches"][batch]["launches"]["step"]["median"] == 7
        assert set(one["batches"][batch]["us"]) == {"step", VERIFY, DRAFT, OUTSIDE}
    assert all(c["compared"] > 0 and c["differing"] == 0 for c in report["comparisons"])
    printed = capsys.readouterr().out
    assert "draft-extend: -1.00 gather_scatter_kernel" in printed
    assert "values differ from healthy" in printed


@pytest.mark.parametrize(
    "fault, what",
    (
        ("other-token", "output tokens"),
        ("accepts-less", "tokens per decode step"),
        ("other-logprob", "logprobs"),
    ),
)
def test_a_difference_is_named(bench, capsys, fault, what):
    code, _ = bench("healthy", fault)
    assert code == 1
    assert f"differs: {fault}, 2 heads: {what}: " in capsys.readouterr().out


@pytest.mark.parametrize("fault", ("crashes", "never-hits", "writes-no-trace", "cuts-the-trace"))
def test_a_server_that_fails_leaves_the_others_measured(bench, capsys, fault):
    code, report = bench(fault, "healthy")
    assert code == 1
    assert report["contenders"][f"{fault}, 2 heads"]["error"]
    assert report["contenders"]["healthy, 2 heads"]["batches"]["8"]
    assert f"failed: {fault}, 2 heads: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, error",
    (
        ((), "required: CONTENDER"),
        (("banana",), "'banana' is not one of stock, default"),
        (("fast+draft-window,",), "'fast+draft-window,' is not one of"),
        (("stock", "--batches", "9"), "from 1 to 8"),
        (("stock", "--heads", "0"), "from 1 to 8"),
        (("stock", "stock"), "stock is named twice"),
        (("stock", "--heads", "2", "2"), "2 is named twice"),
        (("stock", "--json", "/nowhere/x"), "no such folder"),
    ),
)
def test_wrong_options_are_one_line(capsys, arguments, error):
    with pytest.raises(SystemExit) as caught:
        bench_decode_step.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench_decode_step: ") and error in line


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(verify, "why_unavailable", lambda: "there is no GPU here")
    assert bench_decode_step.main(["stock"]) == 2
    assert capsys.readouterr().err == "bench_decode_step: there is no GPU here\n"


def test_fixes_are_contenders():
    make = contenders.make_environment
    assert make("stock") == {"INKLING_SCONV": "off"}
    assert make("fast+draft-window") == {
        "INKLING_SCONV": "fast",
        "INKLING_SCONV_FIXES": "draft-window",
    }


def test_a_summary_is_that_of_the_sorted_values():
    values = [random.Random(1).random() for _ in range(9)]
    found = summary.summarize(values)
    assert found["median"] == pytest.approx(statistics.median(values), rel=1e-5)
    assert found == summary.summarize(sorted(values))
    assert summary.summarize([3.0]) == {"median": 3.0, "spread": 0.0}
    assert summary.format_summary({"median": 1.234, "spread": 0.5}) == "1.23 (0.50)"
