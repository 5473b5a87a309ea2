"""Add the guard: on the graph path, zeros stand in for missing prefix lengths.

The file is rewritten as a syntax tree, so formatting, comments, names, line endings and encoding
stay the author's. An edit is refused unless it is known to be safe. Nothing here writes a file.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import libcst as cst

from inkling_sconv import names
from inkling_sconv.codemod import shape
from inkling_sconv.codemod.edits import Edit, apply_edits

INERT_FIELDS = {
    names.TRACK_MASK: ", dtype={torch}.bool",
    names.TRACK_INDICES: "",
    names.TRACK_SEQLENS: "",
}

RUFF_SECONDS = 10
"""What ruff may take for a file. For a megabyte of comments it would take minutes."""


def add_guard(text: bytes, *, inert_fill: bool = False, format_as: Path | None = None) -> bytes:
    """Add the guard to the refresh in ``text``, the bytes of a whole file; return the whole file.

    Args:
        text: the file.
        inert_fill: in an untracked file, add the inert track fields too.
        format_as: the file's path. If ruff is installed and ``text`` is formatted with the ruff
            settings of that folder, the result is too.

    Raises:
        RefusedError: the edit would not be safe, or would have no effect.
    """
    module = shape.parse(text)
    methods = shape.find_methods(module)
    state = shape.classify_methods(methods)
    if state in (shape.Shape.GUARDED, shape.Shape.EXEMPT):
        return text
    if state is shape.Shape.ABSENT:
        unread = f"{names.REFRESH} reads no BATCH.{names.EXTEND_PREFIX_LENS}"
        raise shape.RefusedError(unread if methods else f"no class here defines {names.REFRESH}")
    if state is shape.Shape.UNTRACKED and not inert_fill:
        raise shape.RefusedError(
            f"{names.REFRESH} fills no inert track fields, so the guard alone changes nothing. "
            "--inert-fill adds them; the prefill runner needs a fix of its own"
        )
    edits: list[Edit] = []
    for method in filter(shape.is_crashing, methods):
        edits += _edit_guard(method)
        if state is shape.Shape.UNTRACKED:
            edits += _edit_inert_fill(method)
    return _format_like(text, apply_edits(module, edits).bytes, format_as)


def describe_by_hand(text: bytes) -> str:
    """Describe the edit in words, with the file's own names if they can be read."""
    try:
        method = shape.find_methods(shape.parse(text))[0]
        batch, graph = method.batch, method.graph
    except (shape.RefusedError, IndexError):
        batch, graph = "forward_batch", "on_graph_path"
    field = f"{batch}.{names.EXTEND_PREFIX_LENS}"
    return (
        f"By hand: in {names.REFRESH}, after the inert fill, add `lens = {field}` and `if lens is "
        f"None and {graph}: lens = torch.zeros_like({batch}.{names.TRACK_SEQLENS})`; then use lens."
    )


def _edit_guard(method: shape.RefreshMethod) -> Iterator[Edit]:
    """Yield edits: bind the local, add the guard, and use the local for every later load."""
    _check_names(method)
    module, binding = method.module, method.binding
    local = method.local or _choose_unused_name(method)
    block, anchor = _find_first_statement(method)
    if binding is not None:
        anchor = method.parents[binding]
        if method.parents[anchor] is not block:
            method.refuse(anchor, f"{local} is bound in a nested block")
        if anchor.body[-1] is not binding:  # type: ignore[attr-defined]
            method.refuse(anchor, f"other statements follow the binding of {local} on its line")
    for fill in method.fills:
        if method.order[fill] >= method.order[anchor]:
            method.refuse(fill, f"the inert fill comes after {names.EXTEND_PREFIX_LENS} is read")

    comment = "# A capture batch has no prefix lengths and tracks no row, so zeros are safe.\n"
    bind = f"{local} = {method.batch}.{names.EXTEND_PREFIX_LENS}\n"
    zeros = f"{_find_torch_name(module)}.zeros_like({method.batch}.{names.TRACK_SEQLENS})"
    guard = f"if {local} is None and {method.graph}:\n    {local} = {zeros}\n"
    if binding is not None:
        yield Edit(anchor, anchor, after=_parse_statements(module, comment + guard))
    else:
        yield Edit(anchor, anchor, before=_parse_statements(module, comment + bind + guard))
    for load in method.loads:
        if binding is not None and binding in method.trace_path(load):
            continue
        if method.order[load] < method.order[anchor]:
            method.refuse(load, f"{names.EXTEND_PREFIX_LENS} is read before {local} is bound")
        yield Edit(load, cst.Name(local))


def _check_names(method: shape.RefreshMethod) -> None:
    """Refuse code that handles missing lengths, or rebinds names that the guard uses."""
    field = names.EXTEND_PREFIX_LENS
    for test in method.none_tests:
        method.refuse(test, f"a missing {field} is handled already, another way")
    readers = {node for load in method.loads for node in method.trace_path(load)}
    for node in method.nodes:
        reads = node in readers
        bound = shape.list_bound_names(node)
        if shape.names_field(node) and node not in method.loads:
            method.refuse(node, f"{field} is read indirectly")
        if reads and isinstance(node, cst.AssignTarget | cst.AugAssign | cst.Del):
            method.refuse(node, f"{field} of the batch is assigned")
        if method.batch in bound or method.graph in bound:
            method.refuse(node, f"{' and '.join(bound)} is reassigned")
        if method.local in bound and node is not method.binding:
            method.refuse(node, f"{method.local} is assigned twice")
        if isinstance(node, cst.Del | cst.Global | cst.Nonlocal):
            method.refuse(node, "del, global and nonlocal are not supported here")
        inner = isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef)
        if reads and inner and node is not method.node:
            method.refuse(node, f"an inner function reads {field}")


