"""Copy the registered tests and a workflow into a fork's checkout."""

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
  2. If your CI runs test/registered, let it install the package first:
     pip install 'sglang-inkling-sconv[cli]=={__version__}'
  3. git add {TESTS} {WORKFLOW}, and commit."""


class CopyError(UserError):
    """Nothing was copied. The message says why, and what to do."""


def copy_into(path: Path) -> list[Path]:
    """Copy the files into the checkout at ``path``: all of them, or none.

    Returns:
        The new files.

    Raises:
        CopyError: ``path`` is not a checkout, a file exists already, or one cannot be written.
        TreeError: there is no SGLang at ``path``.
    """
    root = find_tree(path).root
    checkout = root.parent
    if root.name != "python":
        raise CopyError(f"{path}: not a checkout of SGLang (no python/sglang/srt); name its folder")
    files = {checkout / name: text for name, text in read_files().items()}
    # A link to nowhere counts as well.
    exist = [file for file in files if file.exists() or file.is_symlink()]
    if exist:
        names = ", ".join(str(file.relative_to(checkout)) for file in exist)
        raise CopyError(f"{checkout}: nothing written: {names} exists already; delete it to renew")
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
    """Read the files to copy, by name in the checkout; last the workflow, which runs the others."""
    package = Path(__file__).resolve().parent.parent
    # A wheel has the tests beside the workflow; our checkout has them where pytest finds them.
    shipped = package / "fork_ci" / "registered"
    tests = shipped if shipped.is_dir() else package.parent.parent / TESTS
    files = {TESTS / file.name: file.read_bytes() for file in sorted(tests.glob("*.py"))}
    template = (package / "fork_ci" / WORKFLOW.name).read_text()
    files[WORKFLOW] = template.replace("@VERSION@", __version__).encode()
    return files
