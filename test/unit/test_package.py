"""What is installed, what it costs a server of another model, and ``python -m inkling_sconv``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import requires
from pathlib import Path

import inkling_sconv
import pytest
import releases
import wrapt
from packaging.requirements import Requirement
from test_releases import check_log


def python(code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)


def test_the_only_dependency_is_wrapt():
    needed = [Requirement(line) for line in requires("sglang-inkling-sconv")]
    assert [r.name for r in needed if r.marker is None] == ["wrapt"]
    assert not {r.name for r in needed} & {"sglang", "torch", "triton"}


def test_the_wheel_is_small_and_whole(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            str(releases.ROOT),
        ],
        check=True,
    )
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert sum(info.file_size for info in archive.infolist()) < 1_000_000
        metadata = Parser().parsestr(
            archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        )
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt")))
    assert metadata["Version"] == inkling_sconv.__version__
    assert {n.split("/")[0].split("-")[0] for n in names} == {
        "inkling_sconv",
        "sglang_inkling_sconv",
    }
    assert b"inkling_sconv = inkling_sconv.plugin:register" in entry_points


def test_register_takes_under_5_ms_and_imports_no_torch():
    code = """
import time, sys
from inkling_sconv import plugin
start = time.perf_counter()
plugin.register()
print((time.perf_counter() - start) * 1e3)
print(sorted({"torch", "sglang", "libcst", "rich", "typer"} & set(sys.modules)))
"""
    milliseconds, heavy = python(code).splitlines()
    assert float(milliseconds) < 5 and heavy == "[]"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with our package and wrapt, for a Python that sees no site-packages."""
    shutil.copytree(Path(inkling_sconv.__file__).parent, tmp_path / "inkling_sconv")
    shutil.copytree(Path(wrapt.__file__).parent, tmp_path / "wrapt")
    return tmp_path


def status(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-m", "inkling_sconv"],
        env={"PYTHONPATH": str(path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_status_without_sglang(bare):
    assert "SGLang is not installed" in one_line(status(bare))


@pytest.mark.parametrize("package", ("sglang", "sglang/srt"))
def test_status_with_an_sglang_older_than_the_plugin_door(bare, package):
    (bare / package).mkdir(parents=True)
    for part in ("sglang", package):
        (bare / part / "__init__.py").touch()
    assert "older than the plugin door" in one_line(status(bare))


def test_status_without_the_entry_point(bare):
    (bare / "sglang/srt/plugins").mkdir(parents=True)
    for part in ("sglang", "sglang/srt", "sglang/srt/plugins"):
        (bare / part / "__init__.py").touch()
    assert "entry point is missing" in one_line(status(bare))


def test_status_with_an_sglang_that_does_not_import(bare):
    (bare / "sglang").mkdir()
    (bare / "sglang/__init__.py").write_text("import nowhere")
    assert "does not import: No module named 'nowhere'" in one_line(status(bare))


def test_status_with_an_sglang_beside_the_wrong_versions(bare):
    (bare / "sglang").mkdir()
    (bare / "sglang/__init__.py").write_text("raise ValueError('a name that is taken')")
    line = one_line(status(bare))
    assert "does not import: ValueError: a name that is taken; install the versions" in line


def test_status_kept_out_by_sglang_plugins():
    done = subprocess.run(
        [sys.executable, "-m", "inkling_sconv"],
        env={**os.environ, "SGLANG_PLUGINS": "other"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "SGLANG_PLUGINS keeps this plugin out" in done.stderr.splitlines()[-1]


def test_status_of_the_crashing_fork(tmp_path):
    path = releases.tree(releases.CRASHING, tmp_path / "tree")
    done = subprocess.run(
        [sys.executable, "-m", "inkling_sconv"],
        env=releases.environment(path, releases.CRASHING),
        capture_output=True,
        text=True,
    )
    line, *fixes = done.stdout.splitlines()
    assert done.returncode == 0 and "is crashing" in line and "replaced" in line
    check_log([f"WARNING {fix}" for fix in fixes], releases.CRASHING)
