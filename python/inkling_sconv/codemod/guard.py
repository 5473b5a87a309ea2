"""The guard as an edit: one local that holds the prefix lengths, and zeros where they are missing.

The file is rewritten as a syntax tree, so formatting, comments, names, line endings and encoding
stay the author's. An edit that is not known to be safe is refused. Nothing here writes a file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from inkling_sconv.codemod.shape import (
    RefreshMethod,
    RefusedError,
    Shape,
    ends_in_return,
    find_methods,
    is_crashing,
    is_field,
    is_name,
    list_bound_names,
    name_shape,
    names_field,
    parse,
    walk,
)
from inkling_sconv.names import EXTEND_PREFIX_LENS, REFRESH, STATIC_INDICES, TRACK_MASK

INERT_FIELDS = "_inert_track_fields"


@dataclass(frozen=True)
class Edit:
    """``text`` is the whole file after the edit; equal to the one before where nothing is to do."""

    shape: Shape
    text: bytes


def add_guard(text: bytes, *, inert_fill: bool = False, format_as: Path | None = None) -> Edit:
    """The file with the guard in its refresh, and with ``inert_fill`` the inert track fields too.

    ``format_as`` is where the file lies: if ruff is there and finds the file formatted, by the
    settings that hold for that place, the result is formatted too.

    Raises:
        RefusedError: the edit would not be safe, or would not cure anything.
    """
    module = parse(text)
    methods = find_methods(module)
    found = name_shape(methods)
    if found in (Shape.GUARDED, Shape.EXEMPT):
        return Edit(found, text)
    if found is Shape.ABSENT:
        what = "defines" if not methods else f"reads BATCH.{EXTEND_PREFIX_LENS} in"
        raise RefusedError(f"no class here {what} {REFRESH}")
    if found is Shape.UNTRACKED and not inert_fill:
        raise RefusedError(
            f"{REFRESH} fills no inert track fields, so the guard alone would change nothing; "
            "--inert-fill adds them, and the prefill runner still leaves tracking out"
        )
    result = module
    for method in methods:
        if is_crashing(method):
            edits = _guard(method)
            if found is Shape.UNTRACKED:
                edits |= _inert_fill(method)
            result = _replaced(result, method.owner, edits)
    return Edit(found, _formatted(text, result.bytes, format_as))


def describe_by_hand(text: bytes) -> str:
    """The edit in words, with the file's own names where they can be read."""
    try:
        method = find_methods(parse(text))[0]
        batch, graph = method.batch, method.graph
    except (RefusedError, IndexError):
        batch, graph = "forward_batch", "on_graph_path"
    return (
        f"By hand: in {REFRESH}, before the first use of {batch}.{EXTEND_PREFIX_LENS} and after "
        f"the inert fill, bind it to a local; where that local is None and {graph} is true, set it to "
        f"torch.zeros_like({batch}.mamba_track_seqlens); use the local from there on."
    )


@dataclass(frozen=True)
class _Replacement:
    """What stands in the place of a node, and what comes before and after it."""

    node: cst.CSTNode
    before: tuple[cst.BaseStatement, ...] = ()
    after: tuple[cst.BaseStatement, ...] = ()


_Edits = dict[cst.CSTNode, _Replacement]


class _Replacer(cst.CSTTransformer):
    """Applies replacements, keyed by the node that they are for. Inner ones come first."""

    def __init__(self, edits: _Edits):
        super().__init__()
        self.edits = edits

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        edit = self.edits.get(original_node)
        if edit is None:
            return updated_node
        middle = updated_node if edit.node is original_node else edit.node
        around = (*edit.before, middle, *edit.after)
        return cst.FlattenSentinel(around) if len(around) > 1 else middle


def _replaced(module: cst.Module, owner: cst.ClassDef, edits: _Edits) -> cst.Module:
    """``module`` with the edits made in ``owner``."""
    replacer = _Replacer(edits)
    if owner not in module.body:
        return module.visit(replacer)
    # Visiting a node copies all below it, so only what changes is visited.
    body = [
        node.visit(replacer) if any(inner in edits for inner in walk(node)) else node
        for node in owner.body.body
    ]
    changed = owner.with_changes(body=owner.body.with_changes(body=body))
    return module.with_changes(body=[changed if node is owner else node for node in module.body])


