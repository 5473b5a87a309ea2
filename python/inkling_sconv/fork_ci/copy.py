"""The registered tests and a workflow, copied into a fork's checkout."""

from __future__ import annotations

import contextlib
from pathlib import Path

from inkling_sconv import __version__
from inkling_sconv.errors import UserError
from inkling_sconv.trees.replacement import write_file
from inkling_sconv.trees.tree import find_tree

WORKFLOW = Path(".github/workflows/inkling-sconv.yml")
TESTS = Path("test/registered/inkling")
NEXT = f"""\
next:
  1. Set the repository variable INKLING_SCONV_RUNNER to the label of a runner with one H100-class
     GPU, for example 1-gpu-h100. Until then the GPU job is skipped.
  2. Where your own CI runs test/registered, let it install the package first:
     pip install 'sglang-inkling-sconv[cli]=={__version__}'
  3. git add {TESTS} {WORKFLOW}, and commit."""


class CopyError(UserError):
    """Nothing was copied: why, and what to do."""


def copy_into(path: Path) -> list[Path]:
    """Copy the files into the checkout at ``path``; where each was written.

    Raises:
        CopyError: it is no checkout, a file is there already, or one cannot be written.
        TreeError: there is no SGLang at ``path``.
    """
    root = find_tree(path).root
    checkout = root.parent
    if root.name != "python":
        raise CopyError(f"{path}: not a checkout of SGLang (no python/sglang/srt); name its folder")
    files = {checkout / name: text for name, text in read_files().items()}
    if there := [str(file.relative_to(checkout)) for file in files if _exists(file)]:
        names = ", ".join(there)
        raise CopyError(
            f"{checkout}: nothing written, for there is {names}; to renew, delete first"
        )
    for file in files:
        if not file.parent.resolve().is_relative_to(checkout.resolve()):
            raise CopyError(f"{file.parent}: nothing written: it is a link out of {checkout}")
    try:
        with contextlib.ExitStack() as undo:
            for file, text in files.items():
                for folder in reversed([p for p in file.parents if not p.exists()]):
                    folder.mkdir()
                    undo.callback(folder.rmdir)
                write_file(file, text)
                undo.callback(file.unlink)
            undo.pop_all()
    except OSError as error:
        raise CopyError(f"{error.filename}: nothing written: {error.strerror}") from None
    return list(files)


def read_files() -> dict[Path, bytes]:
    """What is copied, by its name in the checkout. The workflow is last: it starts the others."""
    package = Path(__file__).resolve().parent.parent
    # In a wheel the tests are beside the workflow; in our checkout they are where pytest runs them.
    shipped = package / "fork_ci" / "registered"
    tests = shipped if shipped.is_dir() else package.parent.parent / TESTS
    files = {TESTS / file.name: file.read_bytes() for file in sorted(tests.glob("*.py"))}
    template = (package / "fork_ci" / WORKFLOW.name).read_text()
    files[WORKFLOW] = template.replace("@VERSION@", __version__).encode()
    return files


def _exists(file: Path) -> bool:
    return file.exists() or file.is_symlink()
