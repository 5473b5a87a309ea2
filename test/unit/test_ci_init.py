"""``inkling-sconv ci-init``: what a fork gets, what SGLang makes of it, and what is refused."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import inkling_sconv
import pytest
import releases
import yaml
from inkling_sconv import cli
from inkling_sconv.errors import Interrupted
from inkling_sconv.fork_ci import copy
from inkling_sconv.trees.folder import Folder
from typer.testing import CliRunner, Result

CLASSES = {
    "test_inkling_mtp.py::TestCrashingForkWithPlugin::test_decode_made_hit_equals_cold",
    "test_inkling_prefill_graph.py::TestExtraBuffer::test_prefill_made_hit_equals_cold",
    "test_inkling_soak.py::TestSoak::test_no_slot_leaked",
}


def run(folder: Path) -> Result:
    return CliRunner().invoke(cli.app, ["ci-init", str(folder)])


def read_error(folder: Path) -> str:
    result = run(folder)
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    return line


def list_files(folder: Path) -> set[Path]:
    paths = {path.relative_to(folder) for path in folder.rglob("*")}
    return {path for path in paths if path.parts[0] != "python"}


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "fork/python/sglang/srt").mkdir(parents=True)
    return tmp_path / "fork"


def test_what_is_copied(checkout):
    result = run(checkout)
    assert result.exit_code == 0
    for word in ("INKLING_SCONV_RUNNER", f"[cli]=={inkling_sconv.__version__}", "git add"):
        assert word in result.stdout
    own = {copy.TESTS / path.name: path for path in (releases.ROOT / copy.TESTS).glob("*.py")}
    files = {path for path in list_files(checkout) if (checkout / path).is_file()}
    assert files == {copy.WORKFLOW, *own}
    assert all((checkout / name).read_bytes() == path.read_bytes() for name, path in own.items())

    text = (checkout / copy.WORKFLOW).read_text()
    workflow = yaml.safe_load(text)
    assert "@VERSION@" not in text and workflow["permissions"] == {}
    assert workflow["env"]["PACKAGE"] == f"sglang-inkling-sconv[cli]=={inkling_sconv.__version__}"
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))
    condition = workflow["jobs"]["gpu"]["if"]
    assert "vars.INKLING_SCONV_RUNNER != ''" in condition
    assert "head.repo.full_name == github.repository" in condition


def test_no_file_is_overwritten(checkout):
    run(checkout)
    (checkout / copy.WORKFLOW).unlink()
    (harness := checkout / copy.TESTS / "harness.py").unlink()
    harness.symlink_to("nowhere")
    before = list_files(checkout)
    line = read_error(checkout)
    assert "nothing written" in line and f"{copy.TESTS}/harness.py" in line and "delete" in line
    assert str(copy.WORKFLOW) not in line and list_files(checkout) == before


def test_all_or_nothing(checkout, monkeypatch):
    original = Folder.write_new
    for error in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/f"), Interrupted("a signal")):
        written: list[str] = []

        def write(
            folder: Folder, name: str, *rest: Any, error: Any = error, written: Any = written
        ) -> None:
            if name == copy.WORKFLOW.name:
                # Another program's file stays, and so does its folder.
                (checkout / copy.TESTS / "other.py").write_text("theirs")
                raise error
            original(folder, name, *rest)
            written.append(name)

        monkeypatch.setattr(Folder, "write_new", write)
        line = read_error(checkout)
        reason = "a signal" if isinstance(error, Interrupted) else "/f: No space left on device"
        assert line.endswith(f": nothing written: {reason}") and len(written) > 5
        files = {path for path in list_files(checkout) if (checkout / path).is_file()}
        assert files == {copy.TESTS / "other.py"} and not (checkout / ".github").exists()


def test_two_at_once(checkout):
    with Folder(checkout) as folder:
        assert folder.lock()
        assert "another run is at work" in read_error(checkout)
    assert list_files(checkout) == set()


def test_nothing_is_written_through_a_link(checkout, tmp_path):
    (mine := tmp_path / "mine").write_bytes(b"mine")
    (folder := checkout / copy.WORKFLOW.parent).mkdir(parents=True)
    (folder / f".{copy.WORKFLOW.name}.inkling-sconv.new").symlink_to(mine)
    assert run(checkout).exit_code == 0 and mine.read_bytes() == b"mine"
    # Nor into the git directory, nor anywhere else in the checkout.
    for name in (".github", "test"):
        shutil.rmtree(checkout / ".github", ignore_errors=True)
        shutil.rmtree(checkout / "test", ignore_errors=True)
        subprocess.run(["git", "init", "-q", checkout], check=True)
        before = {*checkout.rglob("*")}
        (checkout / name).symlink_to(".git")
        assert f"{checkout / name}: is a link to {checkout / '.git'}" in read_error(checkout)
        assert {*checkout.rglob("*")} - before == {checkout / name}
        (checkout / name).unlink()


def test_what_is_no_checkout(tmp_path, checkout):
    (tmp_path / "site/sglang/srt").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for folder, reason in (
        ("nowhere", "no such file"),
        ("", "no SGLang"),
        ("site", "not a checkout"),
    ):
        assert reason in read_error(tmp_path / folder)
    (checkout / "test").symlink_to(tmp_path / "elsewhere")
    assert "is a link to" in read_error(checkout)
    (checkout / "test").unlink()
    (checkout / "test").write_text("")
    assert "nothing written" in read_error(checkout)
    assert list_files(checkout) == {Path("test")} and not list_files(tmp_path / "elsewhere")


# As SGLang's test/run_suite.py does: every file, and each has to be registered.
REGISTER = """
import importlib.util, glob, sys
spec = importlib.util.spec_from_file_location("ci_register", sys.argv[1])
ci_register = sys.modules["ci_register"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ci_register)
files = glob.glob("test/registered/**/*.py", recursive=True)
for test in ci_register.collect_tests(sorted(files), sanity_check=True):
    print(test.filename, test.backend.name, test.effective_suite, bool(test.disabled))
"""


@pytest.mark.parametrize("version", ("0.5.17", "0.5.23"))
def test_sglang_registers_and_collects_them(version, tmp_path):
    root = releases.fork(version, releases.backend_text(version), tmp_path / "python")
    assert run(tmp_path).exit_code == 0

    def list_lines(*arguments: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=releases.environment(root, version),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {line.removeprefix(f"{copy.TESTS}/") for line in done.stdout.splitlines()}

    names = {path.name for path in (tmp_path / copy.TESTS).glob("*.py")}
    assert list_lines("-c", REGISTER, str(root / "sglang/test/ci/ci_register.py")) == {
        f"{name} CUDA base-b-test-1-gpu-large {not name.startswith('test_')}" for name in names
    }
    if version == "0.5.17":
        options = ("--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore")
        assert list_lines("-m", "pytest", *options, str(copy.TESTS)) >= CLASSES
