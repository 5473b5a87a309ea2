"""What several commands share: arguments, exit codes, errors, and the edit of a tree's file."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from inkling_sconv.errors import UserError
from inkling_sconv.trees.tree import Tree, TreeError, open_tree

HEALTHY, NEEDS_THE_FIX, COULD_NOT_TELL = 0, 1, 2


def _declare_tree(kinds: str) -> Any:
    text = f"{kinds} Default: the installed SGLang."
    return typer.Argument(metavar="TREE", help=text, show_default=False)


Readable = Annotated[
    Path | None, _declare_tree("A checkout, a folder with sglang in it, or a wheel.")
]
Editable = Annotated[Path | None, _declare_tree("A checkout, or a folder with sglang in it.")]
InertFill = Annotated[
    bool, typer.Option("--inert-fill", help="In an untracked tree, add the inert track fields too.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn every error that the user can fix into one line on stderr and exit 2."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def warn(message: str) -> None:
    """Print one line on stderr."""
    print(f"inkling-sconv: {message}", file=sys.stderr)


def fail(message: str, code: int = COULD_NOT_TELL) -> NoReturn:
    """Print one line on stderr and exit with ``code``."""
    warn(message)
    raise typer.Exit(code)


def open_editable(path: Path | None) -> Tree:
    """Find the tree at ``path``; refuse a wheel."""
    if path is not None and path.suffix == ".whl":
        raise TreeError(f"{path}: a wheel is not edited; unpack it, and name the folder")
    with open_tree(path) as tree:
        return tree


def edit_file(file: Path, before: bytes, inert_fill: bool) -> bytes:
    """Add the guard to the text ``before`` of ``file``; a refusal describes the edit by hand."""
    from inkling_sconv.codemod.guard import add_guard, describe_by_hand
    from inkling_sconv.codemod.shape import RefusedError

    try:
        return add_guard(before, inert_fill=inert_fill, format_as=file).text
    except RefusedError as error:
        raise RefusedError(f"{file}: {error}; not touched. {describe_by_hand(before)}") from None
