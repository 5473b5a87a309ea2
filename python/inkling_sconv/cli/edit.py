"""``inkling-sconv apply``, its undo ``revert``, and ``export``: the commands that edit a tree."""

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from inkling_sconv.cli import common
from inkling_sconv.errors import UserError
from inkling_sconv.trees.examine import examine_tree
from inkling_sconv.trees.folder import write_output
from inkling_sconv.trees.replacement import LockedFile, lock_file
from inkling_sconv.trees.tree import Tree, TreeError, open_tree


class EditError(UserError):
    """The edit does not heal the file. The message says why."""


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
    tree = _open_editable(path)
    with lock_file(tree.root, tree.backend, shared=check or diff) as file:
        if check or diff:
            _print_edit(tree, file, inert_fill, check, diff)
        else:
            _apply(tree, file, inert_fill)


def _print_edit(tree: Tree, file: LockedFile, inert_fill: bool, check: bool, diff: bool) -> None:
    if file.is_unverified(file.read_record()):
        reason = "holds an edit of apply that was not verified; run apply, or revert"
        common.fail(f"{file.path}: {reason}", common.NEEDS_THE_FIX if check else 2)
    before = file.read()
    after = _edit_file(file.path, before, inert_fill)
    if after == before:
        print(f"{file.path}: nothing to do; the guard is there")
        return
    if diff:
        # As seen from where ``git apply`` or ``patch -p1`` runs.
        top = tree.root.parent if tree.root.name == "python" else tree.root
        sys.stdout.buffer.write(_format_diff(file.path.relative_to(top), before, after))
        sys.stdout.buffer.flush()
    if check:
        print(f"{file.path}: needs the edit")
        raise typer.Exit(common.NEEDS_THE_FIX)


def _apply(tree: Tree, file: LockedFile, inert_fill: bool) -> None:
    record = file.read_record()
    unverified = file.is_unverified(record)
    if unverified and record is not None and record.describes(file.read()):
        file.restore()
        print(f"{file.path}: put back an edit that was not verified")
        unverified = False

    def verify() -> None:
        print(f"{file.path}: checking it ...", flush=True)
        report = examine_tree(tree, installed=False)
        if report["state"] not in ("guarded", "exempt"):
            broken = "; ".join(row["seen"] for row in report["rows"] if row["verdict"] == "broken")
            why = report.get("why", broken)
            raise EditError(f"its state after the edit was {report['state']} ({why})")
        print(f"state: {report['state']}", flush=True)

    def announce() -> None:
        following = "review with git diff and commit, or undo with inkling-sconv revert"
        print(f"next: {following}", flush=True)

    before = file.read()
    after = _edit_file(file.path, before, inert_fill)
    if after != before:
        file.replace(before, after, verify, announce)
    elif unverified and record is not None:
        try:
            verify()
        except EditError as error:
            raise EditError(
                f"{file.path}: edited after an apply that was not verified, and left so: {error}. "
                f"The original is in {record.place}, after its first line"
            ) from None
        file.approve(record)
        announce()
    else:
        print(f"{file.path}: nothing to do; the guard is there")


def revert(path: common.Editable = None) -> None:
    """Undo apply: put the file back, byte for byte."""
    tree = _open_editable(path)
    with lock_file(tree.root, tree.backend) as file:
        done = "as it was before apply" if file.restore() else "is back already"
        print(f"{file.path}: {done}")


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
    write_output(output, text)
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


def _format_diff(name: Path, before: bytes, after: bytes) -> bytes:
    # Only a newline ends a line of a patch, whatever the encoding of the file.
    old, new = (re.findall(rb"[^\n]*\n|[^\n]+", text) for text in (before, after))
    theirs, ours = (os.fsencode(f"{side}/{name}") for side in "ab")
    lines = difflib.diff_bytes(difflib.unified_diff, old, new, theirs, ours)
    unended = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + unended for line in lines)
