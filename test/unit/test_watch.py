"""``inkling-sconv watch``: what pip answers, what is made of it, and what it exits with."""

from __future__ import annotations

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
from typer.testing import CliRunner

# What pip 26.3 printed with --json, and pip 23.2 without, on the day that 0.5.23 was the newest.
DATA = Path(__file__).resolve().parents[1] / "data"
JSON, TEXT = ((DATA / f"pip_index_versions.{kind}").read_text() for kind in ("json", "txt"))


def test_the_table_is_what_the_tests_of_the_releases_say():
    assert {k: v for k, v in STATES.items() if k != releases.CRASHING} == watch.KNOWN
    assert set(releases.RELEASES) == set(watch.KNOWN)


@pytest.mark.parametrize("answer", (JSON, TEXT))
def test_the_real_answer(answer):
    found = watch.versions(answer)
    assert max(found) == Version("0.5.23") and Version("0.5.10rc0") in found
    assert set(map(Version, watch.KNOWN)) <= set(found)
    assert found == watch.versions(JSON)


@pytest.mark.parametrize(
    "answer", ("", "{}", "[]", "{", '{"versions": null}', '{"versions": ["x"]}', "sglang (0.5.23)")
)
def test_an_answer_without_versions(answer):
    with pytest.raises(watch.WatchError, match="names no version"):
        watch.versions(answer)


def test_what_is_no_version_is_left_out():
    assert watch.versions('{"versions": ["0.5.24-x-y", "0.5.24rc1"]}') == [Version("0.5.24rc1")]


class Pip:
    """pip, with an answer to each command, and no network."""

    def __init__(self, *newer: str, json_known: bool = True, index_error: str = ""):
        self.versions = [*newer, *json.loads(JSON)["versions"]]
        self.json_known, self.index_error = json_known, index_error
        self.downloads: list[str] = []

    def __call__(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        def answer(out: str = "", error: str = "", code: int = 0):
            return subprocess.CompletedProcess(arguments, code, out, error)

        if arguments[0] == "index":
            if self.index_error:
                return answer(error=self.index_error, code=1)
            if "--json" not in arguments:
                return answer(f"sglang (x)\nAvailable versions: {', '.join(self.versions)}\n")
            if not self.json_known:
                return answer(error="\nUsage: pip\n\nno such option: --json\n", code=2)
            return answer(json.dumps({"name": "sglang", "versions": self.versions}))
        folder, requirement = arguments[-2:]
        self.downloads.append(requirement)
        with zipfile.ZipFile(Path(folder) / "sglang-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/srt/x.py", "")
        return answer()


@pytest.fixture
def run(monkeypatch):
    def _run(pip: Pip, report: dict[str, str] | None = None, *arguments: str):
        monkeypatch.setattr(watch, "_pip", pip)
        if report is not None:
            monkeypatch.setattr(cli, "_examine_wheel", lambda wheel: report)
        return CliRunner().invoke(cli.app, ["watch", *arguments])

    return _run


@pytest.mark.parametrize("json_known", (True, False))
def test_nothing_newer(run, json_known):
    pip = Pip(json_known=json_known)
    result = run(pip, None, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and answer["new"] is False and pip.downloads == []
    assert answer["title"] == "No SGLang is newer than 0.5.23"
    found = {r["version"]: (r["state"], r["new"]) for r in answer["releases"]}
    assert found == {
        "0.5.23": ("exempt", False),
        "0.5.10rc0": ("older than the table", False),
    }


@pytest.mark.parametrize(
    ("report", "title"),
    (
        ({"state": "exempt"}, "SGLang 0.5.24rc1 is exempt, as 0.5.23 was"),
        ({"state": "crashing"}, "SGLang 0.5.24rc1 is crashing; 0.5.23 was exempt"),
        (
            {"state": "unknown", "why": "boom | `x`\ny", "static": "guarded"},
            "SGLang 0.5.24rc1 is not recognised",
        ),
    ),
)
def test_a_newer_one(run, report, title):
    pip = Pip("0.5.24rc1", "0.5.23.post1")
    result = run(pip, report, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["new"] is True and answer["title"] == title
    assert pip.downloads == ["sglang==0.5.23.post1", "sglang==0.5.24rc1"]
    assert [r["version"] for r in answer["releases"]] == ["0.5.23.post1", "0.5.24rc1"]
    assert all(r["new"] and r["known"] is None for r in answer["releases"])
    assert "`KNOWN` in `python/inkling_sconv/watch.py`" in answer["body"]
    if "why" in report:
        assert "| `boom / 'x' y`; from the syntax tree alone: guarded |" in answer["body"]
    shown = run(Pip("0.5.24rc1"), report)
    assert shown.exit_code == 1 and title in shown.stdout and answer["body"][:50] in shown.stdout


def test_one_release(run):
    known = run(Pip(), {"state": "guarded"}, "--release", "0.5.18", "--json")
    answer = json.loads(known.stdout)
    assert known.exit_code == 0 and answer["new"] is False and len(answer["releases"]) == 1
    moved = run(Pip(), {"state": "exempt"}, "--release", "0.5.18", "--json")
    assert moved.exit_code == 1
    assert json.loads(moved.stdout)["title"] == "SGLang 0.5.18 is exempt; the table says guarded"


def one_line(result) -> str:
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_what_is_no_version(run):
    line = one_line(run(Pip(), None, "--release", "1 --index-url=x"))
    assert "not a version" in line


def test_an_index_that_does_not_answer(run):
    error = "WARNING: x\nERROR: No matching distribution found for sglang\n"
    line = one_line(run(Pip(index_error=error), None, "--json"))
    assert "No matching distribution found for sglang" in line and "WARNING" not in line
    line = one_line(run(Pip(index_error="/usr/bin/python: No module named pip"), None))
    assert "ensurepip" in line


def test_a_pip_that_hangs(monkeypatch):
    monkeypatch.setattr(watch, "INDEX_SECONDS", 0.01)
    assert "no answer in" in one_line(CliRunner().invoke(cli.app, ["watch"]))


def test_a_release_that_does_not_exist():
    # pip itself, and whatever index it is configured with.
    line = one_line(CliRunner().invoke(cli.app, ["watch", "--json", "--release", "99.0"]))
    assert line == (
        "inkling-sconv: sglang==99.0: pip finds no such release for this Python; "
        "see: pip index versions sglang --pre"
    )


def wheel(folder: Path, **files: str) -> Path:
    path = folder / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/srt/__init__.py", "")
        for name, text in files.items():
            archive.writestr(f"sglang/srt/{name}.py", text)
    return path


def test_a_wheel_without_the_backend(tmp_path):
    report = cli._examine_wheel(wheel(tmp_path))
    assert report["state"] == "absent" and report["why"].startswith("no file defines ")


def test_a_wheel_that_cannot_be_driven(monkeypatch, tmp_path):
    text = releases.backend_text("0.5.22")
    monkeypatch.setattr(
        cli, "_examine", lambda tree, installed: {"state": "unknown", "why": "w", "rows": []}
    )
    report = cli._examine_wheel(wheel(tmp_path, backend=text))
    assert (report["state"], report["static"], report["why"]) == ("unknown", "exempt", "w")
    report = cli._examine_wheel(wheel(tmp_path, backend=f"{text}\n(", other=""))
    assert report["state"] == "unknown" and report["why"]
