"""``inkling-sconv apply``, its undo ``revert``, and ``export``: the commands that edit a tree."""

import difflib
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from inkling_sconv.cli import common
from inkling_sconv.trees.examine import examine_tree
from inkling_sconv.trees.replacement import replace_file, restore_file, write_file
from inkling_sconv.trees.tree import Tree, TreeError, open_tree


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
    """Add the guard to the tree's file, verify it, and put the file back if it does not heal.

    Exit 0: healthy, or nothing to do; 1: --check, and it needs the edit; 2: refused or put back.
    """
    with common.one_line_errors():
        tree = _open_editable(path)
        file = tree.backend
        before = file.read_bytes()
        after = _edit_file(file, before, inert_fill)
        if after == before:
            print(f"{file}: nothing to do; the guard is there")
            return
        if diff:
            # As seen from where ``git apply`` or ``patch -p1`` runs.
            top = tree.root.parent if tree.root.name == "python" else tree.root
            sys.stdout.write(_format_diff(file.relative_to(top), before, after))
        if check:
            print(f"{file}: needs the edit")
            raise typer.Exit(common.NEEDS_THE_FIX)
        if diff:
            return
        replace_file(file, before, after)
        print(f"{file}: written; checking it ...", flush=True)
        report = examine_tree(tree, installed=False)
        if report["state"] not in ("guarded", "exempt"):
            restore_file(file)
            broken = "; ".join(row["seen"] for row in report["rows"] if row["verdict"] == "broken")
            why = f"its state after the edit was {report['state']} ({report.get('why', broken)})"
            common.fail(f"{file}: put back: {why}")
        print(f"state: {report['state']}")
        print("next: review with git diff and commit, or undo with inkling-sconv revert")


def revert(path: common.Editable = None) -> None:
    """Undo apply: put the file back, byte for byte."""
    with common.one_line_errors():
        file = _open_editable(path).backend
        if restore_file(file):
            print(f"{file}: as it was before apply")
        else:
            print(f"{file}: is back already")


def export(
    path: common.Editable = None,
    inert_fill: common.InertFill = False,
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Create this branch; print no patch.")
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

    with common.one_line_errors():
        tree = _open_editable(path)
        file = tree.backend

        def edit(before: bytes) -> bytes:
            return _edit_file(file, before, inert_fill)

        if branch is not None:
            made = commit.make_branch(file, edit, branch, base)
            if made is None:
                common.fail(f"{base}: nothing to export; the guard is there", code=0)
            print(f"branch {branch}: {made}")
            print(f"next: git cherry-pick {made[:12]}, on any affected branch")
            return
        if commit.has_uncommitted_edits(file):
            common.warn(f"{file}: has uncommitted edits; the patch is for HEAD and leaves them out")
        text = commit.make_mailbox(file, edit, Path("python") / file.relative_to(tree.root))
        if text is None:
            common.fail(f"{file}: nothing to export; the guard is there", code=0)
        if output is None:
            sys.stdout.buffer.write(text)
            return
        write_file(output, text)
        keep = " --keep-cr" if b"\r\n" in text else ""
        print(f"{output}: written\nnext: git am{keep} {output}")


def _open_editable(path: Path | None) -> Tree:
    """Find the tree at ``path``; refuse a wheel."""
    if path is not None and path.suffix == ".whl":
        raise TreeError(f"{path}: cannot edit a wheel; unpack it and name the folder")
    with open_tree(path) as tree:
        return tree


def _edit_file(file: Path, before: bytes, inert_fill: bool) -> bytes:
    """Add the guard to the text ``before`` of ``file``; a refusal describes the edit by hand."""
    from inkling_sconv.codemod.guard import add_guard, describe_by_hand
    from inkling_sconv.codemod.shape import RefusedError

    try:
        return add_guard(before, inert_fill=inert_fill, format_as=file)
    except RefusedError as error:
        raise RefusedError(f"{file}: {error}; not touched. {describe_by_hand(before)}") from None


def _format_diff(name: Path, before: bytes, after: bytes) -> str:
    # Only a newline ends a line of a patch; splitlines() ends one at a form feed too.
    old, new = (
        list(io.StringIO(text.decode(errors="replace"), newline="\n")) for text in (before, after)
    )
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))
