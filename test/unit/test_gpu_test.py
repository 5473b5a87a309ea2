"""``make gpu-test`` without a GPU: what runs at once, when it is red, what an interrupt leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_test
import pytest

TESTS = {
    "passes": "def test_a(): pass\ndef test_b(): pass\n",
    "fails": "def test_a(): pass\ndef test_b(): assert 0\n",
    "skips": "import pytest\ndef test_a(): pytest.skip('needs a GPU')\n",
    "dies": "import os\ndef test_a(): os._exit(9)\n",
    "nothing": "",
    "breaks": "import nowhere\n",
}


@pytest.fixture
def run(tmp_path, capfd):
    """Run one-file parts; the exit status and what was printed."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*names: str, texts: dict[str, str] = TESTS, arguments: tuple[str, ...] = ()):
        for name in names:
            (tmp_path / f"test_{name}.py").write_text(texts[name])
        parts = {name: (f"test_{name}.py",) for name in names}
        code = gpu_test.run(parts, arguments, tmp_path, tmp_path)
        return code, "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    "names, code",
    (
        (("passes",), 0),
        (("passes", "nothing"), 0),
        (("skips", "passes"), 0),
        (("skips",), 1),
        (("nothing",), 1),
        (("fails", "passes"), 1),
        (("passes", "dies"), 1),
        (("breaks", "passes"), 1),
    ),
)
def test_green_is_something_passed_and_nothing_failed(run, names, code):
    found, printed = run(*names)
    assert found == code, printed
    assert all(f"\n{name}: " in printed for name in names)


def test_arguments_go_to_pytest(run):
    code, printed = run("passes", arguments=("-k", "test_a"))
    assert code == 0 and "passes: 1 passed" in printed


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


def test_parts_run_at_once_and_the_first_prints_to_a_file(run, tmp_path):
    pairs = (("soak", "tests"), ("tests", "soak"))
    texts = {mine: MEETS.format(mine=mine, theirs=theirs) for mine, theirs in pairs}
    code, printed = run("soak", "tests", texts=texts)
    assert code == 0 and printed.count("1 passed, 0 failed") == 2
    assert "test_soak.py::test_meets" in (tmp_path / "soak.log").read_text()
    assert "test_soak.py::test_meets" not in printed


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


def test_an_interrupt_waits_for_the_clean_up_and_leaves_no_server(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in (("one", CLEANS_UP), ("two", LEAVES_IT)):
        (tmp_path / f"test_{name}.py").write_text(text.format(name=name))
    code = f"""
import pathlib, gpu_test
folder = pathlib.Path({str(tmp_path)!r})
gpu_test.STOP_SECONDS = 5
parts = {{"one": ("test_one.py",), "two": ("test_two.py", "-n1")}}
gpu_test.run(parts, (), folder, folder)
"""
    variables = {**os.environ, "PYTHONPATH": str(gpu_test.ROOT / "test")}
    process = subprocess.Popen([sys.executable, "-c", code], env=variables, start_new_session=True)
    places = [tmp_path / "one", tmp_path / "two"]
    deadline = time.monotonic() + 60
    while not all(place.exists() and place.read_text() for place in places):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) != 0
    assert places[0].read_text() == "cleaned up"
    stat = Path("/proc") / places[1].read_text() / "stat"
    # Where process 1 is no init, a killed process stays as a zombie.
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_half_a_junit_file_is_no_result(run, tmp_path):
    run("passes")
    file = tmp_path / "passes.xml"
    assert gpu_test.count_outcomes(file) == (2, 0, 0)
    file.write_text(file.read_text()[:-30])
    assert gpu_test.count_outcomes(file) is None


def run_make(*variables: str, target: str = "gpu-test") -> tuple[int, str]:
    """Exit status and the one line of a make target that cannot run here."""
    done = subprocess.run(
        # Under make test, which hands its own level on, make would say where it is.
        ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *variables],
        cwd=gpu_test.ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.stdout == "" and len(said) == 1, (done.stdout, done.stderr)
    return done.returncode, said[0]


def test_without_a_gpu():
    assert run_make() == (2, "gpu-test: there is no GPU here")


def test_what_a_python_lacks_is_named(monkeypatch):
    monkeypatch.setattr(gpu_test, "entry_points", lambda group: ())
    assert "the plugin is not installed" in gpu_test.why_unavailable()
    monkeypatch.setattr(gpu_test, "NEEDED", ("nowhere",))
    assert "nowhere is not installed" in gpu_test.why_unavailable()
