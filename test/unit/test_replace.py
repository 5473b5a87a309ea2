"""One file replaced and taken back: all or nothing, whatever happens in between."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import releases
from conftest import TEST
from inkling_sconv.trees import replacement as module
from inkling_sconv.trees.replacement import ReplaceError

OLD, NEW = b"old\r\n\xff\xfe" * 50, b"new\n" * 70


def git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(folder), *arguments], text=True)


@pytest.fixture(params=("tracked", "untracked", "outside"))
def where(request):
    """Whether git tracks the file, sees it, or is not there."""
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
    return path


def test_there_and_back(file, where):
    replace(file, OLD, NEW)
    assert file.read_bytes() == NEW and file.stat().st_mode & 0o7777 == 0o750
    if where == "tracked":
        assert git(file.parent, "status", "--porcelain") == "AM package/backend.py\n"
        assert [p.name for p in file.parent.iterdir()] == [file.name]
    else:
        assert sorted(p.name for p in file.parent.iterdir()) == [
            f".{file.name}.inkling-sconv.before",
            file.name,
        ]
    assert restore(file) is True
    assert file.read_bytes() == OLD and file.stat().st_mode & 0o7777 == 0o750
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    with pytest.raises(ReplaceError, match="nothing to take back"):
        restore(file)


def test_the_owner_stays(file):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(file, 12345, 54321)
    replace(file, OLD, NEW)
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 54321)
    restore(file)
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 54321)


def test_edited_afterwards(file):
    replace(file, OLD, NEW)
    file.write_bytes(NEW + b"more")
    with pytest.raises(ReplaceError, match="edited after apply") as caught:
        restore(file)
    assert file.read_bytes() == NEW + b"more"
    # What the message names holds the text before.
    kept = Path(str(caught.value).split(" is in ")[1].split(", after")[0])
    assert kept.read_bytes().partition(b"\n")[2] == OLD
    file.write_bytes(NEW)
    assert restore(file) and file.read_bytes() == OLD


def test_put_back_by_hand(file):
    replace(file, OLD, NEW)
    file.write_bytes(OLD)
    assert restore(file) is False
    assert file.read_bytes() == OLD


def test_changed_in_between(file):
    with pytest.raises(ReplaceError, match="changed while"):
        replace(file, OLD + b"not this", NEW)
    assert file.read_bytes() == OLD and [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("action", (lambda p: replace(p, OLD, NEW), restore))
def test_a_link(file, action, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(file)
    with pytest.raises(ReplaceError, match=r"is a link to .*backend\.py"):
        action(link)
    assert link.is_symlink() and file.read_bytes() == OLD


@pytest.mark.parametrize(
    ("name", "denied"),
    [
        *(("before", call) for call in ("open", "fsync", "replace")),
        *(("backend.py", call) for call in ("open", "fchmod", "fsync", "replace")),
    ],
)
def test_a_tree_that_cannot_be_written(file, denied, name, monkeypatch):
    # Root may write where the mode says no, so the refusal is made here.
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    whole = module.write

    def write(path: Path, text: bytes, like: Path | None = None) -> None:
        if not path.name.endswith(name):
            return whole(path, text, like)
        with monkeypatch.context() as patch:
            if denied == "open":
                patch.setattr(Path, "open", lambda self, *_: refuse(self))
            elif denied == "replace":
                patch.setattr(Path, "replace", lambda self, _: refuse(self))
            else:
                patch.setattr(module.os, denied, lambda *_: refuse(path))
            return whole(path, text, like)

    monkeypatch.setattr(module, "write", write)
    with pytest.raises(ReplaceError, match=r"not written \(Permission denied") as caught:
        replace(file, OLD, NEW)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == OLD
    left = {p.name for p in file.parent.iterdir()} - {f".{file.name}.inkling-sconv.before"}
    assert left == {file.name}
    monkeypatch.undo()
    replace(file, OLD, NEW)
    assert restore(file) and file.read_bytes() == OLD


def test_two_at_once(file):
    code = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(file.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        for action in (lambda: replace(file, OLD, NEW), lambda: restore(file)):
            with pytest.raises(ReplaceError, match="another run is at work"):
                action()
        assert file.read_bytes() == OLD
    finally:
        other.communicate()
    replace(file, OLD, NEW)
    assert file.read_bytes() == NEW


def test_the_lock_is_released(file):
    with pytest.raises(ReplaceError):
        restore(file)
    folder = os.open(file.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


@pytest.mark.parametrize("where", ("tracked",), indirect=True)
def test_a_dirty_index_stays(file, tmp_path):
    git(tmp_path, "-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "base")
    (tmp_path / "staged").write_text("staged")
    (tmp_path / "loose").write_text("loose")
    git(tmp_path, "add", "staged")
    file.write_bytes(staged := OLD + b"staged too")
    git(tmp_path, "add", "package")
    index = git(tmp_path, "ls-files", "--stage")
    replace(file, staged, NEW)
    assert git(tmp_path, "ls-files", "--stage") == index
    status = {"A  staged", "MM package/backend.py", "?? loose"}
    assert set(git(tmp_path, "status", "--porcelain").splitlines()) == status
    restore(file)
    assert git(tmp_path, "ls-files", "--stage") == index
    assert file.read_bytes() == staged


@pytest.mark.parametrize("where", ("tracked",), indirect=True)
def test_a_linked_worktree(file, tmp_path):
    git(tmp_path, "-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "base")
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "other"))
    other = tmp_path / "other" / "package" / file.name
    replace(file, OLD, NEW)
    replace(other, OLD, NEW + b"other")
    assert git(other.parent, "status", "--porcelain") == " M package/backend.py\n"
    assert restore(file) and restore(other)
    assert file.read_bytes() == other.read_bytes() == OLD


@pytest.mark.parametrize("operation", ("replace", "restore"))
@pytest.mark.parametrize("where", ("tracked", "untracked"))
def test_killed_at_every_call(operation, where, tmp_path):
    command = [sys.executable, str(TEST / "crash.py"), str(tmp_path), operation, where]
    environment = {**os.environ, "PYTHONPATH": str(releases.ROOT / "python")}
    kills = json.loads(subprocess.check_output(command, env=environment))
    calls = {kill["call"] for kill in kills}
    assert calls >= {"open", "write", "fsync", "fchmod", "replace", "flock", "close"}
    assert "mkdir" in calls or operation == "restore"
    assert "unlink" in calls or operation == "replace"
    assert {kill["when"] for kill in kills} == {"before", "half", "after"}
    # Both sides of the one call that matters were seen.
    assert {kill["held"] for kill in kills} == {"old", "new"}
    for kill in kills:
        assert kill["killed"] and kill["next"] == ["old", "new", "old"], kill
        assert kill["mode"] == "0o640" and kill["left"] == [], kill


STRACE_CALLS = ("openat", "write", "fsync", "fchmod", "rename", "flock", "close", "mkdir", "unlink")


@pytest.mark.parametrize("operation", ("replace", "restore"))
def test_killed_by_strace(operation, tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    if subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace here")
    file = tmp_path / "backend.py"
    code = """
