"""``replace`` or ``restore``, killed before, in and after every file-system call that it makes.

``python test/crash.py FOLDER replace|restore tracked|untracked`` prints JSON: what the file held
after each kill, and what the next runs made of it. Calls are wrapped where the module finds them,
so it runs where strace does not.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inkling_sconv.trees.replacement import ReplaceError

OLD, NEW = b"old\r\n" * 100, b"new\n" * 120
SYSTEM = (
    (os, ("open", "close", "fsync", "fchmod", "fchown", "mkdir", "rename", "replace", "unlink")),
    (io, ("open",)),
    (fcntl, ("flock",)),
)


class _File:
    """A file whose writes are calls too; a write can be cut in half."""

    def __init__(self, file: Any, called: Callable[..., Any]):
        self.file, self.called = file, called

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        self.called("close", self.file.close)

    def write(self, text: bytes) -> int:
        def half() -> None:
            self.file.write(text[: len(text) // 2])
            self.file.flush()

        return self.called("write", self._whole, text, half=half)

    def _whole(self, text: bytes) -> int:
        count = self.file.write(text)
        self.file.flush()
        return count


def trace(action: Callable[[], Any], kill_at: tuple[int, str] | None = None) -> list[str]:
    """The calls of ``action`` in order; this process dies at ``kill_at``: which, and when."""
    calls: list[str] = []

    def called(name: str, function: Callable[..., Any], *args: Any, half: Any = None, **kw: Any):
        number = len(calls)
        calls.append(name)
        if kill_at == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kill_at == (number, "half") and half is not None:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*args, **kw)
        finally:
            if kill_at == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(module: Any, name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def call(*args: Any, **kw: Any) -> Any:
            result = called(name, original, *args, **kw)
            return _File(result, called) if module is io else result

        return call

    saved = [(module, name, getattr(module, name)) for module, names in SYSTEM for name in names]
    # Running git opens files of its own; what it writes is git's to keep whole.
    run = subprocess.run

    def bare(*args: Any, **kw: Any) -> Any:
        patched = [(module, name, getattr(module, name)) for module, name, _ in saved]
        for module, name, original in saved:
            setattr(module, name, original)
        try:
            return run(*args, **kw)
        finally:
            for module, name, wrapper in patched:
                setattr(module, name, wrapper)

    for module, name, _ in saved:
        setattr(module, name, wrapped(module, name))
    subprocess.run = bare  # type: ignore[assignment]
    try:
        action()
    finally:
        for module, name, original in saved:
            setattr(module, name, original)
        subprocess.run = run
    return calls


def kills(folder: Path, operation: str, tracked: bool) -> Iterator[dict[str, Any]]:
    file = folder / "backend.py"

    def prepare() -> None:
        for leftover in folder.glob(".backend*"):
            leftover.unlink()
        for leftover in folder.glob(".git/inkling-sconv/*"):
            leftover.unlink()
        if (folder / ".git/inkling-sconv").exists():
            (folder / ".git/inkling-sconv").rmdir()
        file.write_bytes(OLD)
        file.chmod(0o640)
        if operation == "restore":
            replace(file, OLD, NEW)

    def action() -> None:
        replace(file, OLD, NEW) if operation == "replace" else restore(file)

    if tracked:
        file.write_bytes(OLD)
        for arguments in ("init -q", "add backend.py"):
            subprocess.run(["git", "-C", str(folder), *arguments.split()], check=True)
    prepare()
    calls = trace(action)
    for number, name in enumerate(calls):
        for when in ("before", "half", "after") if name == "write" else ("before", "after"):
            prepare()
            if (child := os.fork()) == 0:
                trace(action, (number, when))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            held = _held(file)
            yield {
                "call": name,
                "when": when,
                "killed": os.WIFSIGNALED(status),
                "held": held,
                "next": _recover(file, held),
                "mode": oct(file.stat().st_mode & 0o777),
                "left": sorted(p.name for p in folder.glob(".backend*")),
            }


def _held(file: Path) -> str:
    return {OLD: "old", NEW: "new"}.get(file.read_bytes(), "broken")


def _recover(file: Path, held: str) -> list[str]:
    """What the file holds after a revert, an apply, and a revert that follow the kill."""
    seen = []
    try:
        restore(file)
    except ReplaceError as error:
        # Killed before anything was kept, or after all was put back.
        if "nothing to take back" not in str(error):
            raise
    seen.append(_held(file))
    replace(file, OLD, NEW)
    seen.append(_held(file))
    restore(file)
    seen.append(_held(file))
    return seen


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps(list(kills(place, sys.argv[2], sys.argv[3] == "tracked"))))
