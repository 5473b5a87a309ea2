"""Interrupt apply, revert and ci-init at any moment, and look at what they leave.

``python test/attack.py`` kills each of the three 300 times with SIGKILL and 100 times with each
other signal, at random moments, with a stand-in for the check that takes a second, and apply 10
times with the real check. It also starts 2 to 20 of them at once. Counted are files that are
neither the old nor the new text, edits that were never verified and that a later command approves,
and files outside the tree that changed.
"""

import argparse
import collections
import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import releases
from inkling_sconv import cli
from inkling_sconv.__main__ import command
from inkling_sconv.codemod.guard import add_guard
from inkling_sconv.fork_ci import copy
from inkling_sconv.trees.replacement import lock_file

COMMANDS = ("apply", "revert", "ci-init")
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HARMS = ("half-written", "approved", "outside")
FILE = Path("python") / releases.BACKEND
GUARDED = 'printf \'%s\\n\' \'{"bare": [], "backends": [{"name": "B", "state": "guarded", \
"rows": [], "setting": ""}]}\''
REFUSES = "echo 'ImportError: not this one' >&2; exit 1"


def write_check(path: Path, body: str) -> Path:
    """Write a program that answers in the place of the Python that runs the check."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=A", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True)


@dataclass
class Fork:
    """A checkout with the crashing file, links out of it under names of ours, and what they meet.

    ``real``: all of SGLang is there, so the real check runs.
    """

    folder: Path
    before: bytes
    real: bool = False
    after: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.top, self.outside = self.folder / "fork", self.folder / "outside"
        self.file, self.output = self.top / FILE, self.folder / "output"
        if self.real:
            releases.fork("0.5.18", self.before.decode(), self.top / "python")
        else:
            self.file.parent.mkdir(parents=True)
            self.file.write_bytes(self.before)
        self.outside.mkdir()
        (self.outside / "mine").write_bytes(b"mine")
        (self.top / copy.WORKFLOW).parent.mkdir(parents=True)
        for path in (self.file, self.top / copy.WORKFLOW):
            for name in (f".{path.name}.inkling-sconv.new", f".inkling-sconv-{'0' * 16}.new"):
                (path.parent / name).symlink_to(self.outside / "mine")
        git(self.top, "init", "-q")
        git(self.top, "add", "-f", str(FILE), ".github")
        git(self.top, "commit", "-qm", "base")
        self.slow = write_check(self.folder / "slow", f"sleep 1; {GUARDED}")
        self.refuses = write_check(self.folder / "refuses", REFUSES)
        # Formatted as the command formats it.
        with replaced_python(None if self.real else self.slow):
            self.after = add_guard(self.before, format_as=self.file)
        self.names = self.list_names()

    def start(self, name: str, check: Path | None) -> int:
        """Start a command in a process group of its own; return its id."""
        self.output.unlink(missing_ok=True)
        # What comes before the command begins is not the command's to handle.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[1:])
        if (child := os.fork()) == 0:
            code = 99
            try:
                os.setsid()
                # The handlers are the command's own, not those that a worker was forked with.
                for number in SIGNALS[1:]:
                    signal.signal(number, signal.SIG_DFL)
                output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
                sys.argv = ["inkling-sconv", name, str(self.top)]
                sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
                if self.real:
                    variables = releases.environment(self.top / "python", releases.CRASHING)
                    os.environ["PYTHONPATH"] = variables["PYTHONPATH"]
                with replaced_python(check):
                    command()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 98
                sys.stdout.flush()
            finally:
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
        return child

    def run(self, name: str, check: Path | None = None) -> int:
        """Run a command to its end, and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(name, check), 0)[1])

    def reset(self, name: str) -> None:
        """Make the tree what ``name`` finds when nothing went wrong before."""
        shutil.rmtree(self.top / ".git/inkling-sconv", ignore_errors=True)
        shutil.rmtree(self.top / "test", ignore_errors=True)
        (self.top / copy.WORKFLOW).unlink(missing_ok=True)
        for path in self.list_names() - self.names:
            (self.top / path).unlink()
        self.file.write_bytes(self.before)
        if name == "revert":
            with lock_file(self.top / "python", self.file) as file:
                file.replace(self.before, self.after, lambda: None)

    def list_names(self) -> set[str]:
        """List what is in the folders that are written to."""
        folders = (self.file.parent, (self.top / copy.WORKFLOW).parent, self.top / copy.TESTS)
        return {
            str(path.relative_to(self.top))
            for folder in folders
            if folder.is_dir()
            for path in folder.iterdir()
            if path.name != "__pycache__"
        }


@contextlib.contextmanager
def replaced_python(check: Path | None) -> Iterator[None]:
    python, sys.executable = sys.executable, str(check or sys.executable)
    yield
    sys.executable = python


