"""Replace nodes of a syntax tree."""

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst


@dataclass(frozen=True)
class Edit:
    """Put ``new`` in the place of ``old``, between the statements ``before`` and ``after``.

    ``new`` is ``old`` itself where only statements are added, and None where ``old`` is removed.
    """

    old: cst.CSTNode
    new: cst.CSTNode | None
    before: tuple[cst.BaseStatement, ...] = ()
    after: tuple[cst.BaseStatement, ...] = ()


def apply_edits(module: cst.Module, edits: Iterable[Edit]) -> cst.Module:
    """Return ``module`` with the edits made. All other nodes stay as they are."""
    return module.visit(_Editor({edit.old: edit for edit in edits}))


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
