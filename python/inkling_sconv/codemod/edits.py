"""Replacing nodes of a syntax tree. Code decides what to replace; this carries it out."""

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst

from inkling_sconv.codemod.shape import walk


@dataclass(frozen=True)
class Edit:
    """Put ``new`` in the place of ``old``, between the statements ``before`` and ``after``.

    ``new`` is ``old`` itself where only statements are added, and None where ``old`` is removed.
    """

    old: cst.CSTNode
    new: cst.CSTNode | None
    before: tuple[cst.BaseStatement, ...] = ()
    after: tuple[cst.BaseStatement, ...] = ()


def apply_edits(module: cst.Module, owner: cst.ClassDef, edits: Iterable[Edit]) -> cst.Module:
    """``module`` with the edits made in the class ``owner``. All other nodes stay as they are."""
    editor = _Editor({edit.old: edit for edit in edits})
    if owner not in module.body:
        return module.visit(editor)
    # Visiting a node copies all below it, so only the statements with an edit are visited.
    body = [
        node.visit(editor) if any(inner in editor.edits for inner in walk(node)) else node
        for node in owner.body.body
    ]
    changed = owner.with_changes(body=owner.body.with_changes(body=body))
    return module.with_changes(body=[changed if node is owner else node for node in module.body])


class _Editor(cst.CSTTransformer):
    """LibCST calls ``on_leave`` for inner nodes first."""

    def __init__(self, edits: dict[cst.CSTNode, Edit]):
        super().__init__()
        self.edits = edits

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        edit = self.edits.get(original_node)
        if edit is None:
            return updated_node
        if edit.new is None:
            return cst.RemoveFromParent()
        middle = updated_node if edit.new is original_node else edit.new
        around = (*edit.before, middle, *edit.after)
        return cst.FlattenSentinel(around) if len(around) > 1 else middle
