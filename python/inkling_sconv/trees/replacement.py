"""Replace a file by a text that is checked in its place, and restore it byte for byte.

A record keeps what the file held: in the git directory around it, or beside it. The record is on
disk before the file changes, and says whether the new text has passed its check. A crash at any
point leaves the old file or the new one, and a record that tells which.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inkling_sconv.errors import UserError, give_reason
from inkling_sconv.trees import git
from inkling_sconv.trees.folder import Folder, open_below


class ReplaceError(UserError):
    """The file could not be replaced or restored. The message says what is on disk."""


@dataclass(frozen=True)
class Record:
    """What ``replace`` wrote down: the text ``before``, the hash of the text ``after``.

    ``verified``: the check of ``after`` has passed. ``place``: where the record lies.
    """

    before: bytes
    after: str
    verified: bool
    place: Path

    def describes(self, text: bytes) -> bool:
        """Whether ``text`` is what ``replace`` wrote."""
        return _hash(text) == self.after


@contextlib.contextmanager
def lock_file(top: Path, path: Path, *, shared: bool = False) -> Iterator["LockedFile"]:
    """Lock the folder of ``path``, a file of the tree ``top``, for as long as the block runs.

    With ``shared``, others may read too, and nothing may be changed.

    Raises:
        ReplaceError: another run holds the lock.
        LinkError: the file, or a folder between it and ``top``, is a link.
    """
    with open_below(top, path.parent) as folder:
        folder.refuse_link(path.name)
        if not folder.lock(shared=shared):
            raise ReplaceError(f"{path}: another run is at work on it; wait for it")
        if not shared:
            folder.sweep()
        yield LockedFile(folder, path)


class LockedFile:
    """A file that no other run of ours changes meanwhile."""

    def __init__(self, folder: Folder, path: Path):
        self.folder, self.path = folder, path

    def read(self) -> bytes:
        """Read the file."""
        return self.folder.read(self.path.name)[0]

    def read_record(self) -> Record | None:
        """Read the record of this file, wherever it lies.

        Raises:
            ReplaceError: it is damaged.
        """
        for place in self._list_places():
            try:
                with self._open_place(place) as folder:
                    head, _, before = folder.read(place.name)[0].partition(b"\n")
            except FileNotFoundError:
                continue
            try:
                content = json.loads(head)
                if content["before"] == _hash(before):
                    return Record(before, content["after"], content["verified"] is True, place)
            except (ValueError, LookupError, TypeError):
                pass
            raise ReplaceError(
                f"{self.path}: its record is damaged; left as it is. What is left of the original "
                f"is in {place}, after its first line; put it back by hand, and delete {place}"
            )
        return None

    def replace(
        self,
        before: bytes,
        after: bytes,
        check: Callable[[], None],
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace the text ``before`` by ``after`` if ``check`` returns; else put it back.

        ``announce`` says that it is done. What cannot be said is put back too.

        The file keeps its mode and owner. Until ``check`` has returned, the record says that
        ``after`` is not verified.

        Raises:
            ReplaceError: the file cannot be written, does not hold ``before``, or ``check`` raised;
                the message says what is on disk.
        """
        now, status = self.folder.read(self.path.name)
        if now != before:
            raise ReplaceError(f"{self.path}: changed meanwhile; run it again")
        spare = None
        try:
            self._write_record(before, _hash(after), verified=False)
            # To put this back takes no room on a full disk.
            spare = self.folder.write_temporary(before, status)
            self.folder.write(self.path.name, after, status)
            check()
            if self.read() != after:
                raise ReplaceError("edited while it was checked")
            self._write_record(before, _hash(after), verified=True)
            announce()
        except BaseException as error:
            state = self._put_back(before, after, spare)
            raise ReplaceError(f"{self.path}: {state}: {give_reason(error)}") from error
        self.folder.sweep()

    def _put_back(self, before: bytes, after: bytes, spare: str | None) -> str:
        """Put the spare copy back, and say what is on disk then."""
        try:
            now, state = self.read(), "not written"
            if now == after and spare is not None:
                self.folder.rename(spare, self.path.name)
                state = "put back"
            elif now != before:
                places = " or ".join(map(str, self._list_places()))
                return f"edited meanwhile and left so, the original is in {places}"
            self.folder.sweep()
            self.forget()
        except (OSError, UserError) as error:
            return f"not verified, and not put back ({give_reason(error)}), run revert"
        return state

    def restore(self) -> bool:
        """Put back what ``replace`` found, and delete the record.

        Returns:
            False if the file holds that text already.

        Raises:
            ReplaceError: there is no record, it is damaged, or the file was edited afterwards.
        """
        record = self.read_record()
        if record is None:
            raise ReplaceError(f"{self.path}: was not written by apply; nothing to take back")
        now, status = self.folder.read(self.path.name)
        if now != record.before:
            if not record.describes(now):
                raise ReplaceError(
                    f"{self.path}: edited after apply; left as it is. The original is in "
                    f"{record.place}, after its first line"
                )
            self.folder.write(self.path.name, record.before, status)
        self.forget()
        return now != record.before

    def is_unverified(self, record: Record | None) -> bool:
        """Whether the file holds a text that ``replace`` wrote and whose check has not passed."""
        return record is not None and not record.verified and self.read() != record.before

    def approve(self, record: Record) -> None:
        """Write down that what the file holds now has passed its check."""
        self._write_record(record.before, record.after, verified=True)

    def forget(self) -> None:
        """Delete the record."""
        for place in self._list_places():
            with contextlib.suppress(FileNotFoundError), self._open_place(place) as folder:
                folder.remove(place.name)

    def _write_record(self, before: bytes, after: str, *, verified: bool) -> None:
        place, *others = self._list_places()
        content = {"before": _hash(before), "after": after, "verified": verified}
        with self._open_place(place, make=True) as folder:
            folder.write(place.name, json.dumps(content).encode() + b"\n" + before)
        for other in others:
            with contextlib.suppress(FileNotFoundError), self._open_place(other) as folder:
                folder.remove(other.name)

    def _list_places(self) -> list[Path]:
        """List where the record may lie, the place for a new one first.

        A git directory is best: ``git status`` does not show the record there. The name is that
        of the file within the checkout, which may be moved.
        """
        path = self.path.resolve()
        places = [
            folder / "inkling-sconv" / f"{_hash(os.fsencode(path.relative_to(top)))[:16]}.before"
            for top, folder in git.find_git_folders(path)
        ]
        return [*places, self.path.with_name(f".{self.path.name}.inkling-sconv.before")]

    @contextlib.contextmanager
    def _open_place(self, place: Path, *, make: bool = False) -> Iterator[Folder]:
        if place.parent == self.path.parent:
            yield self.folder
            return
        with Folder(place.parent.parent) as git_folder:
            if make:
                git_folder.make(place.parent.name, contextlib.ExitStack())
            with git_folder.open(place.parent.name) as folder:
                if make:
                    folder.sweep()
                yield folder


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
