"""Replacing a file and restoring it: all or nothing, whatever happens in between."""

import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from inkling_sconv.trees.replacement import ReplaceError, replace_file, restore_file

OLD, NEW = b"old\r\n\xff\xfe" * 50, b"new\n" * 70
BACKUP = ".backend.py.inkling-sconv.before"


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@b")
    return subprocess.check_output(["git", "-C", str(folder), *author, *arguments], text=True)


def list_names(file: Path) -> list[str]:
    return sorted(path.name for path in file.parent.iterdir())


@pytest.fixture(params=("tracked", "untracked", "outside"))
def where(request):
    """Whether git tracks the file, only sees it, or is not there."""
    return request.param


@pytest.fixture
def file(where, tmp_path) -> Path:
    path = tmp_path / "package" / "backend.py"
    path.parent.mkdir()
    path.write_bytes(OLD)
    path.chmod(0o750)
    if where != "outside":
        git(tmp_path, "init", "-q")
    if where == "tracked":
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "base")
    return path


def test_there_and_back(file, where):
    def read_owner() -> tuple[int, ...]:
        status = file.stat()
        return status.st_mode, status.st_uid, status.st_gid

    if os.geteuid() == 0:
        os.chown(file, 12345, 54321)
    owner = read_owner()
    replace_file(file, OLD, NEW)
    assert file.read_bytes() == NEW and read_owner() == owner
    if where == "tracked":
        assert list_names(file) == [file.name]
        assert git(file.parent, "status", "--porcelain") == " M package/backend.py\n"
    else:
        assert list_names(file) == [BACKUP, file.name]
    assert restore_file(file) is True
    assert file.read_bytes() == OLD and read_owner() == owner and list_names(file) == [file.name]
    with pytest.raises(ReplaceError, match="nothing to take back"):
        restore_file(file)


def test_edited_afterwards(file):
    replace_file(file, OLD, NEW)
    file.write_bytes(NEW + b"more")
    with pytest.raises(ReplaceError, match="edited after apply") as caught:
        restore_file(file)
    assert file.read_bytes() == NEW + b"more"
    backup = Path(str(caught.value).split(" is in ")[1].split(", after")[0])
    assert backup.read_bytes().partition(b"\n")[2] == OLD
    file.write_bytes(NEW)
    assert restore_file(file) and file.read_bytes() == OLD
    # Put back by hand: only the backup goes.
    replace_file(file, OLD, NEW)
    file.write_bytes(OLD)
    assert restore_file(file) is False and list_names(file) == [file.name]


@pytest.mark.parametrize("obstacle", ("lock", "link"))
def test_refuses(file, obstacle):
    folder = os.open(file.parent, os.O_RDONLY)
    path, reason = file, "another run is at work"
    if obstacle == "lock":
        fcntl.flock(folder, fcntl.LOCK_EX)
    else:
        path, reason = file.parent.parent / "link.py", r"is a link to .*backend\.py"
        path.symlink_to(file)
    for action in (lambda: replace_file(path, OLD, NEW), lambda: restore_file(path)):
        with pytest.raises(ReplaceError, match=reason):
            action()
    assert file.read_bytes() == OLD and list_names(file) == [file.name]
    os.close(folder)
    # Neither a refusal nor a run keeps the lock.
    with pytest.raises(ReplaceError, match="changed meanwhile"):
        replace_file(file, OLD + b"not this", NEW)
    replace_file(file, OLD, NEW)
    assert restore_file(file)


@pytest.mark.parametrize("number", (1, 2))
@pytest.mark.parametrize(("owner", "denied"), ((Path, "open"), (os, "fsync"), (Path, "replace")))
def test_a_tree_that_cannot_be_written(file, owner, denied, number, monkeypatch):
    original, calls = getattr(owner, denied), []

    def refuse(*arguments: Any, **more: Any) -> Any:
        # Root may write where the mode says no, so the test refuses for the system.
        if denied == "open" and "wb" not in arguments:
            return original(*arguments, **more)
        calls.append(arguments)
        # A text is synced, and then its folder.
        if len(calls) == (number * 2 - 1 if denied == "fsync" else number):
            raise PermissionError(13, "Permission denied", str(file))
        return original(*arguments)

    monkeypatch.setattr(owner, denied, refuse)
    with pytest.raises(ReplaceError, match=r"not written \(Permission denied[^\n]*\)$"):
        replace_file(file, OLD, NEW)
    monkeypatch.undo()
    assert file.read_bytes() == OLD and {*list_names(file)} <= {file.name, BACKUP}
    replace_file(file, OLD, NEW)
    assert restore_file(file) and file.read_bytes() == OLD


