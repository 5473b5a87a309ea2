"""Copy the registered tests and a workflow into a fork's checkout."""

import contextlib
import os
from pathlib import Path

from inkling_sconv import __version__
from inkling_sconv.errors import Interrupted, UserError, give_reason
from inkling_sconv.trees.folder import Folder
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
        CopyError: ``path`` is not a checkout, a file exists already or cannot be written, or
            another run is at work.
        LinkError: a folder on the way is a link.
        TreeError: there is no SGLang at ``path``.
    """
    root = find_tree(path).root
    checkout = root.parent
    if root.name != "python":
        raise CopyError(f"{path}: not a checkout of SGLang (no python/sglang/srt); name its folder")
    files = read_files()
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
        try:
            top = opened.enter_context(Folder(checkout))
            if not top.lock():
                raise CopyError(f"{checkout}: another run is at work on it; wait for it")
            # A link to nowhere counts as well.
            exist = [n for n in files if os.path.lexists(checkout / n)]
            if exist:
                raise CopyError(
                    f"{checkout}: nothing written: {', '.join(map(str, exist))} exists already; "
                    "delete it to renew"
                )
            for name, text in files.items():
                folder = top
                for part in name.parent.parts:
                    folder.make(part, undo)
                    folder = opened.enter_context(folder.open(part))
                # What a killed run left lies under the lock of the checkout.
                folder.sweep()
                folder.write_new(name.name, text, undo)
        except (OSError, Interrupted) as error:
            raise CopyError(f"{checkout}: nothing written: {give_reason(error)}") from None
        undo.pop_all()
    return [checkout / name for name in files]


def read_files() -> dict[Path, bytes]:
    """Read the files to copy, by name in the checkout; last the workflow, which runs the others."""
    package = Path(__file__).resolve().parent.parent
    # A wheel has the tests beside the workflow; our checkout has them where pytest finds them.
    shipped = package / "fork_ci" / "registered"
    tests = shipped if shipped.is_dir() else package.parent.parent / TESTS
    files = {TESTS / file.name: file.read_bytes() for file in sorted(tests.glob("*.py"))}
    template = (package / "fork_ci" / WORKFLOW.name).read_text(encoding="utf-8")
    files[WORKFLOW] = template.replace("@VERSION@", __version__).encode()
    return files
