"""``inkling-sconv export``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from inkling_sconv.cli import common
from inkling_sconv.trees.tree import Tree


def export(
    path: common.Editable = None,
    inert_fill: common.InertFill = False,
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make this branch with the commit instead.")
    ] = None,
    base: Annotated[
        str, typer.Option(metavar="COMMIT", help="With --branch: the commit to build on.")
    ] = "HEAD",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the patch to this file.")
    ] = None,
) -> None:
    """Print the edit as a patch for git am, or make a branch with it. The tree is left as it is."""
    from inkling_sconv.codemod import commit
    from inkling_sconv.trees.replacement import write_file

    with common.one_line_errors():
        tree = common.open_editable(path)
        file = tree.backend

        def edit(before: bytes) -> bytes:
            return common.edit_file(file, before, inert_fill)

        if branch is not None:
            made = commit.make_branch(file, edit, branch, base)
            if made is None:
                common.fail(f"{base}: nothing to export; the guard is there", code=0)
            print(f"branch {branch}: {made}")
            print(f"next: git cherry-pick {made[:12]}, on any branch that crashes")
            return
        if commit.has_uncommitted_edits(file):
            common.warn(f"{file}: has uncommitted edits; the patch is for HEAD and leaves them out")
        text = commit.make_mailbox(file, edit, _name_in_repository(tree, file))
        if text is None:
            common.fail(f"{file}: nothing to export; the guard is there", code=0)
        if output is None:
            sys.stdout.buffer.write(text)
            return
        write_file(output, text)
        keep = " --keep-cr" if b"\r\n" in text else ""
        print(f"{output}: written\nnext: git am{keep} {output}")


def _name_in_repository(tree: Tree, file: Path) -> Path:
    """Name the file as a checkout of SGLang does."""
    return Path("python") / file.relative_to(tree.root)