import sys
from pathlib import Path
from inkling_sconv.trees.replacement import replace_file, restore_file
path, old, new = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
# A call that no other line makes: what comes before is Python's start.
import os
os.sync()
replace(path, old, new) if sys.argv[4] == "replace" else restore(path)
"""
    command = [sys.executable, "-S", "-c", code, str(file), OLD.hex(), NEW.hex(), operation]
    environment = {
        "PATH": "",
        "PYTHONPATH": str(releases.ROOT / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(*options: str) -> subprocess.CompletedProcess[bytes]:
        for leftover in tmp_path.glob(".backend*"):
            leftover.unlink()
        file.write_bytes(OLD)
        if operation == "restore":
            replace(file, OLD, NEW)
        return subprocess.run([strace, *options, *command], env=environment, capture_output=True)

    log = tmp_path / "log"
    calls = ",".join((*STRACE_CALLS, "sync"))
    done = run("-o", str(log), "-e", f"trace={calls}")
    assert done.returncode == 0, done.stderr
    names = [line.split("(")[0] for line in log.read_text().splitlines() if "(" in line]
    start = names.index("sync")
    held = set()
    for place in range(start + 1, len(names)):
        name, when = names[place], names[: place + 1].count(names[place])
        # Where the interpreter itself is closing down, nothing is left to kill.
        inject = f"inject={name}:signal=KILL:when={when}"
        done = run("-o", os.devnull, "-e", f"trace={name}", "-e", inject)
        assert done.returncode, (name, when)
        now = file.read_bytes()
        assert now in (OLD, NEW), (name, when)
        held.add(now)
        if now == NEW:
            assert restore(file) is True
        replace(file, OLD, NEW)
        assert restore(file) and file.read_bytes() == OLD
    assert held == {OLD, NEW}
