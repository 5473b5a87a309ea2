"""Replacing a file and restoring it: all or nothing, whatever happens in between."""

import fcntl
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from inkling_sconv.errors import Interrupted, UserError
from inkling_sconv.trees.folder import Folder, write_output
from inkling_sconv.trees.replacement import LockedFile, Record, ReplaceError, lock_file

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


def replace(path: Path, before: bytes, after: bytes, check: Callable[[], object] = int) -> None:
    with lock_file(path.parents[1], path) as locked:
        locked.replace(before, after, check)


def restore(path: Path) -> bool:
    with lock_file(path.parents[1], path) as locked:
        return locked.restore()


def read_record(path: Path) -> Record | None:
    with lock_file(path.parents[1], path, shared=True) as locked:
        return locked.read_record()


def test_there_and_back(file, where):
    def read_owner() -> tuple[int, ...]:
        status = file.stat()
        return status.st_mode, status.st_uid, status.st_gid

    if os.geteuid() == 0:
        os.chown(file, 12345, 54321)
        file.chmod(0o4750)
    owner = read_owner()
    replace(file, OLD, NEW)
    assert file.read_bytes() == NEW and read_owner() == owner
    if where == "outside":
        assert list_names(file) == [BACKUP, file.name]
    else:
        assert list_names(file) == [file.name]
    if where == "tracked":
        assert git(file.parent, "status", "--porcelain") == " M package/backend.py\n"
    assert restore(file) is True
    assert file.read_bytes() == OLD and read_owner() == owner and list_names(file) == [file.name]
    with pytest.raises(ReplaceError, match="nothing to take back"):
        restore(file)


def test_edited_afterwards(file):
    replace(file, OLD, NEW)
    file.write_bytes(NEW + b"more")
    with pytest.raises(ReplaceError, match="edited after apply") as caught:
        restore(file)
    assert file.read_bytes() == NEW + b"more"
    backup = Path(str(caught.value).split(" is in ")[1].split(", after")[0])
    assert backup.read_bytes().partition(b"\n")[2] == OLD
    file.write_bytes(NEW)
    assert restore(file) and file.read_bytes() == OLD
    # Put back by hand: only the backup goes.
    replace(file, OLD, NEW)
    file.write_bytes(OLD)
    assert restore(file) is False and list_names(file) == [file.name]


@pytest.mark.parametrize("obstacle", ("lock", "link", "folder"))
def test_refuses(file, obstacle):
    folder = os.open(file.parent, os.O_RDONLY)
    path, reason = file, "another run is at work"
    if obstacle == "lock":
        fcntl.flock(folder, fcntl.LOCK_EX)
    elif obstacle == "link":
        path, reason = file.parent / "link.py", r"is a link to .*backend\.py; run it on"
        path.symlink_to(file)
    else:
        other = file.parents[1] / "other"
        other.symlink_to(file.parent)
        path, reason = other / file.name, r"is a link to .*package; run it on"
    for action in (lambda: replace(path, OLD, NEW), lambda: restore(path)):
        with pytest.raises(UserError, match=reason):
            action()
    assert file.read_bytes() == OLD
    os.close(folder)
    # Neither a refusal nor a run keeps the lock.
    with pytest.raises(ReplaceError, match="changed meanwhile"):
        replace(file, OLD + b"not this", NEW)
    replace(file, OLD, NEW)
    assert restore(file)


@pytest.mark.parametrize("name", ("open", "fsync", "replace"))
def test_a_tree_that_cannot_be_written(file, name, monkeypatch):
    """Each call that writes fails once. What was written is put back, unless that fails too."""
    original = getattr(os, name)
    for number in range(1, 20):
        calls = 0

        def refuse(*arguments: Any, number: int = number, **more: Any) -> Any:
            nonlocal calls
            # Root may write where the mode says no, so the test refuses for the system.
            if name != "open" or arguments[1] & os.O_CREAT:
                calls += 1
                if calls == number:
                    raise PermissionError(13, "Permission denied", str(file))
            return original(*arguments, **more)

        monkeypatch.setattr(os, name, refuse)
        try:
            replace(file, OLD, NEW)
        except ReplaceError as error:
            assert re.search(r"(not written|put back): [^\n]*: Permission denied$", str(error))
        else:
            break
        finally:
            monkeypatch.undo()
        assert file.read_bytes() == OLD and list_names(file) == [file.name], number
        replace(file, OLD, NEW)
        assert restore(file) and file.read_bytes() == OLD
    assert number >= 4 and file.read_bytes() == NEW


