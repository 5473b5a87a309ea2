"""``inkling-sconv ci-init``: what a fork gets, what SGLang makes of it, what is refused."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import inkling_sconv
import pytest
import releases
import yaml
from inkling_sconv import cli
from inkling_sconv.fork_ci import copy
from typer.testing import CliRunner, Result

CLASSES = {
    "test_inkling_mtp.py::TestCrashingForkWithPlugin::test_decode_made_hit_equals_cold",
    "test_inkling_prefill_graph.py::TestExtraBuffer::test_prefill_made_hit_equals_cold",
    "test_inkling_soak.py::TestSoak::test_no_slot_leaked",
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["ci-init", *map(str, arguments)])


def one_line(result: Result) -> str:
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    return line


def files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if not path.is_relative_to(folder / "python")
    }


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "fork/python/sglang/srt").mkdir(parents=True)
    return tmp_path / "fork"


def test_what_is_copied(checkout):
    result = run(checkout)
    assert result.exit_code == 0
    own = releases.ROOT / copy.TESTS
    copied = {path.name: path.read_bytes() for path in (checkout / copy.TESTS).iterdir()}
    assert copied == {path.name: path.read_bytes() for path in own.glob("*.py")}
    assert len(copied) >= 4 and (checkout / copy.WORKFLOW).is_file()
    assert {p for p in files(checkout) if (checkout / p).is_file()} == {
        copy.WORKFLOW,
        *(copy.TESTS / name for name in copied),
    }
    for word in ("INKLING_SCONV_RUNNER", f"[cli]=={inkling_sconv.__version__}", "git add"):
        assert word in result.stdout


def test_the_workflow(checkout):
    run(checkout)
    text = (checkout / copy.WORKFLOW).read_text()
    workflow = yaml.safe_load(text)
    assert "@VERSION@" not in text
    assert workflow["env"]["PACKAGE"] == f"sglang-inkling-sconv[cli]=={inkling_sconv.__version__}"
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))
    condition = workflow["jobs"]["gpu"]["if"]
    assert "vars.INKLING_SCONV_RUNNER != ''" in condition
    assert "head.repo.full_name == github.repository" in condition


def test_nothing_is_overwritten(checkout):
    run(checkout)
    (checkout / copy.WORKFLOW).unlink()
    (checkout / copy.TESTS / "harness.py").unlink()
    (checkout / copy.TESTS / "harness.py").symlink_to("nowhere")
    before = files(checkout)
    line = one_line(run(checkout))
    assert "nothing written" in line and f"{copy.TESTS}/harness.py" in line and "delete" in line
    assert str(copy.WORKFLOW) not in line and files(checkout) == before


def test_all_or_nothing(checkout, monkeypatch):
    written = []

    def full(path: Path, text: bytes) -> None:
        if path.name == copy.WORKFLOW.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(text)
        written.append(path)

    monkeypatch.setattr(ci, "write", full)
    line = one_line(run(checkout))
    assert written and files(checkout) == set()
    assert f"{copy.WORKFLOW.name}: nothing written: No space left on device" in line


def test_what_is_no_checkout(tmp_path, checkout):
    assert "no such file" in one_line(run(tmp_path / "nowhere"))
    assert "no SGLang here" in one_line(run(tmp_path))
    (tmp_path / "site/sglang/srt").mkdir(parents=True)
    assert "not a checkout" in one_line(run(tmp_path / "site"))
    assert not files(tmp_path / "site") - {Path("sglang"), Path("sglang/srt")}
    (tmp_path / "elsewhere").mkdir()
    (checkout / "test").symlink_to(tmp_path / "elsewhere")
    assert "is a link out of" in one_line(run(checkout))
    assert not files(tmp_path / "elsewhere")


def test_a_file_where_a_folder_should_be(checkout):
    (checkout / "test").write_text("")
    assert "nothing written" in one_line(run(checkout))
    assert files(checkout) == {Path("test")}


@pytest.fixture
def fork(tmp_path, request) -> Path:
    """A checkout made of a release; its SGLang's CI runs every file below test/registered."""
    root = releases.fork(request.param, releases.backend_text(request.param), tmp_path / "python")
    assert run(root.parent).exit_code == 0
    return root.parent


@pytest.mark.parametrize("fork", ("0.5.17", "0.5.23"), indirect=True)
def test_sglang_s_own_registration_takes_them(fork):
    # As its test/run_suite.py does: every file, and none may be left unregistered.
    code = """
import importlib.util, glob, sys
spec = importlib.util.spec_from_file_location("ci_register", sys.argv[1])
ci_register = sys.modules["ci_register"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ci_register)
files = glob.glob("test/registered/**/*.py", recursive=True)
for test in ci_register.collect_tests(sorted(files), sanity_check=True):
    print(test.filename, test.backend.name, test.effective_suite, test.disabled)
"""
    register = fork / "python/sglang/test/ci/ci_register.py"
    out = subprocess.check_output([sys.executable, "-c", code, register], cwd=fork, text=True)
    found = dict(line.split(" ", 1) for line in out.splitlines())
    assert set(found) == {str(copy.TESTS / p.name) for p in (fork / copy.TESTS).glob("*.py")}
    for name, registered in found.items():
        suite, disabled = registered.rsplit("large ", 1)
        assert suite == "CUDA base-b-test-1-gpu-"
        assert (disabled == "None") == Path(name).name.startswith("test_")


@pytest.mark.parametrize("fork", ("0.5.17",), indirect=True)
def test_pytest_collects_them_there(fork):
    options = ("--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(copy.TESTS)],
        cwd=fork,
        env=releases.environment(fork / "python", "0.5.17"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.removeprefix(f"{copy.TESTS}/") for line in done.stdout.splitlines()}
    assert collected >= CLASSES, done.stdout
