"""``make gpu-test`` without a GPU: what is in the parts, and which of them are run."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shards

ABOUT = shards.subject("1.2.3", [])
TESTS = {
    "passes": "def test_a(): pass\ndef test_b(): pass\n",
    "fails": "def test_a(): pass\ndef test_b(): assert 0\n",
    "skips": "import pytest\ndef test_a(): pytest.skip('needs a GPU')\n",
    "dies": "import os\ndef test_a(): os._exit(9)\n",
    "nothing": "",
}


@pytest.fixture
def run(tmp_path, capfd):
    """Runs one-file shards; gives the exit status and what was printed."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*names: str, about: str = ABOUT, force: bool = False) -> tuple[int, str]:
        for name in names:
            (tmp_path / f"test_{name}.py").write_text(TESTS[name])
        parts = {number: (f"test_{name}.py",) for number, name in enumerate(names, 1)}
        capfd.readouterr()
        code = shards.run(parts, about, tmp_path, force=force, root=tmp_path)
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return run


def collected() -> list[str]:
    """Every test class and test function that needs a GPU."""
    found = []
    for folder in ("test/gpu", "test/registered"):
        for file in sorted((shards.ROOT / folder).rglob("test_*.py")):
            name = file.relative_to(shards.ROOT).as_posix()
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and re.match(
                    "test", node.name, re.IGNORECASE
                ):
                    found.append(f"{name}::{node.name}")
    return found


def test_every_test_is_in_one_shard():
    tests = collected()
    assert len(tests) > 10
    for test in tests:
        parts = [
            number
            for number, names in shards.SHARDS.items()
            for name in names
            if test == name or test.startswith((f"{name}::", f"{name}/"))
        ]
        assert len(parts) == 1, (test, parts)


def test_every_name_of_a_shard_is_there():
    tests = collected()
    for name in (name for names in shards.SHARDS.values() for name in names):
        assert any(t == name or t.startswith((f"{name}::", f"{name}/")) for t in tests), name


def test_a_green_shard_is_not_run_again(run, tmp_path):
    code, printed = run("passes")
    assert code == 0 and "shard 1: test_passes.py" in printed and "2 passed, 0 failed" in printed
    assert (tmp_path / "shard-1.xml").is_file()
    code, printed = run("passes")
    assert code == 0 and "2 passed before" in printed and "FORCE=1" in printed
    assert "test session starts" not in printed


def test_force_runs_it_again(run):
    run("passes")
    assert "test session starts" in run("passes", force=True)[1]


def test_another_subject_runs_it_again(run):
    run("passes")
    assert "test session starts" in run("passes", about=shards.subject("1.2.4", []))[1]


@pytest.mark.parametrize("name", ("fails", "skips", "dies", "nothing"))
def test_what_is_not_green_is_red_and_runs_again(run, name):
    for _ in range(2):
        code, printed = run(name)
        assert code == 1 and "red: shard 1" in printed
        assert name == "dies" or "test session starts" in printed


def test_a_red_shard_does_not_stop_the_next(run):
    code, printed = run("fails", "passes")
    assert code == 1 and "shard 2: 2 passed" in printed and "red: shard 1\n" in printed
    # Only the red one runs again.
    code, printed = run("passes", "passes")
    assert code == 0 and printed.count("test session starts") == 1


MEETS = """
import os, pathlib, time
def test_meets():
    assert ("INKLING_SCONV_SOAK_BESIDE" in os.environ) is ("{mine}" == "soak")
    pathlib.Path("{mine}").touch()
    deadline = time.monotonic() + 60
    while not pathlib.Path("{theirs}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def test_the_soak_runs_beside_the_others(tmp_path, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    one = MEETS.format(mine="one", theirs="soak")
    (tmp_path / "test_one.py").write_text(f"{one}    time.sleep(6)\n")
    (tmp_path / "test_soak.py").write_text(MEETS.format(mine="soak", theirs="one"))
    parts = {1: ("test_one.py",), shards.BESIDE: ("test_soak.py",)}
    assert shards.run(parts, ABOUT, tmp_path, force=False, root=tmp_path) == 0
    log = tmp_path / f"shard-{shards.BESIDE}.log"
    printed = capfd.readouterr().out
    assert printed.index(f"beside the others: {log}") < printed.index("shard 1: test_one.py")
    assert printed.count("1 passed, 0 failed") == 2
    # Waited for last, it has the time that it took itself.
    first, soak = map(int, re.findall(r", (\d+) s, ", printed))
    assert soak <= first - 3
    assert "test_soak.py::test_meets" in log.read_text()
    assert "test_soak.py::test_meets" not in printed


def test_the_soak_alone_is_shown(run, tmp_path):
    run(*["passes"] * shards.BESIDE)
    (tmp_path / f"shard-{shards.BESIDE}.xml").unlink()
    code, printed = run(*["passes"] * (shards.BESIDE - 1), "fails")
    assert code == 1 and "test_fails.py::test_b FAILED" in printed and "beside" not in printed


CLEANS_UP = """
import pathlib, time
def test_a():
    pathlib.Path("{name}").write_text("begun")
    try:
        time.sleep(120)
    finally:
        time.sleep(1)
        pathlib.Path("{name}").write_text("cleaned up")