@pytest.mark.parametrize("error", (KeyboardInterrupt, Interrupted("by"), SystemExit, MemoryError))
def test_every_way_out_of_the_check_puts_it_back(file, error):
    seen: list[bool] = []

    def check() -> None:
        assert file.read_bytes() == NEW
        seen.append(read_record_of(file).verified)
        raise error

    def read_record_of(path: Path) -> Record:
        record = LockedFile(Folder(path.parent), path).read_record()
        assert record is not None and record.before == OLD
        return record

    with pytest.raises(ReplaceError, match=r": put back: "):
        replace(file, OLD, NEW, check)
    assert seen == [False] and file.read_bytes() == OLD and list_names(file) == [file.name]
    assert read_record(file) is None
    replace(file, OLD, NEW)
    assert read_record_of(file).verified


def test_a_disk_that_is_full_during_the_check(file, monkeypatch):
    def fill() -> None:
        original = os.open

        def refuse(path: Any, flags: int, *mode: Any, **more: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(28, "No space left on device", str(path))
            return original(path, flags, *mode, **more)

        monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(ReplaceError, match=r": put back: .*: No space left on device"):
        replace(file, OLD, NEW, fill)
    monkeypatch.undo()
    assert file.read_bytes() == OLD and list_names(file) == [file.name]


def test_edited_during_the_check(file):
    with pytest.raises(ReplaceError, match="edited meanwhile and left so, the original is in "):
        replace(file, OLD, NEW, lambda: file.write_bytes(b"mine"))
    assert file.read_bytes() == b"mine"
    record = read_record(file)
    assert record is not None and record.before == OLD and not record.verified


def test_the_lock_is_held_through_the_check(file):
    def try_another() -> None:
        for shared in (False, True):
            with pytest.raises(ReplaceError, match="another run"):
                lock_file(file.parents[1], file, shared=shared).__enter__()

    replace(file, OLD, NEW, try_another)
    assert file.read_bytes() == NEW


@pytest.mark.parametrize("where", ("tracked",), indirect=True)
def test_the_index_and_other_worktrees_stay(file, tmp_path):
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "other"))
    other = tmp_path / "other" / "package" / file.name
    file.write_bytes(staged := OLD + b"staged")
    git(tmp_path, "add", "package")
    index = git(tmp_path, "ls-files", "--stage")
    replace(file, staged, NEW)
    replace(other, OLD, NEW + b"other")
    assert git(tmp_path, "ls-files", "--stage") == index
    assert git(other.parent, "status", "--porcelain") == " M package/backend.py\n"
    assert restore(file) and restore(other)
    assert git(tmp_path, "ls-files", "--stage") == index
    assert file.read_bytes() == staged and other.read_bytes() == OLD


# -------------------------------------------------------------------------- where the record is


def move(file: Path, _: Any) -> Path:
    """Move the whole checkout."""
    moved = file.parents[1].with_name(f"{file.parents[1].name}-moved")
    file.parents[1].rename(moved)
    return moved / "package" / file.name


def forget(file: Path, _: Any) -> None:
    git(file.parent, "rm", "-q", "--cached", file.name)


