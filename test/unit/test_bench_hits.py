"""bench_hits.py on servers that are wrong in several ways."""

import json
from typing import Any

import bench_hits
import contenders
import fake_server
import pytest
from inkling_sconv.proof import server, verify
from rich.console import Console


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the script; a contender's name is what is wrong with its server."""
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)
    monkeypatch.setattr(verify, "read_vocabulary_size", lambda _: fake_server.VOCABULARY)
    monkeypatch.setattr(contenders, "make_environment", lambda name: {"FAKE_SERVER": name})
    monkeypatch.setattr(bench_hits, "DISTANCES", (1, 64))

    def run(*names: str) -> tuple[int, dict[str, Any]]:
        options = bench_hits.parse_arguments(["stock", "--json", str(tmp_path / "out.json")])
        options.contenders, options.log_dir = names, tmp_path
        code = bench_hits.run(options, Console(width=300), command=fake_server.COMMAND)
        return code, json.loads((tmp_path / "out.json").read_text())

    return run


def test_steps_by_distance_and_length(bench, capsys):
    code, report = bench("healthy", "accepts-less")
    assert code == 0 and report["differing"] == 0
    first, other = (one["figures"] for one in report["contenders"].values())
    assert list(first) == ["cold", "decode", "prefill"] and list(other) == ["decode", "prefill"]
    for kind, distances in first.items():
        assert list(distances) == ["1", "64"]
        for figures in distances.values():
            # The fake gives two tokens a message, the first one too.
            assert figures["steps"] == [n * bench_hits.PROMPTS for n in (3, 15, 63)], kind
            shortest, *_, longest = (summary["median"] for summary in figures["ms"])
            assert 0 < shortest <= longest
    assert other["decode"]["1"]["steps"][-1] > 63 * bench_hits.PROMPTS
    assert "0 answers differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "error"),
    (
        ("never-hits", "0 tokens of the prefix cache were reused, not 128"),
        ("crashes", "it ended with"),
    ),
)
def test_a_server_that_fails_leaves_the_others_measured(bench, capsys, fault, error):
    code, report = bench(fault, "healthy")
    assert code == 1 and error in report["contenders"][f"{fault}, 2 heads"]["error"]
    assert report["contenders"]["healthy, 2 heads"]["figures"]["prefill"]
    assert f"failed: {fault}, 2 heads: " in capsys.readouterr().out


def test_other_tokens_are_a_failure(bench, monkeypatch):
    def time_answer(running: Any, ids: Any, cached: int, ask: Any = bench_hits.time_answer) -> Any:
        tokens, reached = ask(running, ids, cached)
        return tokens[:: -1 if "accepts-less" in running.log.name else 1], reached

    monkeypatch.setattr(bench_hits, "time_answer", time_answer)
    code, report = bench("healthy", "accepts-less")
    assert code == 1 and report["differing"] == 2 * 2 * bench_hits.PROMPTS
