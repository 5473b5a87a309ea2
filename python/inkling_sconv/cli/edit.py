"""What ``apply``, ``export`` and ``revert`` share: a tree that can be edited, and the edit."""

from __future__ import annotations

from pathlib import Path

from inkling_sconv.trees.tree import Tree, TreeError, open_tree


def open_editable(path: Path | None) -> Tree:
    """The tree at ``path``; a wheel is refused."""
    if path is not None and path.suffix == ".whl":
        raise TreeError(f"{path}: a wheel is not edited; unpack it, and name the folder")
    with open_tree(path) as tree:
        return tree


def edit_file(file: Path, before: bytes, inert_fill: bool) -> bytes:
    """The text ``before`` of ``file`` with the guard; a refusal names the edit to make by hand."""
    from inkling_sconv.codemod.guard import add_guard, describe_by_hand
    from inkling_sconv.codemod.shape import RefusedError

    try:
        return add_guard(before, inert_fill=inert_fill, format_as=file).text
    except RefusedError as error:
        raise RefusedError(f"{file}: {error}; not touched. {describe_by_hand(before)}") from None