def interrupt(fork: Fork, name: str, number: int, delay: float) -> list[str]:
    """Send a command a signal after ``delay`` seconds; return the harms found."""
    fork.reset(name)
    process = fork.start(name, None if fork.real else fork.slow)
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    said = fork.output.read_text(errors="replace") if fork.output.exists() else ""
    harms = []
    if code not in (0, 2, -number):
        harms.append(f"exit {code}: {said}")
    if name == "ci-init":
        return harms + judge_copies(fork, number, code) + judge_outside(fork)

    def look(when: str) -> bytes:
        text = fork.file.read_bytes()
        if text not in (fork.before, fork.after):
            harms.append(f"half-written: the file, {when}")
        return text

    text, verified = look("after it"), "state: guarded" in said or name == "revert"
    if number != signal.SIGKILL and text == fork.after and not verified:
        harms.append(f"approved: {signal.Signals(number).name} left an unverified edit: {said}")
    if code == 0 and text != (fork.before if name == "revert" else fork.after):
        harms.append("approved: exit 0, and the file is another")
    if fork.run("apply", fork.refuses) == 0 and not (verified and text == fork.after):
        harms.append(f"approved: {name} left it, apply took it, {said!r}")
    if look("after apply") == fork.after and not verified:
        harms.append("approved: a refused edit stays")
    fork.run("revert")
    if look("after revert") != fork.before:
        harms.append("half-written: revert leaves the edit")
    if left := fork.list_names() - fork.names:
        harms.append(f"half-written: {left}")
    return harms + judge_outside(fork)


def judge_copies(fork: Fork, number: int, code: int) -> list[str]:
    """Look at what ``ci-init`` left."""
    files = copy.read_files()
    found = [name for name in files if (fork.top / name).is_file()]
    harms = [
        f"half-written: {name}" for name in found if (fork.top / name).read_bytes() != files[name]
    ]
    if code == 0 and len(found) < len(files):
        harms.append("half-written: exit 0, and files are missing")
    if number != signal.SIGKILL and 0 < len(found) < len(files):
        harms.append(f"half-written: {len(found)} of {len(files)} files")
    return harms


def judge_outside(fork: Fork) -> list[str]:
    """Look at what the planted links lead to."""
    (path,) = fork.outside.iterdir()
    same = path.read_bytes() == b"mine"
    return [] if same else ["outside: a file that a link leads to"]


def race(fork: Fork, name: str, count: int) -> list[str]:
    """Start ``count`` runs of a command at once. One does it, and what they say is so."""
    fork.reset(name)
    codes = [
        os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        for process in [fork.start(name, fork.slow) for _ in range(count)]
    ]
    harms = [f"exit {code}" for code in codes if code not in (0, 2)]
    if 0 not in codes:
        harms.append(f"half-written: none of {count} did it: {codes}")
    if name == "ci-init":
        if codes.count(0) != 1:
            harms.append(f"approved: {codes}")
        return harms + judge_copies(fork, 0, 0) + judge_outside(fork)
    if fork.file.read_bytes() != fork.after:
        harms.append("approved: exit 0, and the file is the original")
    return harms + judge_outside(fork)


@functools.cache
def read_crashing() -> bytes:
    return releases.backend_text(releases.CRASHING).encode()


@dataclass(frozen=True)
class Job:
    """Rounds of one kind, which one worker plays on a tree of its own."""

    name: str
    number: int
    rounds: int
    seed: int
    real: bool = False

    def play(self) -> list[str]:
        draw = random.Random(self.seed)
        folder = Path(tempfile.mkdtemp(prefix="inkling-sconv-attack-"))
        try:
            fork = Fork(folder, read_crashing(), self.real)
            if not self.number:
                counts = (2,) * (self.rounds - 1) + (20,)
                return [harm for count in counts for harm in race(fork, self.name, count)]
            fork.reset(self.name)
            start = time.monotonic()
            code = fork.run(self.name, None if self.real else fork.slow)
            seconds = time.monotonic() - start
            harms = [] if code == 0 else [f"exit {code}: {fork.output.read_text()}"]
            for _ in range(self.rounds):
                harms += interrupt(fork, self.name, self.number, draw.uniform(0, 1.1 * seconds))
            return harms
        finally:
            shutil.rmtree(folder)


def list_jobs(kills: int, signals: int, real: int, races: int) -> list[Job]:
    """Cut the rounds into jobs of up to 25."""
    wanted = [
        (name, number, kills if number == signal.SIGKILL else signals, False)
        for name in COMMANDS
        for number in SIGNALS
    ]
    wanted += [("apply", number, real, True) for number in SIGNALS]
    wanted += [("ci-init", 0, races, False), ("apply", 0, min(races, 5), False)]
    jobs: list[Job] = []
    for name, number, rounds, is_real in wanted:
        for done in range(0, rounds, 25):
            jobs.append(Job(name, number, min(25, rounds - done), len(jobs), is_real))
    return jobs


def attack(jobs: Sequence[Job], workers: int) -> collections.Counter[str]:
    """Play the jobs, print a line for each kind, and count the harms; others count as ``other``."""
    total = collections.Counter(dict.fromkeys(HARMS, 0))
    rounds: collections.Counter[tuple[str, str]] = collections.Counter()
    # Imported and made once, for every process that is forked.
    assert cli.app and read_crashing()
    with ProcessPoolExecutor(workers) as pool:
        for job, harms in zip(jobs, pool.map(Job.play, jobs), strict=True):
            kind = signal.Signals(job.number).name if job.number else "at once"
            rounds[job.name, kind + (", real check" if job.real else "")] += job.rounds
            for harm in harms:
                print(f"{job.name} {kind}: {harm}", flush=True)
                total[next((h for h in HARMS if harm.startswith(h)), "other")] += 1
    for (name, kind), count in rounds.items():
        print(f"{name} {kind}: {count}")
    print(", ".join(f"{name}: {count}" for name, count in total.items()))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--real", type=int, default=10)
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    options = vars(parser.parse_args())
    workers = options.pop("workers")
    return int(attack(list_jobs(**options), workers).total() > 0)


if __name__ == "__main__":
    sys.exit(main())
