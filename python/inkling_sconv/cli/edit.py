"""What ``apply``, ``export`` and ``revert`` share: the tree to edit, and the edit."""

from pathlib import Path

from inkling_sconv.trees.tree import Tree, TreeError, open_tree


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
