"""One file replaced by another text, all or nothing, and taken back byte for byte.

What was there before is kept beside the file, or in the git directory of the checkout that tracks
it. It is safe on disk before the file is touched: a crash at any point leaves the old file or the
new one.
"""

from __future__ import annotations

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
    """The file was not touched."""


def replace_file(path: Path, before: bytes, after: bytes) -> None:
    """Replace ``before`` by ``after`` in ``path``, and keep ``before`` for ``restore_file``.

    Mode and owner stay.

    Raises:
        ReplaceError: the file is a link, cannot be written, holds something else than ``before``,
            or another run is at work on it.
    """
    with _locked(path):
        if path.read_bytes() != before:
            raise ReplaceError(f"{path}: changed while this was at work; run it again")
        record = json.dumps({"file": path.name, "after": _digest(after)}).encode()
        kept = _kept(path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_file(kept, record + b"\n" + before)
        write_file(path, after, like=path)


def restore_file(path: Path) -> bool:
    """Put back what ``replace_file`` found in ``path``; False if the file holds that already.

    Raises:
        ReplaceError: nothing is kept for this file, or it was edited after ``replace_file``.
    """
    with _locked(path):
        kept = _kept(path)
        try:
            head, _, before = kept.read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise ReplaceError(f"{path}: was not written by apply; nothing to take back") from None
        now = path.read_bytes()
        if now != before and _digest(now) != json.loads(head)["after"]:
            raise ReplaceError(
                f"{path}: edited after apply; left as it is. The text before apply is in {kept}, "
                "after its first line"
            )
        if now != before:
            write_file(path, before, like=path)
        _temporary(path).unlink(missing_ok=True)
        kept.unlink()
        return now != before


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's folder; turn what the system refuses into one line."""
    if path.is_symlink():
        raise ReplaceError(f"{path}: is a link to {path.resolve()}; name the tree that holds that")
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
    """Write a whole file or none of it, with the mode and owner of ``like``.

    Raises:
        OSError: what the system says; ``path`` is as it was.
    """
    # A fixed name: what a killed run left is overwritten by the next one. The lock allows it.
    temporary = _temporary(path)
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


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.inkling-sconv.new")


def _kept(path: Path) -> Path:
    """Where the text before is kept: out of sight of ``git status`` where git tracks the file."""
    checkout = git.find_checkout(path)
    if checkout is None:
        return path.with_name(f".{path.name}.inkling-sconv.before")
    folder = git.read_line(
        checkout, "rev-parse", "--path-format=absolute", "--git-path", "inkling-sconv"
    )
    return Path(folder) / f"{_digest(os.fsencode(path.resolve()))[:16]}.before"


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
