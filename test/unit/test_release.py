"""The wheel and the sdist, as ``python -m build`` makes them, in an empty venv beside an SGLang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import inkling_sconv
import pytest
import releases
import yaml
from inkling_sconv.fork_ci import copy
from test_releases import FIXES

VERSION = inkling_sconv.__version__
PUBLISH = releases.ROOT / ".github/workflows/publish.yml"
BESIDE = "0.5.17"

# One worker builds once for all of them.
pytestmark = pytest.mark.xdist_group("release")


def build(out: Path, *options: str) -> dict[str, Path]:
    # Without isolation: hatchling is here, and the tests need no network for it.
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out)]
    done = subprocess.run([*command, str(releases.ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"wheel" if path.suffix == ".whl" else "sdist": path for path in out.iterdir()}


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> dict[str, Path]:
    """What is published: the sdist of the checkout, and the wheel of that sdist."""
    return build(tmp_path_factory.mktemp("dist"))


def read(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_makes_the_wheel_of_the_checkout(built, tmp_path):
    assert set(built) == {"wheel", "sdist"}
    assert all(f"-{VERSION}" in path.name for path in built.values())
    direct = read(build(tmp_path, "--wheel")["wheel"])
    assert read(built["wheel"]) == direct
    assert "inkling_sconv/py.typed" in direct
    shipped = "inkling_sconv/fork_ci/registered/"
    tests = {name.removeprefix(shipped) for name in direct if name.startswith(shipped)}
    assert tests == {path.name for path in (releases.ROOT / copy.TESTS).glob("*.py")}


@pytest.fixture(params=("wheel", "sdist"))
def venv(built, request, tmp_path) -> Path:
    """A venv with our package in it; torch and the like are the test's own, found after it."""
    python = tmp_path / "venv/bin/python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # A plain line: the .pth files in there, and so an editable install of us, are not read.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed")
    done = subprocess.run(
        [*pip, *options, str(built[request.param])], env=clean(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "venv"


def clean(**variables: str) -> dict[str, str]:
    """The environment, without what would let another copy of us be imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("INKLING_", "PYTHON"))}
    return {**kept, **variables}


def test_installed_beside_a_real_sglang(venv, tmp_path):
    environment = releases.environment(releases.release(BESIDE), BESIDE)
    own = str(releases.ROOT / "python")
    paths = [p for p in environment["PYTHONPATH"].split(os.pathsep) if p != own]
    environment = clean(**{**environment, "PYTHONPATH": os.pathsep.join(paths)})

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(venv / "bin" / command[0]), *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    code = "import inkling_sconv, sglang; print(inkling_sconv.__file__, sglang.__file__)"
    ours, theirs = run("python", "-c", code).split()[-2:]
    assert Path(ours).is_relative_to(venv) and f"sglang=={BESIDE}" in theirs
    assert run("inkling-sconv", "--version") == f"{VERSION}\n"
    line, *fixes = run("python", "-m", "inkling_sconv").splitlines()
    assert line.startswith(f"inkling_sconv {VERSION}: ") and " is untracked (" in line
    assert all(fix.endswith("; mended.") for fix in fixes)
    assert [fix.split()[2] for fix in fixes] == FIXES["untracked"]

    fork = tmp_path / "fork"
    (fork / "python/sglang/srt").mkdir(parents=True)
    run("inkling-sconv", "ci-init", str(fork))
    copied = {path.name: path.read_bytes() for path in (fork / copy.TESTS).iterdir()}
    tests = (releases.ROOT / copy.TESTS).glob("*.py")
    assert copied == {path.name: path.read_bytes() for path in tests}


def jobs() -> dict[str, dict]:
    return yaml.safe_load(PUBLISH.read_text())["jobs"]


def test_who_may_publish():
    workflow = yaml.safe_load(PUBLISH.read_text())
    assert workflow["permissions"] == {}
    build, publish = jobs()["build"], jobs()["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "release" and publish["needs"] == "build"
    # The job that may publish runs no code of this repository.
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"])
    for step in (*build["steps"], *publish["steps"]):
        assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))


@pytest.mark.parametrize(
    ("tag", "code"), ((f"v{VERSION}", 0), (VERSION, 1), (f"v{VERSION}.post1", 1), ("v; exit 0", 1))
)
def test_the_tag_is_the_version(tag, code):
    (step,) = [step for step in jobs()["build"]["steps"] if "TAG" in step.get("env", {})]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=releases.ROOT,
        env=clean(TAG=tag, PATH=path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == code and (not code or VERSION in done.stderr)
