"""One SGLang source tree: an installed package, a checkout, or an unpacked wheel."""

import contextlib
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inkling_sconv.errors import UserError
from inkling_sconv.names import BACKEND_MODULE, REFRESH

BACKEND = Path(*BACKEND_MODULE.split(".")).with_suffix(".py")


class TreeError(UserError):
    """No SGLang tree was found, or the command cannot use it."""


class AbsentError(TreeError):
    """The SGLang tree has no Inkling backend."""


@dataclass(frozen=True)
class Tree:
    """``root`` is the folder to put on ``PYTHONPATH``: it holds the package ``sglang``."""

    root: Path

    @property
    def backend(self) -> Path:
        """The file that defines the refresh; a fork may have moved it.

        Raises:
            AbsentError: no file defines it.
            TreeError: several files do, or its name is that of something else than a file.
        """
        usual = self.root / BACKEND
        # To read a FIFO, or to import it, would wait for ever.
        if usual.is_file():
            return usual
        if os.path.lexists(usual):
            raise TreeError(f"{usual}: not a regular file")
        source = self.root / "sglang" / "srt"
        needle = f"def {REFRESH}(".encode()
        files = (path for path in sorted(source.rglob("*.py")) if path.is_file())
        found = [path for path in files if needle in path.read_bytes()]
        if len(found) == 1:
            return found[0]
        names = ", ".join(str(path.relative_to(self.root)) for path in found)
        if found:
            raise TreeError(f"{self.root}: {REFRESH} is in several files: {names}")
        raise AbsentError(
            f"{self.root}: no file defines {REFRESH}; this SGLang has no Inkling backend"
        )


def find_tree(path: Path | None) -> Tree:
    """Find the tree at ``path``: a checkout, a folder with ``sglang`` in it, or ``sglang``.

    Without ``path``, it is the SGLang that this Python would import.

    Raises:
        TreeError: there is no SGLang.
    """
    if path is None:
        # This does not import SGLang.
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise TreeError("SGLang is not installed for this Python; name a TREE")
        return Tree(Path(spec.submodule_search_locations[0]).parent)
    if not path.exists():
        raise TreeError(f"{path}: no such file or folder")
    path = path.absolute()
    for root in (path, path / "python", path.parent):
        package = root / "sglang"
        if (package / "srt").is_dir() and (root != path.parent or package == path):
            return Tree(root)
    raise TreeError(f"{path}: no SGLang here (looked for sglang/srt and python/sglang/srt)")


@contextlib.contextmanager
def open_tree(path: Path | None) -> Iterator[Tree]:
    """Find a tree, or unpack a wheel into a temporary folder for as long as the block runs."""
    if path is None or path.suffix != ".whl":
        yield find_tree(path)
        return
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        if path.exists() and not path.is_file():
            raise TreeError(f"{path}: not a regular file")
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        except Exception as error:
            # A damaged or encrypted archive raises errors of many kinds.
            raise TreeError(f"{path}: cannot read the wheel ({error})") from None
        try:
            yield find_tree(Path(folder))
        except TreeError as error:
            raise type(error)(str(error).replace(folder, str(path))) from None
