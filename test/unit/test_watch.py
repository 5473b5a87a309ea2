"""``inkling-sconv watch``: what pip answers, what is made of it, and the exit codes."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import releases
from inkling_sconv import cli
from inkling_sconv.trees import watch
from packaging.version import Version
from test_releases import STATES
from typer.testing import CliRunner, Result

# What pip 23.2 printed on the day that 0.5.23 was the newest.
TEXT = (Path(__file__).resolve().parents[1] / "data/pip_index_versions.txt").read_text()


def test_the_table_is_that_of_the_tests():
    assert {k: v for k, v in STATES.items() if k != releases.CRASHING} == watch.KNOWN
    assert {*releases.RELEASES} == {*watch.KNOWN}


def test_the_real_answer():
    found = watch.read_versions(TEXT)
    assert max(found) == Version("0.5.23") and Version("0.5.10rc0") in found
    assert {*map(Version, watch.KNOWN)} <= {*found}
    mixed = "Available versions: 0.5.24-x-y, 0.5.24rc1\n"
    assert watch.read_versions(mixed) == [Version("0.5.24rc1")]


@pytest.mark.parametrize("answer", ("", "{}", "sglang (0.5.23)", "Available versions: x-y"))
def test_an_answer_without_versions(answer):
    with pytest.raises(watch.WatchError, match="names no version"):
        watch.read_versions(answer)


class Pip:
    """pip, with an answer to each command, and no network."""

    def __init__(self, *newer: str, error: str = ""):
        self.versions = [*newer, *map(str, watch.read_versions(TEXT))]
        self.error = error
        self.downloads: list[str] = []

    def __call__(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        def answer(out: str = "", error: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(arguments, int(bool(error)), out, error)

        if self.error:
            return answer(error=self.error)
        if arguments[0] == "download":
            folder, requirement = arguments[-2:]
            self.downloads.append(requirement)
            make_wheel(Path(folder))
            return answer()
        return answer(f"sglang (x)\nAvailable versions: {', '.join(self.versions)}\n")


def make_wheel(folder: Path, **files: str) -> Path:
    path = folder / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {"__init__": "", **files}.items():
            archive.writestr(f"sglang/srt/{name}.py", text)
    return path


@pytest.fixture
def run(monkeypatch):
    def run(pip: Pip | None, report: dict[str, str] | None, *arguments: str) -> Result:
        if pip is not None:
            monkeypatch.setattr(watch, "_run_pip", pip)
        if report is not None:
            monkeypatch.setattr(watch, "examine_wheel", lambda wheel, read_state: report)
        return CliRunner().invoke(cli.app, ["watch", *arguments])

    return run


def test_no_newer_release(run):
    result = run(pip := Pip(), None, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and pip.downloads == []
    assert answer == {
        "new": False,
        "title": "No SGLang is newer than 0.5.23",
        "body": "The newest that pip finds is 0.5.23.",
        "releases": [],
    }


@pytest.mark.parametrize(
    ("report", "title"),
    (
        ({"state": "exempt"}, "SGLang 0.5.24rc1 is exempt; 0.5.23 was exempt"),
        ({"state": "crashing"}, "SGLang 0.5.24rc1 is crashing; 0.5.23 was exempt"),
        (
            {"state": "unknown", "why": "boom | `x`\ny", "static": "guarded"},
            "SGLang 0.5.24rc1 is unknown; 0.5.23 was exempt",
        ),
    ),
)
def test_a_newer_release(run, report, title):
    pip = Pip("0.5.24rc1", "0.5.23.post1")
    result = run(pip, report, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["new"] is True and answer["title"] == title
    assert pip.downloads == ["sglang==0.5.23.post1", "sglang==0.5.24rc1"]
    assert [r["version"] for r in answer["releases"]] == ["0.5.23.post1", "0.5.24rc1"]
    assert all(r["new"] and r["known"] is None for r in answer["releases"])
    # The body says where the table is.
    home = Path(watch.__file__).relative_to(releases.ROOT)
    assert f"`KNOWN` in `{home}`" in answer["body"]
    words = "| `boom / 'x' y`; from the syntax tree alone: guarded |"
    assert (words in answer["body"]) == ("why" in report)
    shown = run(Pip("0.5.24rc1"), report)
    assert shown.exit_code == 1 and title in shown.stdout and answer["body"][:50] in shown.stdout


def test_the_title_is_about_a_change(run, monkeypatch):
    states = iter(("exempt", "crashing", "exempt"))
    monkeypatch.setattr(watch, "examine_wheel", lambda *_: {"state": next(states)})
    result = run(Pip("0.5.26", "0.5.25", "0.5.24"), None)
    assert result.exit_code == 1 and "SGLang 0.5.25 is crashing; 0.5.23 was exempt" in result.stdout


@pytest.mark.parametrize(("state", "code"), (("guarded", 0), ("exempt", 1)))
def test_one_release(run, state, code):
    result = run(Pip(), {"state": state}, "--release", "0.5.18", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == code and len(answer["releases"]) == 1
    assert answer["new"] is bool(code) and answer["title"].endswith("the table says guarded")


@pytest.mark.parametrize(
    ("pip", "arguments", "reason"),
    (
        (Pip(), "--release 1;--index-url=x", "not a version"),
        (
            Pip(error="WARNING: x\nERROR: No matching distribution\n"),
            "",
            ": No matching distribution;",
        ),
        (Pip(error="/usr/bin/python: No module named pip"), "", "ensurepip"),
        # pip itself, with whatever index it is configured for.
        (
            None,
            "--json --release 99.0",
            "sglang==99.0: pip finds no such release for this Python; ",
        ),
        (None, "", "no answer in"),
    ),
)
def test_errors(run, monkeypatch, pip, arguments, reason):
    monkeypatch.setattr(watch, "INDEX_SECONDS", 0.01)
    result = run(pip, None, *arguments.split())
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert reason in line


def test_wheels(monkeypatch, tmp_path):
    def examine(**files: str) -> dict[str, str]:
        return watch.examine_wheel(make_wheel(tmp_path, **files), lambda text: "exempt")

    report = examine()
    assert report["state"] == "absent" and report["why"].startswith("no file defines ")
    text = "class Fork:\n    def _refresh_track_conv_indices(self): ...\n"
    report = examine(one=text, two=text)
    assert report["state"] == "unknown" and "in several files" in report["why"]
    unknown = {"state": "unknown", "why": "w", "rows": []}
    monkeypatch.setattr(watch, "examine_tree", lambda tree, installed: unknown)
    assert examine(backend=text) == {**unknown, "static": "exempt"}
