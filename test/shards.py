"""The tests that need a GPU, in parts of at most 8 minutes: ``python test/shards.py [K]``.

It runs with any Python that has SGLang; JUnit files, figures and server logs go to
``INKLING_SCONV_LOGS``. All at once, the soak runs beside the others, and takes 9 minutes. A part
whose JUnit file is there and green is not run again, unless the tests, the package or SGLang have
changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INKLING = "test/registered/inkling"
MTP, PREFILL = (f"{INKLING}/test_inkling_{name}.py" for name in ("mtp", "prefill_graph"))
# With the seconds that they took on one H200, beside part 5, FA4's kernels cached on disk. Each
# class starts a server, or two; those of a part run at once, and a server takes little of the GPU.
SHARDS: dict[int, tuple[str, ...]] = {
    # 84
    1: (f"{INKLING}/test_inkling_refresh_capture.py", "test/gpu"),
    # 164
    2: (
        f"{MTP}::TestCrashingFork",
        f"{MTP}::TestCrashingForkWithPlugin",
        f"{MTP}::TestCrashingForkApplied",
        f"{MTP}::TestInstalled",
        f"{MTP}::TestDraftExtendForms",
    ),
    # 137
    3: (
        f"{MTP}::TestLazy",
        f"{PREFILL}::TestExtraBuffer",
        f"{PREFILL}::TestExtraBufferLazy",
        f"{PREFILL}::TestWithoutFixes",
        f"{PREFILL}::TestNgram",
        f"{PREFILL}::TestNgramWithoutFixes",
        f"{PREFILL}::TestCrashingForkWithPlugin",
    ),
    # 164
    4: (
        f"{MTP}::TestFast",
        f"{MTP}::TestWithoutFixes",
        f"{MTP}::TestWithoutDraftWindow",
        f"{MTP}::TestZeroedDraftState",
        f"{MTP}::TestWithoutBoundaryFix",
        f"{MTP}::TestMutants",
    ),
    # 521. The second class asks what the first was answered.
    5: (f"{INKLING}/test_inkling_soak.py",),
}
# Runs while the others do. It is one server, and looks at the GPU memory of that one alone; where
# the driver names no processes it cannot, and says so.
BESIDE = 5
MARK = "INKLING_SCONV_PART"
STOP_SECONDS = 60
NEEDED = (
    "aiohttp",
    "hypothesis",
    "libcst",
    "prometheus_client",
    "pytest",
    "requests",
    "sglang",
    "wrapt",
    "xdist",
)


def missing() -> str | None:
    """What this Python or machine lacks to run the tests; None if nothing."""
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed for {sys.executable}; PYTHON=... names another"
    # The servers load the plugin by its entry point, which only an installation has.
    if "inkling_sconv" not in {entry.name for entry in entry_points(group="sglang.srt.plugins")}:
        return f"the plugin is not installed: {sys.executable} -m pip install -e ."
    import torch

    return None if torch.cuda.is_available() else "there is no GPU here"


def folder_of_logs() -> Path:
    """Where JUnit files, figures and logs go; it is made."""
    logs = Path(os.environ.get("INKLING_SCONV_LOGS") or ROOT / "gpu-logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def environment() -> dict[str, str]:
    """Variables with which servers run the package of this checkout, whichever is installed."""
    paths = (str(ROOT / "python"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def subject(sglang: str, files: Iterable[Path]) -> str:
    """What a JUnit file is about: a release of SGLang, and a digest of the files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return f"sglang {sglang}, sources {digest.hexdigest()[:12]}"