"""
# A server in a thread, which no interrupt reaches.
LEAVES_IT = """
import concurrent.futures, pathlib, subprocess
def serve():
    server = subprocess.Popen(["sleep", "120"], start_new_session=True)
    pathlib.Path("{name}").write_text(str(server.pid))
    server.wait()
class TestA:
    def test_a(self):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(serve).result()
"""


def interrupted(folder: Path, parts: dict[int, tuple[str, ...]], names: tuple[str, ...]) -> None:
    """Run ``parts``; Ctrl-C in a terminal once each of ``names`` is there."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    code = f"""
import pathlib, shards
folder = pathlib.Path({str(folder)!r})
shards.STOP_SECONDS = 10
shards.run({parts!r}, "about", folder, force=False, root=folder)
"""
    variables = {**os.environ, "PYTHONPATH": str(shards.ROOT / "test")}
    process = subprocess.Popen([sys.executable, "-c", code], env=variables, start_new_session=True)
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() and (folder / name).read_text() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0


def test_an_interrupt_waits_for_the_clean_up(tmp_path):
    names = ("one", "soak")
    for name in names:
        (tmp_path / f"test_{name}.py").write_text(CLEANS_UP.format(name=name))
    interrupted(tmp_path, {1: ("test_one.py",), shards.BESIDE: ("test_soak.py",)}, names)
    assert [(tmp_path / name).read_text() for name in names] == ["cleaned up"] * 2


def test_an_interrupt_leaves_no_server(tmp_path):
    names = ("one", "two")
    for name in names:
        (tmp_path / f"test_{name}.py").write_text(LEAVES_IT.format(name=name))
    interrupted(tmp_path, {1: tuple(f"test_{name}.py::TestA" for name in names)}, names)
    for name in names:
        stat = Path("/proc") / (tmp_path / name).read_text() / "stat"
        # Where process 1 is no init, a killed one stays as a zombie.
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_half_a_junit_file_is_none(run, tmp_path):
    run("passes")
    file = tmp_path / "shard-1.xml"
    file.write_text(file.read_text()[:-30])
    assert shards.counts(file) is None and "test session starts" in run("passes")[1]


def test_the_subject_is_release_and_text(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("a = 1\n")
    one = shards.subject("1.0", [file])
    assert one == shards.subject("1.0", [file]) and one.startswith("sglang 1.0, ")
    assert one != shards.subject("1.1", [file])
    file.write_text("a = 2\n")
    assert one != shards.subject("1.0", [file])


def make(*variables: str, target: str = "gpu-test") -> tuple[int, str]:
    done = subprocess.run(
        # Under make test, which hands its own level on, make would say where it is.
        ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *variables],
        cwd=shards.ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.stdout == "" and len(said) == 1, (done.stdout, done.stderr)
    return done.returncode, said[0]


def test_without_a_gpu():
    assert make("SHARD=1") == (2, "gpu-test: there is no GPU here")
    assert make() == (2, "gpu-test: there is no GPU here")


@pytest.mark.parametrize("shard", ("0", str(len(shards.SHARDS) + 1), "x", "1x"))
def test_a_shard_that_is_none(shard):
    code, line = make(f"SHARD={shard}")
    assert code == 2 and line == f"gpu-test: SHARD={shard}: not one of 1 to {len(shards.SHARDS)}"


def test_a_python_without_a_package(monkeypatch):
    monkeypatch.setattr(shards, "NEEDED", ("nowhere",))
    assert "nowhere is not installed" in shards.missing()


def test_a_python_without_the_plugin(monkeypatch):
    monkeypatch.setattr(shards, "entry_points", lambda group: ())
    assert "the plugin is not installed" in shards.missing()


def test_servers_run_this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "theirs")
    paths = shards.environment()["PYTHONPATH"].split(os.pathsep)
    assert [Path(path).name for path in paths] == ["python", "theirs"]
