"""``inkling-sconv ci-init``."""

from pathlib import Path
from typing import Annotated

import typer


def ci_init(
    path: Annotated[Path, typer.Argument(metavar="TREE", help="A fork's checkout.")],
) -> None:
    """Copy the registered tests and a workflow into a fork's checkout. No file is overwritten."""
    from inkling_sconv.fork_ci.copy import NEXT, copy_into

    for written in copy_into(path):
        print(f"{written}: written")
    print(NEXT)