def counts(junit: Path) -> tuple[str, int, int, int] | None:
    """The subject of a JUnit file, and how many tests passed, failed, were skipped.

    None if it is not there or not whole.
    """
    try:
        suites = list(ET.parse(junit).getroot().iter("testsuite"))
        tests, failures, errors, skipped = (
            sum(int(suite.get(name, 0)) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        )
    except (OSError, ET.ParseError, ValueError):
        return None
    name = suites[0].get("name", "") if suites else ""
    return name, tests - failures - errors - skipped, failures + errors, skipped


class Part:
    """One part while it runs: pytest in a process group of its own."""

    def __init__(
        self, number: int, tests: Sequence[str], about: str, logs: Path, root: Path, output: Any
    ):
        self.number = number
        self.junit = _junit(logs, number)
        self.junit.unlink(missing_ok=True)
        self.start = time.time()
        options = ("-v", f"--junit-xml={self.junit}", "-o", f"junit_suite_name={about}")
        command = [sys.executable, "-m", "pytest", *tests, *options, *_at_once(tests)]
        mark = f"{os.getpid()}-{number}"
        self.mark = f"{MARK}={mark}".encode()
        variables = {**environment(), "INKLING_SCONV_LOGS": str(logs), MARK: mark}
        if output:
            variables["INKLING_SCONV_SOAK_BESIDE"] = "1"
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            # A terminal's Ctrl-C is for us: a second one would cut pytest's own clean-up short.
            process_group=0,
        )

    def wait(self) -> bool:
        """Whether it is green, once it has ended; says so."""
        code = self.process.wait()
        after = counts(self.junit)
        said = (
            "no JUnit file"
            if after is None
            else "{} passed, {} failed, {} skipped".format(*after[1:])
        )
        # It may have ended long before it is waited for; its JUnit file is the last that it writes.
        end = self.junit.stat().st_mtime if self.junit.exists() else time.time()
        print(
            f"\nshard {self.number}: {said}, exit {code}, {end - self.start:.0f} s, {self.junit}",
            flush=True,
        )
        return code == 0 and after is not None and after[1] > 0

    def stop(self) -> None:
        """Interrupt it where it still runs, and leave none of its processes."""
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
    shards: Mapping[int, Sequence[str]], about: str, logs: Path, *, force: bool, root: Path = ROOT
) -> int:
    """Run ``shards``, those that are green already left out; 0 if all are green.

    In order, but ``BESIDE``, which starts first and writes what it prints to a file in ``logs``.
    """
    todo = []
    for number in shards:
        junit = _junit(logs, number)
        before = counts(junit)
        if not force and before is not None and before[0] == about and before[1] and not before[2]:
            print(f"shard {number}: {before[1]} passed before, {junit}; FORCE=1 runs it again")
        else:
            todo.append(number)
    beside = len(todo) > 1
    todo.sort(key=lambda number: beside and number != BESIDE)
    red = []
    with contextlib.ExitStack() as stack:
        started = []
        for number in todo:
            output, where = None, ""
            if beside and number == BESIDE:
                output = stack.enter_context((logs / f"shard-{number}.log").open("wb"))
                where = f", beside the others: {output.name}"
            print(f"shard {number}: {' '.join(shards[number])}{where}", flush=True)
            part = Part(number, shards[number], about, logs, root, output)
            stack.callback(part.stop)
            if output:
                started.append(part)
            elif not part.wait():
                red.append(number)
        red += [part.number for part in started if not part.wait()]
    if red:
        print(f"red: shard {', '.join(map(str, red))}", file=sys.stderr)
    return 1 if red else 0


def _junit(logs: Path, number: int) -> Path:
    return logs / f"shard-{number}.xml"


def _at_once(tests: Sequence[str]) -> tuple[str, ...]:
    """pytest's options to run classes each in a process of its own; none for whole files."""
    if not all("::" in test for test in tests):
        return ()
    return ("-n", str(len(tests)), "--dist", "loadscope")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shard", nargs="?", help=f"1 to {len(SHARDS)}; default: all, in order")
    parser.add_argument("--force", action="store_true", help="also what is green already")
    options = parser.parse_args(arguments)
    which = [options.shard] if options.shard else list(map(str, SHARDS))
    if not {*which} <= {*map(str, SHARDS)}:
        print(f"gpu-test: SHARD={options.shard}: not one of 1 to {len(SHARDS)}", file=sys.stderr)
        return 2
    lacking = missing()
    if lacking is not None:
        print(f"gpu-test: {lacking}", file=sys.stderr)
        return 2
    try:
        logs = folder_of_logs()
    except OSError as error:
        print(f"gpu-test: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "test").rglob("*.py")]
    about = subject(version("sglang"), sources)
    try:
        return run({int(k): SHARDS[int(k)] for k in which}, about, logs, force=options.force)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
