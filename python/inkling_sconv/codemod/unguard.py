"""Remove the guard. Tests and benchmarks make the crashing fork of a release with it."""

import libcst as cst

from inkling_sconv.codemod.edits import Edit, apply_edits
from inkling_sconv.codemod.shape import RefusedError, find_methods, is_name, parse
from inkling_sconv.names import EXTEND_PREFIX_LENS, REFRESH


def remove_guard(text: bytes) -> bytes:
    """Return the file without the guard of its refresh, and without the guard's local.

    Raises:
        RefusedError: there is not exactly one guard, or it is not an ``if`` on a local.
    """
    module = parse(text)
    guards = [(method, guard) for method in find_methods(module) for guard in method.guards]
    if len(guards) != 1:
        raise RefusedError(f"expected one guard in {REFRESH}, found {len(guards)}")
    method, guard = guards[0]
    if not isinstance(guard, cst.If) or method.binding is None or guard.orelse is not None:
        method.refuse(guard, "this guard is not an `if` on its own local")
    field = cst.Attribute(cst.Name(method.batch), cst.Name(EXTEND_PREFIX_LENS))
    assert method.local is not None
    uses = [Edit(node, field) for node in method.nodes if is_name(node, method.local)]
    return apply_edits(module, [*uses, Edit(guard, None), Edit(method.binding, None)]).bytes