def _statements(module: cst.Module, code: str) -> tuple[cst.BaseStatement, ...]:
    code = code.replace(" " * 4, module.default_indent).replace("\n", module.default_newline)
    parsed = cst.parse_module(code, config=module.config_for_parsing)
    # A comment on the first line belongs to the header of a module of its own.
    first: Any = parsed.body[0]
    first = first.with_changes(leading_lines=[*parsed.header, *first.leading_lines])
    return (first, *parsed.body[1:])


def _guard(method: RefreshMethod) -> _Edits:
    """The local, the guard after it, and the local in the place of every later load."""
    _check_names(method)
    module = method.module
    local = method.local or _unused(method, ("prefix_lens", "track_prefix_lens"))
    block, anchor = _common_statement(method)
    if method.binding is not None:
        anchor = method.parents[method.binding]
        if method.parents[anchor] is not block:
            raise method.refused(anchor, f"{local} is bound in a block of its own")
        if anchor.body[-1] is not method.binding:  # type: ignore[attr-defined]
            raise method.refused(anchor, f"more follows on its line, where {local} is bound")
    for fill in method.fills:
        if method.order[fill] >= method.order[anchor]:
            raise method.refused(fill, f"the inert fill comes after {EXTEND_PREFIX_LENS} is read")
    comment = "# A capture batch has no prefix lengths. None of its rows is tracked: zeros do.\n"
    binding = f"{local} = {method.batch}.{EXTEND_PREFIX_LENS}\n"
    zeros = f"{_torch(module)}.zeros_like({method.batch}.mamba_track_seqlens)"
    guard = f"if {local} is None and {method.graph}:\n    {local} = {zeros}\n"
    if method.binding is not None:
        edits = {anchor: _Replacement(anchor, after=_statements(module, comment + guard))}
    else:
        new = _statements(module, comment + binding + guard)
        edits = {anchor: _Replacement(anchor, before=new)}
    for load in method.loads:
        if method.binding is not None and method.binding in method.path(load):
            continue
        if method.order[load] < method.order[anchor]:
            raise method.refused(load, f"{EXTEND_PREFIX_LENS} is read before {local} is bound")
        edits[load] = _Replacement(cst.Name(local))
    return edits


def _check_names(method: RefreshMethod) -> None:
    """Refuse what would make the guard's names mean something else."""
    if method.none_tests:
        raise method.refused(
            method.none_tests[0],
            f"a missing {EXTEND_PREFIX_LENS} is treated here already, another way",
        )
    for node in method.nodes:
        if names_field(node) and node not in method.loads:
            raise method.refused(node, f"{EXTEND_PREFIX_LENS} is read through another name")
        if isinstance(node, cst.AssignTarget | cst.AugAssign | cst.Del) and any(
            load in walk(node) for load in method.loads
        ):
            raise method.refused(node, f"{EXTEND_PREFIX_LENS} of the batch is assigned")
        names = list_bound_names(node)
        if method.batch in names or method.graph in names:
            raise method.refused(node, f"{' and '.join(names)} is assigned anew")
        if method.local in names and node is not method.binding:
            raise method.refused(node, f"{method.local} is assigned twice")
        if isinstance(node, cst.Del | cst.Global | cst.Nonlocal):
            raise method.refused(node, "names are unbound or shared here")
        if (
            isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef)
            and node is not method.node
            and any(load in walk(node) for load in method.loads)
        ):
            raise method.refused(node, f"an inner function reads {EXTEND_PREFIX_LENS}")


def _torch(module: cst.Module) -> str:
    """What the module calls torch."""
    for statement in module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            for node in statement.body:
                if isinstance(node, cst.Import):
                    for alias in node.names:
                        if alias.evaluated_name == "torch":
                            return alias.evaluated_alias or "torch"
    raise RefusedError("the file does not import torch at its top level")


def _unused(method: RefreshMethod, names: Sequence[str]) -> str:
    used = {node.value for node in method.nodes if isinstance(node, cst.Name)}
    for name in names:
        if name not in used:
            return name
    raise RefusedError(f"{REFRESH} uses the names {' and '.join(names)} for something else")


