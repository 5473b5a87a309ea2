"""The wheel and the sdist that ``python -m build`` makes, and the tag that publishes them."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import actions
import inkling_sconv
import pytest
import releases
from inkling_sconv.fork_ci import copy
from test_releases import FIXES

VERSION = inkling_sconv.__version__
BESIDE = "0.5.17"

# One worker builds once for all of them.
pytestmark = pytest.mark.xdist_group("release")


def build(out: Path, *options: str) -> dict[str, Path]:
    # Without isolation: hatchling is installed here, so the build needs no network.
    tool = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out]
    subprocess.run([*tool, *options, releases.ROOT], check=True, capture_output=True)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is published: the sdist of the checkout, and the wheel of that sdist."""
    return build(tmp_path_factory.mktemp("dist"))


def read_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_makes_the_wheel_of_the_checkout(built, tmp_path):
    assert set(built) == {".whl", ".gz"}
    assert all(f"-{VERSION}" in path.name for path in built.values())
    files = read_wheel(build(tmp_path, "--wheel")[".whl"])
    assert read_wheel(built[".whl"]) == files and "inkling_sconv/py.typed" in files


def make_environment(**variables: str) -> dict[str, str]:
    """The environment, without what would let another copy of us be imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("INKLING_", "PYTHON"))}
    return {**kept, **variables}


def test_the_wheel_beside_a_real_sglang(built, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    # torch and the like are this Python's own. It finds them after ours, and reads no .pth file
    # there, so an editable install of us stays out.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet"]
    command = [*pip, "--no-deps", "--ignore-installed", built[".whl"]]
    subprocess.run(command, check=True, env=make_environment())

    given = releases.environment(releases.release(BESIDE), BESIDE)
    own = str(releases.ROOT / "python")
    paths = [path for path in given["PYTHONPATH"].split(os.pathsep) if path != own]
    environment = make_environment(**{**given, "PYTHONPATH": os.pathsep.join(paths)})

    def run(program: str, *arguments: str) -> str:
        command = [venv / "bin" / program, *arguments]
        return subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)

    code = "import importlib.util as u; print(*(u.find_spec(n).origin for n in {}))"
    ours, theirs = run("python", "-c", code.format(("inkling_sconv", "sglang"))).split()
    assert Path(ours).is_relative_to(venv) and f"sglang=={BESIDE}" in theirs
    assert run("inkling-sconv", "--version") == f"{VERSION}\n"
    line, *fixes = run("python", "-m", "inkling_sconv").splitlines()
    assert line.startswith(f"inkling_sconv {VERSION}: ") and " is untracked (" in line
    assert [fix.split()[2] for fix in fixes] == FIXES["untracked"]
    (tmp_path / "fork/python/sglang/srt").mkdir(parents=True)
    run("inkling-sconv", "ci-init", "fork")
    copied, tests = tmp_path / "fork" / copy.TESTS, releases.ROOT / copy.TESTS
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in tests.glob("*.py")
    }


@pytest.mark.parametrize(
    ("tag", "code"), ((f"v{VERSION}", 0), (VERSION, 1), (f"v{VERSION}.post1", 1), ("v; exit 0", 1))
)
def test_the_tag_is_the_version(tag, code):
    steps = actions.load_workflow("publish.yml")["jobs"]["build"]["steps"]
    (step,) = [step for step in steps if "TAG" in step.get("env", {})]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    values = {"github.ref_name": tag}
    done = actions.execute(step, releases.ROOT, make_environment(PATH=path), values)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == code and (not code or VERSION in done.stderr)
