"""The guard taken out again: how the crashing fork is made of a release, for tests and proof."""

from __future__ import annotations

import libcst as cst

from inkling_sconv.codemod.shape import RefreshMethod, RefusedError, find_methods, parse
from inkling_sconv.names import EXTEND_PREFIX_LENS, REFRESH


def remove_guard(text: bytes) -> bytes:
    """The file without the guard of its refresh, and without the local that the guard is for.

    Raises:
        RefusedError: there is not exactly one guard, or it is not an ``if`` on a local.
    """
    module = parse(text)
    guarded = [method for method in find_methods(module) if method.guards]
    if len(guarded) != 1 or len(guarded[0].guards) != 1:
        found = sum(len(method.guards) for method in guarded)
        raise RefusedError(f"{found} guards in {REFRESH}, not 1")
    (method,) = guarded
    (guard,) = method.guards
    if not isinstance(guard, cst.If) or method.binding is None or guard.orelse is not None:
        raise method.refused(guard, "this guard is not an `if` on a local of its own")
    result = module.visit(_GuardRemover(method, guard))
    return result.bytes


class _GuardRemover(cst.CSTTransformer):
    """Removes the guard and the binding, and reads the field wherever the local is read."""

    def __init__(self, method: RefreshMethod, guard: cst.If):
        super().__init__()
        self.method, self.removed = method, {guard, method.binding}
        self.inside = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self.inside = self.inside or node is self.method.node

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        if original_node is self.method.node:
            self.inside = False
        if original_node in self.removed:
            return cst.RemoveFromParent()
        if (
            self.inside
            and isinstance(original_node, cst.Name)
            and original_node.value == self.method.local
        ):
            return cst.Attribute(cst.Name(self.method.batch), cst.Name(EXTEND_PREFIX_LENS))
        return super().on_leave(original_node, updated_node)