@pytest.mark.parametrize("where", ("tracked",), indirect=True)
def test_the_index_and_other_worktrees_stay(file, tmp_path):
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "other"))
    other = tmp_path / "other" / "package" / file.name
    file.write_bytes(staged := OLD + b"staged")
    git(tmp_path, "add", "package")
    index = git(tmp_path, "ls-files", "--stage")
    replace_file(file, staged, NEW)
    replace_file(other, OLD, NEW + b"other")
    assert git(tmp_path, "ls-files", "--stage") == index
    assert git(other.parent, "status", "--porcelain") == " M package/backend.py\n"
    assert restore_file(file) and restore_file(other)
    assert git(tmp_path, "ls-files", "--stage") == index
    assert file.read_bytes() == staged and other.read_bytes() == OLD


# ------------------------------------------------------------------------------------- kills

CALLS = {
    "open",
    "write",
    "flush",
    "fsync",
    "fchmod",
    "replace",
    "flock",
    "close",
    "mkdir",
    "unlink",
}
Kill = tuple[int, str, str]
"""Where a run dies: the number of the file-system call, its name, and before, half-way or after."""


def list_calls(action: Callable[[], Any], kill: Kill | None = None) -> list[Kill]:
    """Run ``action``, list before and after each file-system call, and die at ``kill``."""
    places: list[Kill] = []
    count = 0

    def watch(frame: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if not event.startswith("c_") or function.__name__ not in CALLS:
            return
        owner, modules = function.__self__, ("posix", "fcntl", "_io", "io")
        if not isinstance(owner, io.IOBase) and getattr(owner, "__name__", "") not in modules:
            return
        # What git does is git's to keep whole.
        if Path(frame.f_code.co_filename).name == "subprocess.py":
            return
        count += event == "c_call"
        places.append((count, function.__name__, "before" if event == "c_call" else "after"))
        if kill == (count, "write", "half"):
            file, text = frame.f_locals["file"], frame.f_locals["text"]
            file.write(text[: len(text) // 2])
            file.flush()
        if kill in (places[-1], (count, "write", "half")):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return places + [(n, name, "half") for n, name, _ in places if name == "write"]


def run_and_kill(action: Callable[[], Any], kill: Kill) -> None:
    """Run ``action`` in a child process that dies at ``kill``."""
    if (child := os.fork()) == 0:
        try:
            list_calls(action, kill)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), kill


@pytest.mark.parametrize("operation", ("replace", "restore"))
@pytest.mark.parametrize("where", ("tracked", "outside"), indirect=True)
def test_killed_at_every_call(file, operation, tmp_path):
    def prepare() -> None:
        (file.parent / BACKUP).unlink(missing_ok=True)
        shutil.rmtree(tmp_path / ".git/inkling-sconv", ignore_errors=True)
        file.write_bytes(OLD)
        if operation == "restore":
            replace_file(file, OLD, NEW)

    def act() -> None:
        replace_file(file, OLD, NEW) if operation == "replace" else restore_file(file)

    prepare()
    calls, held = set(), set()
    for kill in sorted({*list_calls(act)}):
        prepare()
        run_and_kill(act, kill)
        calls.add(kill[1])
        held.add(file.read_bytes())
        # Whatever the killed run left, a revert, an apply and a revert work.
        try:
            restore_file(file)
        except ReplaceError as error:
            assert "nothing to take back" in str(error), kill
        assert file.read_bytes() == OLD, kill
        replace_file(file, OLD, NEW)
        assert restore_file(file) and file.read_bytes() == OLD, kill
        assert file.stat().st_mode & 0o777 == 0o750 and list_names(file) == [file.name], kill
    assert calls >= CALLS - {"mkdir", "unlink"} and held == {OLD, NEW}
    assert ("unlink" in calls) == (operation == "restore")
