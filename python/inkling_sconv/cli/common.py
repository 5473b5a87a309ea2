"""Arguments, exit codes and errors that several commands share."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from inkling_sconv.errors import UserError

HEALTHY, NEEDS_THE_FIX, COULD_NOT_TELL = 0, 1, 2


def _declare_tree(kinds: str) -> Any:
    text = f"{kinds} Default: the installed SGLang."
    return typer.Argument(metavar="TREE", help=text, show_default=False)


Readable = Annotated[
    Path | None, _declare_tree("A checkout, a folder with sglang in it, or a wheel.")
]
Editable = Annotated[Path | None, _declare_tree("A checkout, or a folder with sglang in it.")]
InertFill = Annotated[
    bool, typer.Option("--inert-fill", help="Also add inert fields; untracked trees need them.")
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
