"""``make gpu-test``: the tests that need a GPU, in a Python that has SGLang and this package.

    python test/gpu_test.py [ARGUMENT ...]      # for pytest, such as -k TestInstalled

Classes that start a server run beside each other, and the soak runs beside all of them. JUnit
files, figures and server logs go to ``INKLING_SCONV_LOGS``. Exit 0: something ran, and nothing
failed; 1: something failed, or nothing ran; 2: this machine cannot run the tests.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOAK = "test/registered/inkling/test_inkling_soak.py"
# A class starts a server or two. A server takes little of an H100-class GPU and two CPU cores.
PARTS: dict[str, tuple[str, ...]] = {
    "soak": (SOAK,),
    "tests": (
        "test/unit/test_track_conv_indices.py",
        "test/unit/test_draft_conv_state.py",
        "test/gpu",
        "test/registered/inkling",
        f"--ignore={SOAK}",
        "--numprocesses=6",
        "--dist=loadscope",
    ),
}
MARK = "INKLING_SCONV_GPU_TEST"
STOP_SECONDS = 60
NEEDED = ("hypothesis", "libcst", "pytest", "requests", "sglang", "wrapt", "xdist")


class Counts(NamedTuple):
    """Tests of a JUnit file, by outcome."""

    passed: int
    failed: int
    skipped: int


def why_unavailable() -> str | None:
    """What keeps the tests from running with this Python on this machine, in one line."""
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed for {sys.executable}; PYTHON=... names another"
    # The servers load the plugin by its entry point, which only an installation has.
    if "inkling_sconv" not in {entry.name for entry in entry_points(group="sglang.srt.plugins")}:
        return f"the plugin is not installed: {sys.executable} -m pip install -e ."
    import torch

    return None if torch.cuda.is_available() else "there is no GPU here"


def make_log_folder() -> Path:
    """The folder for JUnit files, figures and logs."""
    logs = Path(os.environ.get("INKLING_SCONV_LOGS") or ROOT / "gpu-logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def make_environment() -> dict[str, str]:
    """Variables with which servers import from this checkout first."""
    paths = (str(ROOT / "python"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def count_outcomes(junit: Path) -> Counts | None:
    """How many tests of a JUnit file passed, failed, were skipped; None if it is not whole."""
    try:
        suites = list(ET.parse(junit).getroot().iter("testsuite"))
        tests, failures, errors, skipped = (
            sum(int(suite.get(name, 0)) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        )
    except (OSError, ET.ParseError, ValueError):
        return None
    return Counts(tests - failures - errors - skipped, failures + errors, skipped)


class Part:
    """One pytest while it runs, in a process group of its own."""

    def __init__(self, name: str, arguments: Sequence[str], logs: Path, root: Path, output: Any):
        self.name, self.start = name, time.monotonic()
        self.junit = logs / f"{name}.xml"
        self.junit.unlink(missing_ok=True)
        self.mark = f"{MARK}={os.getpid()}-{name}".encode()
        variables = {MARK: f"{os.getpid()}-{name}", "INKLING_SCONV_LOGS": str(logs)}
        if output:
            variables["INKLING_SCONV_SOAK_BESIDE"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-v", f"--junit-xml={self.junit}", *arguments],
            cwd=root,
            env={**make_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            # A terminal's Ctrl-C is for us: a second one would cut pytest's own clean-up short.
            process_group=0,
        )

    def wait(self) -> Counts:
        """Wait for its end, and print its outcome. A part that was cut short counts as failed."""
        code = self.process.wait()
        counts = count_outcomes(self.junit) or Counts(0, 1, 0)
        # pytest exits with 5 where no test was selected.
        if code not in (0, 1, 5):
            counts = counts._replace(failed=max(counts.failed, 1))
        said = "{} passed, {} failed, {} skipped".format(*counts)
        seconds = time.monotonic() - self.start
        print(f"\n{self.name}: {said}, exit {code}, {seconds:.0f} s, {self.junit}", flush=True)
        return counts

    def stop(self) -> None:
        """Interrupt it if it still runs, and leave none of its processes."""
        if self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        # Servers are in groups of their own, and a pytest-xdist worker may be gone before it ended
        # them. A scheduler's title overwrites its environment; the leader of its group has none.
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (process / "environ").read_bytes().split(b"\0"):
                    os.killpg(os.getpgid(int(process.name)), signal.SIGKILL)
        self.process.wait()


def run(
    parts: Mapping[str, Sequence[str]], arguments: Sequence[str], logs: Path, root: Path = ROOT
) -> int:
    """Run ``parts`` beside each other; all but the last print to a file in ``logs``.

    Returns 0 if something passed and nothing failed, else 1.
    """
    *beside, last = parts
    with contextlib.ExitStack() as stack:
        started = []
        for name in (*beside, last):
            output = None
            if name != last:
                output = stack.enter_context((logs / f"{name}.log").open("wb"))
                print(f"{name}: beside the others, {output.name}", flush=True)
            part = Part(name, (*parts[name], *arguments), logs, root, output)
            stack.callback(part.stop)
            started.append(part)
        counts = [part.wait() for part in reversed(started)]
    passed, failed = (sum(one[place] for one in counts) for place in (0, 1))
    print(f"gpu-test: {passed} passed, {failed} failed", flush=True)
    return 0 if passed and not failed else 1


def main(arguments: Sequence[str]) -> int:
    """Run everything; ``arguments`` go to pytest."""
    if (reason := why_unavailable()) is not None:
        print(f"gpu-test: {reason}", file=sys.stderr)
        return 2
    try:
        return run(PARTS, arguments, make_log_folder())
    except OSError as error:
        print(f"gpu-test: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