def lose_git(_: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def run_in_a_hook(_: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")


def give_away(file: Path, _: Any) -> None:
    for path in (file, *file.parents[1].rglob("*"), file.parents[1]):
        os.chown(path, 12345, 54321)


def init_again(file: Path, _: Any) -> None:
    git(file.parent, "init", "-q")


@pytest.mark.parametrize(
    "change",
    (move, forget, lose_git, run_in_a_hook, give_away, init_again),
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("order", ("before", "after"))
def test_revert_finds_what_apply_wrote(file, where, change, order, monkeypatch):
    if change is forget and where != "tracked":
        pytest.skip("nothing to forget")
    if change is give_away and os.geteuid():
        pytest.skip("needs root")
    if order == "after":
        replace(file, OLD, NEW)
    file = change(file, monkeypatch) or file
    if order == "before":
        replace(file, OLD, NEW)
        monkeypatch.undo()
    assert restore(file) and file.read_bytes() == OLD
    assert read_record(file) is None


@pytest.mark.parametrize("damage", (b"", b"{}\n", b"[]\n", b"cut", b"\xff\n", "link", "fifo"))
def test_a_damaged_record(file, damage):
    replace(file, OLD, NEW)
    record = read_record(file)
    assert record is not None
    whole = record.place.read_bytes()
    record.place.unlink()
    if damage == "link":
        record.place.symlink_to(file)
    elif damage == "fifo":
        os.mkfifo(record.place)
    else:
        record.place.write_bytes(whole[:-5] if damage == b"cut" else damage + OLD)
    lost = r"its record is damaged; left as it is\. What is left of the original is in /"
    reason = {"link": "is a link to", "fifo": "Not a regular file"}.get(damage, lost)
    for action in (restore, read_record):
        with pytest.raises((UserError, OSError), match=reason) as caught:
            action(file)
        assert "\n" not in str(caught.value) and str(record.place) in str(caught.value)
    assert file.read_bytes() == NEW


# --------------------------------------------------------------------------- what is a link


def test_nothing_is_written_through_a_link(file, where, tmp_path_factory):
    """Whatever name a repository plants, what it leads to stays."""
    outside = tmp_path_factory.mktemp("outside") / "target"
    outside.write_bytes(b"mine")
    names = [".backend.py.inkling-sconv.new", f".inkling-sconv-{'0' * 16}.new"]
    for name in names:
        (file.parent / name).symlink_to(outside)
    replace(file, OLD, NEW)
    assert restore(file) and outside.read_bytes() == b"mine"
    assert all((file.parent / name).is_symlink() for name in names)
    if where == "outside":
        (file.parent / BACKUP).symlink_to(outside)
        replace(file, OLD, NEW)
        assert not (file.parent / BACKUP).is_symlink()
    else:
        folder = file.parents[1] / ".git/inkling-sconv"
        folder.rmdir()
        folder.symlink_to(outside.parent)
        with pytest.raises(UserError, match="is a link to"):
            replace(file, OLD, NEW)
    assert outside.read_bytes() == b"mine" and [*outside.parent.iterdir()] == [outside]


@pytest.mark.parametrize("mode", (0o600, 0o444))
def test_an_output_that_is_a_file(tmp_path, mode):
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    write_output(link, b"new")
    assert path.read_bytes() == b"new" and link.is_symlink()
    path.chmod(mode)
    inode = path.stat().st_ino
    with nullcontext() if mode == 0o600 else pytest.raises(PermissionError, match="read-only"):
        write_output(link, b"newer")
    assert path.stat().st_mode & 0o777 == mode and link.is_symlink()
    assert path.read_bytes() == (b"newer" if mode == 0o600 else b"new")
    assert (path.stat().st_ino == inode) == (mode == 0o444)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "out"]


def test_an_output_that_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_output(fifo, b"text")
    assert os.read(reader, 9) == b"text" and fifo.is_fifo()
    os.close(reader)
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_output(null, b"x")
    assert null.is_char_device() and null.is_symlink() and Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space"):
        write_output(Path("/dev/full"), b"x")
    # What a shell's redirection names.
    with (tmp_path / "gone").open("w+b") as file:
        (tmp_path / "gone").unlink()
        write_output(Path(f"/dev/fd/{file.fileno()}"), b"text")
        assert file.seek(0) == 0 and file.read() == b"text"


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
        passed.unlink(missing_ok=True)
        if operation == "restore":
            replace(file, OLD, NEW, passed.touch)

    def act() -> None:
        replace(file, OLD, NEW, passed.touch) if operation == "replace" else restore(file)

    passed = tmp_path / "passed"
    prepare()
    calls, held = set(), set()
    for kill in sorted({*list_calls(act)}):
        prepare()
        run_and_kill(act, kill)
        calls.add(kill[1])
        held.add(file.read_bytes())
        record = read_record(file)
        assert file.read_bytes() == OLD or record is not None, kill
        assert record is None or not record.verified or passed.exists(), kill
        # Whatever the killed run left, a revert, an apply and a revert work.
        try:
            restore(file)
        except ReplaceError as error:
            assert "nothing to take back" in str(error), kill
        assert file.read_bytes() == OLD, kill
        replace(file, OLD, NEW)
        assert restore(file) and file.read_bytes() == OLD, kill
        assert file.stat().st_mode & 0o777 == 0o750 and list_names(file) == [file.name], kill
    assert calls >= CALLS - {"mkdir"} and held == {OLD, NEW}
