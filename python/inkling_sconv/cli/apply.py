"""``inkling-sconv apply`` and its undo, ``revert``."""

import difflib
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from inkling_sconv.cli import common
from inkling_sconv.trees.tree import Tree


def apply(
    path: common.Editable = None,
    inert_fill: common.InertFill = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if the file needs the edit.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Change nothing; print the edit as a diff.")
    ] = False,
) -> None:
    """Add the guard to the tree's own file, check the result, and put the file back if it fails.

    Exit 0: healthy, or nothing to do; 1: --check, and it needs the edit; 2: refused or put back.
    """
    from inkling_sconv.trees.examine import examine_tree
    from inkling_sconv.trees.replacement import replace_file, restore_file

    with common.one_line_errors():
        tree = common.open_editable(path)
        file = tree.backend
        before = file.read_bytes()
        after = common.edit_file(file, before, inert_fill)
        if after == before:
            print(f"{file}: nothing to do; the guard is there")
            return
        if diff:
            sys.stdout.write(_format_diff(_name_for_patch(tree, file), before, after))
        if check or diff:
            if check:
                print(f"{file}: would be rewritten")
            raise typer.Exit(common.NEEDS_THE_FIX if check else 0)
        replace_file(file, before, after)
        print(f"{file}: written; checking it ...", flush=True)
        report = examine_tree(tree, installed=False)
        if report["state"] not in ("guarded", "exempt"):
            restore_file(file)
            seen = report.get("why") or "; ".join(
                row["seen"] for row in report["rows"] if row["verdict"] == "broken"
            )
            common.fail(f"{file}: put back: after the edit it is {report['state']} ({seen})")
        print(f"state: {report['state']}")
        print("next: git diff; commit it; undo: revert")


def revert(path: common.Editable = None) -> None:
    """Undo apply: put the file back, byte for byte."""
    from inkling_sconv.trees.replacement import restore_file

    with common.one_line_errors():
        file = common.open_editable(path).backend
        if restore_file(file):
            print(f"{file}: as it was before apply")
        else:
            print(f"{file}: is back already")


def _name_for_patch(tree: Tree, file: Path) -> Path:
    """Name the file as seen from where ``git apply`` or ``patch -p1`` runs."""
    return file.relative_to(tree.root.parent if tree.root.name == "python" else tree.root)


def _format_diff(name: Path, before: bytes, after: bytes) -> str:
    # Only a newline ends a line of a patch; splitlines() ends one at a form feed too.
    old, new = (
        list(io.StringIO(text.decode(errors="replace"), newline="\n")) for text in (before, after)
    )
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
