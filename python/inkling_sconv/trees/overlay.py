"""A copy of an SGLang tree with one file of another text; everything else is links."""

from __future__ import annotations

from pathlib import Path

from inkling_sconv.trees.tree import Tree


def overlay_tree(tree: Tree, text: bytes, out: Path) -> Tree:
    """Make a tree in ``out`` that differs from ``tree`` in the text of the backend's file alone.

    ``out`` must not exist yet. It gets the package ``sglang`` only: what else a site-packages
    folder holds is found there as before.
    """
    file = tree.backend.relative_to(tree.root)
    original, copy = tree.root, out
    copy.mkdir(parents=True)
    names = ["sglang"]
    for part in file.parts:
        for name in names:
            if name != part:
                (copy / name).symlink_to(original / name)
        original, copy = original / part, copy / part
        if part != file.name:
            copy.mkdir()
            names = [entry.name for entry in original.iterdir()]
    copy.write_bytes(text)
    return Tree(out)
