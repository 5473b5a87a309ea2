"""A copy of a tree in which one file is replaced; all other files are links."""

from pathlib import Path

from inkling_sconv.trees.tree import Tree


def overlay_tree(tree: Tree, text: bytes, out: Path) -> Tree:
    """Copy ``tree`` into the new folder ``out``, with ``text`` in the backend's file.

    Only the package ``sglang`` is copied: the tree's folder may be all of site-packages.
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
