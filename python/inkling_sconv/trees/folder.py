"""Files of an opened folder: written whole or not at all, and never through a link."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from inkling_sconv.errors import UserError

_TEMPORARY = re.compile(r"\.inkling-sconv-[0-9a-f]{16}\.new")


class LinkError(UserError):
    """A name inside a tree is a link, where only a file or a folder of the tree will do."""


class Folder:
    """A folder by its descriptor: what its path becomes later does not matter.

    Every method raises ``OSError`` with the path if the system refuses.
    """

    def __init__(self, path: Path, parent: "Folder | None" = None):
        """Open ``path``; if ``parent`` is given, as a name in it that must not be a link."""
        self.path = path
        if parent is None:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with _naming(path):
            try:
                self.descriptor = os.open(path.name, flags, dir_fd=parent.descriptor)
            except NotADirectoryError:
                parent.refuse_link(path.name)
                raise

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def open(self, name: str) -> "Folder":
        """Open the folder ``name`` in this one."""
        return Folder(self.path / name, self)

    def make(self, name: str, undo: contextlib.ExitStack) -> None:
        """Make the folder ``name``, unless there is something of that name.

        ``undo`` gets the removal of what is made, before it is made.
        """
        if not self.has(name):
            undo.callback(self.remove_folder, name)
            with _naming(self.path / name):
                os.mkdir(name, dir_fd=self.descriptor)

    def has(self, name: str) -> bool:
        """Whether there is anything of that name, a link to nowhere included."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def lock(self, *, shared: bool = False) -> bool:
        """Lock the folder until it is closed; False if another process has locked it."""
        try:
            with _naming(self.path):
                fcntl.flock(
                    self.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
                )
        except BlockingIOError:
            return False
        return True

    def refuse_link(self, name: str) -> None:
        """Raise ``LinkError`` if ``name`` is a link."""
        with contextlib.suppress(OSError):
            target = os.readlink(name, dir_fd=self.descriptor)
            path = self.path / name
            raise LinkError(
                f"{path}: is a link to {path.parent / target}; run it on the tree of that"
            )

    def read(self, name: str) -> tuple[bytes, os.stat_result]:
        """Read the regular file ``name``."""
        self.refuse_link(name)
        # A FIFO that nobody writes to would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

        def opener(name: str, _: int) -> int:
            return os.open(name, flags, dir_fd=self.descriptor)

        with _naming(self.path / name), open(name, "rb", opener=opener) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")
            return file.read(), status

    def write(self, name: str, text: bytes, like: os.stat_result | None = None) -> None:
        """Write ``text`` as the file ``name``, or leave what is there.

        Args:
            name: a link of this name is replaced, and not followed.
            text: the whole file.
            like: the file gets this mode and owner. Default: those of any new file.
        """
        temporary = self.write_temporary(text, like)
        try:
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise

    def write_new(self, name: str, text: bytes, undo: contextlib.ExitStack) -> None:
        """Write ``text`` as the new file ``name``.

        ``undo`` gets the removal of this very file, before it has its name.

        Raises:
            FileExistsError: there is something of that name.
        """
        temporary = self.write_temporary(text)
        folder = self.descriptor
        try:
            inode = os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_ino
            undo.callback(self.remove, name, inode)
            with _naming(self.path / name):
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        finally:
            self.remove(temporary)

    def write_temporary(self, text: bytes, like: os.stat_result | None = None) -> str:
        """Write ``text`` under a fresh name, which ``sweep`` would remove; return the name."""
        name = f".inkling-sconv-{secrets.token_hex(8)}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with _naming(self.path / name):
                descriptor = os.open(name, flags, 0o666, dir_fd=self.descriptor)
                with open(descriptor, "wb") as file:
                    if like is not None:
                        os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
                        if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                            os.fchown(descriptor, like.st_uid, like.st_gid)
                            # A change of owner clears set-user-ID.
                            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
                    file.write(text)
                    file.flush()
                    os.fsync(descriptor)
        except BaseException:
            self.remove(name)
            raise
        return name

    def rename(self, old: str, new: str) -> None:
        """Give the file ``old`` the name ``new``, whatever has it."""
        with _naming(self.path / new):
            folder = self.descriptor
            os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def remove(self, name: str, inode: int | None = None) -> None:
        """Remove the file ``name``, if it is there, and has ``inode`` where that is given."""
        with contextlib.suppress(FileNotFoundError), _naming(self.path / name):
            folder = self.descriptor
            found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
            if inode in (None, found):
                os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str) -> None:
        """Remove the folder ``name`` if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.descriptor)

    def sweep(self) -> None:
        """Remove what killed runs left. The caller has the lock."""
        for name in filter(_TEMPORARY.fullmatch, os.listdir(self.descriptor)):
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                self.remove(name)


@contextlib.contextmanager
def open_below(top: Path, folder: Path) -> Iterator[Folder]:
    """Open ``folder``, which is ``top`` or below it; no name below ``top`` may be a link.

    Raises:
        LinkError: one is.
    """
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(Folder(top))
        for name in folder.relative_to(top).parts:
            opened = stack.enter_context(opened.open(name))
        yield opened


def write_output(path: Path, text: bytes) -> None:
    """Write what a user asked for to the path that the user named; a link is followed.

    A regular file is written whole or not at all, and keeps its mode and owner. A device or a FIFO
    is written to.

    Raises:
        OSError: it is a folder, or cannot be written.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    target = path.resolve()
    # A link in /proc/self/fd can lead to a file that has no name any more.
    named = status is None or (target.exists() and os.path.samestat(target.stat(), status))
    if status is not None and not (stat.S_ISREG(status.st_mode) and named):
        with path.open("wb") as file:
            file.write(text)
        return
    if status is not None and not status.st_mode & 0o222:
        raise PermissionError(errno.EACCES, "It is read-only", str(path))
    with Folder(target.parent) as folder:
        folder.write(target.name, text, status)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the whole path into an error of the system, which knows only a name in a folder."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
