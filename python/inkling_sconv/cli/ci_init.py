"""``inkling-sconv ci-init``."""

from pathlib import Path
from typing import Annotated

import typer

from inkling_sconv.cli.common import one_line_errors


def ci_init(
    path: Annotated[Path, typer.Argument(metavar="TREE", help="A fork's checkout.")],
) -> None:
    """Copy the registered tests and a workflow into a fork's checkout. No file is overwritten."""
    from inkling_sconv.fork_ci.copy import NEXT, copy_into

    with one_line_errors():
        for written in copy_into(path):
            print(f"{written}: written")
    print(NEXT)
