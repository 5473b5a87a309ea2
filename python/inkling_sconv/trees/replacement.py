"""Replace a file, all or nothing, and restore it byte for byte.

The backup lies beside the file, or in the git directory of the checkout that tracks the file. It is
on disk before the file changes: a crash at any point leaves the old file or the new one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from inkling_sconv.errors import UserError
from inkling_sconv.trees import git


class ReplaceError(UserError):
    """The file could not be replaced or restored. It is unchanged."""


def replace_file(path: Path, before: bytes, after: bytes) -> None:
    """Replace the text ``before`` of ``path`` by ``after``, and back ``before`` up.

    The file keeps its mode and owner.

    Raises:
        ReplaceError: the file is a link, cannot be written, does not hold ``before``, or another
            run holds its lock.
    """
    with _lock_folder(path):
        if path.read_bytes() != before:
            raise ReplaceError(f"{path}: changed meanwhile; run it again")
        record = json.dumps({"file": path.name, "after": _hash(after)}).encode()
        backup = _find_backup(path)
        backup.parent.mkdir(parents=True, exist_ok=True)
        write_file(backup, record + b"\n" + before)
        write_file(path, after, like=path)


def restore_file(path: Path) -> bool:
    """Put back what ``replace_file`` found in ``path``, and delete the backup.

    Returns:
        False if the file holds that text already.

    Raises:
        ReplaceError: there is no backup of this file, it was edited after ``replace_file``, is a
            link, cannot be written, or another run holds its lock.
    """
    with _lock_folder(path):
        backup = _find_backup(path)
        try:
            head, _, before = backup.read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise ReplaceError(f"{path}: was not written by apply; nothing to take back") from None
        now = path.read_bytes()
        if now != before:
            if _hash(now) != json.loads(head)["after"]:
                raise ReplaceError(
                    f"{path}: edited after apply; left as it is. The original is in {backup}, "
                    "after its first line"
                )
            write_file(path, before, like=path)
        _name_temporary(path).unlink(missing_ok=True)
        backup.unlink()
        return now != before


@contextlib.contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    """Lock the file's folder, and turn the system's errors into ``ReplaceError``."""
    if path.is_symlink():
        raise ReplaceError(f"{path}: is a link to {path.resolve()}; run it on the tree of that")
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ReplaceError(f"{path}: another run is at work on it; wait for it") from None
        finally:
            os.close(folder)
    except OSError as error:
        raise ReplaceError(f"{path}: not written ({error.strerror}: {error.filename})") from None


def write_file(path: Path, text: bytes, like: Path | None = None) -> None:
    """Write ``text`` as the whole file ``path``, with the mode and owner of ``like``.

    Raises:
        OSError: the file could not be written; it is as it was.
    """
    # The name is fixed, so a run overwrites what a killed one left. The lock makes that safe.
    temporary = _name_temporary(path)
    try:
        with temporary.open("wb") as file:
            if like is not None:
                status = like.stat()
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _name_temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.inkling-sconv.new")


def _find_backup(path: Path) -> Path:
    """Find the backup's place. If git tracks the file, ``git status`` does not show the backup."""
    checkout = git.find_checkout(path)
    if checkout is None:
        return path.with_name(f".{path.name}.inkling-sconv.before")
    folder = git.find_git_path(checkout, "inkling-sconv")
    return folder / f"{_hash(os.fsencode(path.resolve()))[:16]}.before"


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