def _choose_unused_name(method: shape.RefreshMethod) -> str:
    used = {node.value for node in method.nodes if isinstance(node, cst.Name)}
    for name in ("prefix_lens", "track_prefix_lens"):
        if name not in used:
            return name
    raise shape.RefusedError("prefix_lens and track_prefix_lens are used for something else")


def _find_first_statement(method: shape.RefreshMethod) -> tuple[cst.CSTNode, cst.CSTNode]:
    """Find the innermost block that holds every load, and its first statement with one."""
    paths = [method.trace_path(load) for load in method.loads]
    common = [nodes[0] for nodes in zip(*paths, strict=False) if len({*map(id, nodes)}) == 1]
    blocks = [node for node in common if isinstance(node, cst.IndentedBlock)]
    if not blocks:
        method.refuse(method.node, "the whole method is on one line")
    below = paths[0].index(blocks[-1]) + 1
    return blocks[-1], min((path[below] for path in paths), key=method.order.__getitem__)


def _edit_inert_fill(method: shape.RefreshMethod) -> Iterator[Edit]:
    """Keep the early return for eager batches; elsewhere fill inert fields, allocated once."""
    module, batch, torch = method.module, method.batch, _find_torch_name(method.module)
    returns = (node for node in method.nodes if _is_early_return(node, batch))
    early = _find_only(returns, "early return on no mask")
    fill = "# Captures must record the scatter: give them inert fields.\n"
    for name in INERT_FIELDS:
        fill += f"{batch}.{name} = {method.host}._inert_{name}[: {batch}.batch_size]\n"
    not_on_graph = cst.UnaryOperation(cst.Not(), cst.Name(method.graph))
    eager = cst.If(test=not_on_graph, body=early.body, orelse=None)  # type: ignore[attr-defined]
    yield Edit(
        early, early.with_changes(body=cst.IndentedBlock([eager, *_parse_statements(module, fill)]))
    )

    allocations = filter(_allocates_indices, shape.walk(method.owner))
    allocation = _find_only(allocations, f"allocation of {names.STATIC_INDICES}")
    host = next(node.value for node in shape.walk(allocation) if isinstance(node, cst.Name))
    fields = "# Inert track fields for captures: graphs only read them.\n"
    for name, dtype_argument in INERT_FIELDS.items():
        like = f"{host}.{names.STATIC_INDICES}[:, 0]{dtype_argument.format(torch=torch)}"
        fields += f"{host}._inert_{name} = {torch}.zeros_like({like})\n"
    yield Edit(allocation, allocation, after=_parse_statements(module, fields))


def _find_only(nodes: Iterable[cst.CSTNode], what: str) -> cst.CSTNode:
    found = [*nodes]
    if len(found) != 1:
        raise shape.RefusedError(f"expected one {what}, found {len(found)}")
    return found[0]


def _is_early_return(node: cst.CSTNode, batch: str) -> bool:
    """Whether ``node`` is ``if BATCH.mamba_track_mask is None: ...; return``."""
    return (
        isinstance(node, cst.If)
        and node.orelse is None
        and shape.compares_with_none(node.test, cst.Is)
        and shape.is_field(node.test.left, batch, names.TRACK_MASK)
        and shape.ends_in_return(node)
    )


def _allocates_indices(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(inner, cst.AssignTarget)
        and isinstance(inner.target, cst.Attribute)
        and shape.is_name(inner.target.attr, names.STATIC_INDICES)
        for inner in shape.walk(node)
    )


def _find_torch_name(module: cst.Module) -> str:
    """Find the name that torch is imported as."""
    lines = (node for node in module.body if isinstance(node, cst.SimpleStatementLine))
    imports = (node for line in lines for node in line.body if isinstance(node, cst.Import))
    for alias in (alias for node in imports for alias in node.names):
        if alias.evaluated_name == "torch":
            return alias.evaluated_alias or "torch"
    raise shape.RefusedError("the file does not import torch at its top level")


def _parse_statements(module: cst.Module, code: str) -> tuple[cst.BaseStatement, ...]:
    """Parse ``code`` with the indentation and the line ends of ``module``."""
    code = code.replace(" " * 4, module.default_indent).replace("\n", module.default_newline)
    parsed = cst.parse_module(code, config=module.config_for_parsing)
    # The parser puts a leading comment into the module's header.
    first: Any = parsed.body[0]
    first = first.with_changes(leading_lines=[*parsed.header, *first.leading_lines])
    return (first, *parsed.body[1:])


def _format_like(before: bytes, after: bytes, place: Path | None) -> bytes:
    """Format ``after`` with ruff if ``before`` is formatted, and ruff says so within the limit."""
    ruff = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
    if place is None or ruff is None:
        return after
    command = [ruff, "format", "--quiet", "--no-cache", "--stdin-filename", place.name, "-"]
    try:
        results = [
            subprocess.run(
                command, input=text, capture_output=True, cwd=place.parent, timeout=RUFF_SECONDS
            )
            for text in (before, after)
        ]
    except subprocess.TimeoutExpired:
        return after
    if any(result.returncode for result in results) or results[0].stdout != before:
        return after
    return results[1].stdout