def _common_statement(method: RefreshMethod) -> tuple[cst.CSTNode, cst.CSTNode]:
    """The innermost block that holds every load, and its first statement with one."""
    paths = [method.path(load) for load in method.loads]
    common = [nodes[0] for nodes in zip(*paths, strict=False) if len({*map(id, nodes)}) == 1]
    blocks = [node for node in common if isinstance(node, cst.IndentedBlock)]
    if not blocks:
        raise method.refused(method.node, "the whole method is on one line")
    below = paths[0].index(blocks[-1]) + 1
    return blocks[-1], min((path[below] for path in paths), key=method.order.__getitem__)


def _inert_fill(method: RefreshMethod) -> _Edits:
    """Early return for eager batches only; inert fields for the others; their allocation."""
    module, torch = method.module, _torch(method.module)
    early = _only(
        method.nodes, lambda node: _is_early_return(node, method.batch), "early return on no mask"
    )
    fill = _statements(
        module,
        "# A capture has to record the scatter: it gets fields that track nothing.\n"
        f"for name, inert in {method.host}.{INERT_FIELDS}.items():\n"
        f"    setattr({method.batch}, name, inert[: {method.batch}.batch_size])\n",
    )
    not_on_graph = cst.UnaryOperation(cst.Not(), cst.Name(method.graph))
    eager = cst.If(test=not_on_graph, body=early.body, orelse=None)  # type: ignore[attr-defined]
    filled = early.with_changes(body=cst.IndentedBlock([eager, *fill]))

    alloc = _only(list(walk(method.owner)), _allocates_rows, f"allocation of {STATIC_INDICES}")
    host = next(node.value for node in walk(alloc) if isinstance(node, cst.Name))
    rows = f"{host}.{STATIC_INDICES}[:, 0]"
    fields = _statements(
        module,
        "# Track fields for captures without tracking metadata: graphs read them, none writes.\n"
        f"{host}.{INERT_FIELDS} = {{\n"
        f'    "mamba_track_mask": {torch}.zeros_like({rows}, dtype={torch}.bool),\n'
        f'    "mamba_track_indices": {torch}.zeros_like({rows}),\n'
        f'    "mamba_track_seqlens": {torch}.zeros_like({rows}),\n'
        "}\n",
    )
    return {early: _Replacement(filled), alloc: _Replacement(alloc, after=fields)}


def _only(
    nodes: Sequence[cst.CSTNode], wanted: Callable[[cst.CSTNode], bool], what: str
) -> cst.CSTNode:
    found = [node for node in nodes if wanted(node)]
    if len(found) != 1:
        raise RefusedError(f"{len(found)} places look like the {what}, not 1")
    return found[0]


def _is_early_return(node: cst.CSTNode, batch: str) -> bool:
    """``if BATCH.mamba_track_mask is None: ...; return``."""
    if not isinstance(node, cst.If) or node.orelse is not None:
        return False
    test = node.test
    return (
        isinstance(test, cst.Comparison)
        and is_field(test.left, batch, TRACK_MASK)
        and len(test.comparisons) == 1
        and isinstance(test.comparisons[0].operator, cst.Is)
        and is_name(test.comparisons[0].comparator, "None")
        and ends_in_return(node)
    )


def _allocates_rows(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.SimpleStatementLine) or not isinstance(node.body[0], cst.Assign):
        return False
    targets = [target.target for target in node.body[0].targets]
    return any(isinstance(t, cst.Attribute) and t.attr.value == STATIC_INDICES for t in targets)


# ------------------------------------------------------------------------------- formatting


def _formatted(before: bytes, after: bytes, place: Path | None) -> bytes:
    """``after``, formatted by ruff if ``before`` was."""
    ruff = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
    if place is None or ruff is None:
        return after
    command = [ruff, "format", "--quiet", "--no-cache", "--stdin-filename", place.name, "-"]
    results = [
        subprocess.run(command, input=text, capture_output=True, cwd=place.parent)
        for text in (before, after)
    ]
    if any(result.returncode for result in results) or results[0].stdout != before:
        return after
    return results[1].stdout
