"""The fix as an edit of a fork's own file: a guard, and the one local that it needs.

The file is rewritten as a syntax tree, so formatting, comments, names, line endings and encoding
stay the author's. What the edit cannot be sure of it refuses. Nothing here imports SGLang or torch,
and nothing here writes a file.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# Neither libcst.matchers nor libcst.metadata: each takes as long to import as libcst itself.
import libcst as cst

from inkling_sconv.tree import REFRESH

PREFIX_LENS = "extend_prefix_lens"
STATIC_ROWS = "_graph_track_conv_indices"
INERT_FIELDS = "_inert_track_fields"
MAX_BYTES = 1 << 20
MAX_DEPTH = 200


class RefusedError(ValueError):
    """The file cannot be rewritten safely. The message is the reason, with the place."""


class Shape(str, enum.Enum):
    """What a method's syntax tree says of it; ``probe.State`` is what running it says."""

    ABSENT = "absent"
    UNTRACKED = "untracked"
    CRASHING = "crashing"
    GUARDED = "guarded"
    EXEMPT = "exempt"


@dataclass(frozen=True)
class Edit:
    """``text`` is the whole file after the edit; equal to the one before where nothing is to do."""

    shape: Shape
    text: bytes


def shape(text: bytes) -> Shape:
    """The state of the file's refresh, from its syntax tree alone.

    Raises:
        RefusedError: the file is not Python that can be read.
    """
    return _shape(_methods(_parse(text)))


def fix(text: bytes, *, inert_fill: bool = False, format_as: Path | None = None) -> Edit:
    """The file with the guard in its refresh, and with ``inert_fill`` the inert track fields too.

    ``format_as`` is where the file lies: if ruff is there and finds the file formatted, by the
    settings that hold for that place, the result is formatted too.

    Raises:
        RefusedError: the edit would not be safe, or would not cure anything.
    """
    module = _parse(text)
    methods = _methods(module)
    found = _shape(methods)
    if found in (Shape.GUARDED, Shape.EXEMPT):
        return Edit(found, text)
    if found is Shape.ABSENT:
        what = "defines" if not methods else f"reads BATCH.{PREFIX_LENS} in"
        raise RefusedError(f"no class here {what} {REFRESH}")
    if found is Shape.UNTRACKED and not inert_fill:
        raise RefusedError(
            f"{REFRESH} fills no inert track fields, so the guard alone would change nothing; "
            "--inert-fill adds them, and the prefill runner still leaves tracking out"
        )
    result = module
    for method in methods:
        if _is_crashing(method):
            edits = _guard(method)
            if found is Shape.UNTRACKED:
                edits |= _inert_fill(method)
            result = _replaced(result, method.owner, edits)
    return Edit(found, _formatted(text, result.bytes, format_as))


def by_hand(text: bytes) -> str:
    """The edit in words, with the file's own names where they can be read."""
    try:
        method = _methods(_parse(text))[0]
        batch, graph = method.batch, method.graph
    except (RefusedError, IndexError):
        batch, graph = "forward_batch", "on_graph_path"
    return (
        f"By hand: in {REFRESH}, before the first use of {batch}.{PREFIX_LENS} and after the inert "
        f"fill, bind it to a local; where that local is None and {graph} is true, set it to "
        f"torch.zeros_like({batch}.mamba_track_seqlens); use the local from there on."
    )


# ---------------------------------------------------------------------------------- reading


class _Method:
    """One definition of the refresh, what it calls its arguments, and the nodes in it."""

    def __init__(self, module: cst.Module, owner: cst.ClassDef, node: cst.FunctionDef):
        params = node.params
        names = [
            param.name.value
            for param in (*params.posonly_params, *params.params, *params.kwonly_params)
        ]
        if len(names) < 3:
            raise RefusedError(f"{REFRESH} takes {names}: which one says it is on a graph path?")
        self.module, self.owner, self.node = module, owner, node
        self.host, self.batch = names[:2]
        self.graph = "on_graph_path" if "on_graph_path" in names[2:] else names[2]
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes = list(_walk(node, self.parents))
        self.order = {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def loads(self) -> list[cst.CSTNode]:
        """Every ``BATCH.extend_prefix_lens``."""
        return [node for node in self.nodes if _is_field(node, self.batch, PREFIX_LENS)]

    @cached_property
    def binding(self) -> cst.Assign | cst.AnnAssign | None:
        """The first ``NAME = BATCH.extend_prefix_lens``, with no other target."""
        for load in self.loads:
            assign = self.parents[load]
            if isinstance(assign, cst.AnnAssign) and isinstance(assign.target, cst.Name):
                return assign
            if (
                isinstance(assign, cst.Assign)
                and len(assign.targets) == 1
                and isinstance(assign.targets[0].target, cst.Name)
            ):
                return assign
        return None

    @property
    def local(self) -> str | None:
        """The local that holds the prefix lengths."""
        return None if self.binding is None else _bound_names(self.binding)[0]

    @cached_property
    def none_tests(self) -> list[cst.CSTNode]:
        """Comparisons of the prefix lengths, or of their local, with None."""
        return [
            node
            for node in self.nodes
            if isinstance(node, cst.Comparison)
            and len(node.comparisons) == 1
            and isinstance(node.comparisons[0].operator, cst.Is | cst.IsNot)
            and _is_name(node.comparisons[0].comparator, "None")
            and (
                _is_field(node.left, self.batch, PREFIX_LENS)
                or (self.local is not None and _is_name(node.left, self.local))
            )
        ]

    @cached_property
    def guards(self) -> list[cst.CSTNode]:
        """Where the prefix lengths are replaced if they are None and this is the graph path."""
        return [
            node
            for node in self.nodes
            if isinstance(node, cst.If | cst.IfExp)
            and self._asks_for_missing_on_graph(node)
            and (isinstance(node, cst.IfExp) or self._binds_local(node.body))
            # A second call on one batch finds the mask filled, and passes the fill's branch by.
            and not any(
                isinstance(outer, cst.If) and any(fill in _walk(outer) for fill in self.fills)
                for outer in self.path(node)
            )
        ]

    def _asks_for_missing_on_graph(self, node: cst.If | cst.IfExp) -> bool:
        test = node.test
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            sides = (test.left, test.right)
            return any(none in sides for none in self.none_tests) and any(
                _is_name(side, self.graph) for side in sides
            )
        return test in self.none_tests and any(
            isinstance(outer, cst.If)
            and _is_name(outer.test, self.graph)
            and node in _walk(outer.body)
            for outer in self.path(node)
        )

    def _binds_local(self, body: cst.CSTNode) -> bool:
        return any(self.local in _bound_names(node) for node in _walk(body))

    @cached_property
    def fills(self) -> list[cst.CSTNode]:
        """Where a mask is put into the batch."""
        return [
            node
            for node in self.nodes
            if (
                isinstance(node, cst.AssignTarget)
                and _is_field(node.target, self.batch, "mamba_track_mask")
            )
            # The fill that this module writes is a loop of setattr.
            or (
                isinstance(node, cst.Call)
                and _is_name(node.func, "setattr")
                and node.args
                and _is_name(node.args[0].value, self.batch)
            )
        ]

    @property
    def is_exempt(self) -> bool:
        """Whether it returns where it is asked for draft-extend."""
        return any(
            isinstance(node, cst.If)
            and _ends_in_return(node)
            and any(
                isinstance(inner, cst.Call)
                and isinstance(inner.func, cst.Attribute)
                and inner.func.attr.value.startswith("is_draft_extend")
                for inner in _walk(node.test)
            )
            for node in self.nodes
        )

    def path(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The nodes from the method down to ``node``."""
        path = [node]
        while path[-1] is not self.node:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def refused(self, node: cst.CSTNode, reason: str) -> RefusedError:
        """The error for something at ``node``."""
        from libcst.metadata import MetadataWrapper, PositionProvider

        positions = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        return RefusedError(f"line {positions[node].start.line}: {reason}")


def _parse(text: bytes) -> cst.Module:
    if len(text) > MAX_BYTES:
        raise RefusedError(f"the file has {len(text)} bytes; this edits at most {MAX_BYTES}")
    _check_python(text)
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise RefusedError(f"not Python at line {error.raw_line}: {error.message}") from None
    except (UnicodeDecodeError, LookupError, ValueError) as error:
        raise RefusedError(f"cannot be read as text: {error}") from None
    if module.bytes != text:
        raise RefusedError("its bytes cannot be reproduced; are its line ends a lone CR?")
    return module


def _check_python(text: bytes) -> None:
    """Refuse what LibCST would die of: its parser overflows the stack on deep expressions."""
    deep = RefusedError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            level: list[ast.AST] = [ast.parse(text)]
    except SyntaxError as error:
        place = "" if error.lineno is None else f" at line {error.lineno}"
        raise RefusedError(f"not Python{place}: {error.msg}") from None
    except ValueError as error:
        raise RefusedError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise deep from None
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise deep


def _walk(
    node: cst.CSTNode, parents: dict[cst.CSTNode, cst.CSTNode] | None = None
) -> Iterator[cst.CSTNode]:
    """``node`` and all below it, statements in the order of the text."""
    yield node
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        for child in value if isinstance(value, tuple | list) else (value,):
            if isinstance(child, cst.CSTNode):
                if parents is not None:
                    parents[child] = node
                yield from _walk(child, parents)


def _methods(module: cst.Module) -> list[_Method]:
    """Every definition of the refresh in a class of the module's top level, or under an ``if``."""
    owners = [node for node in module.body if isinstance(node, cst.ClassDef)]
    for compound in module.body:
        if isinstance(compound, cst.If | cst.Try):
            owners += [node for node in _walk(compound) if isinstance(node, cst.ClassDef)]
    return [
        _Method(module, owner, node)
        for owner in owners
        for node in owner.body.body
        if isinstance(node, cst.FunctionDef) and node.name.value == REFRESH
    ]


def _is_name(node: cst.CSTNode, value: str) -> bool:
    return isinstance(node, cst.Name) and node.value == value


def _is_field(node: cst.CSTNode, owner: str, name: str) -> bool:
    return (
        isinstance(node, cst.Attribute)
        and _is_name(node.value, owner)
        and _is_name(node.attr, name)
    )


def _names_field(node: cst.CSTNode) -> bool:
    """Whether this reads the prefix lengths of anything, or spells the field's name in full."""
    return (isinstance(node, cst.Attribute) and _is_name(node.attr, PREFIX_LENS)) or (
        isinstance(node, cst.SimpleString) and node.raw_value == PREFIX_LENS
    )


def _bound_names(assign: cst.CSTNode) -> list[str]:
    """The plain names that an assignment binds."""
    if isinstance(assign, cst.Assign):
        targets: list[cst.CSTNode] = [target.target for target in assign.targets]
    elif isinstance(assign, cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For | cst.CompFor):
        targets = [assign.target]
    elif isinstance(assign, cst.AsName):
        targets = [assign.name]
    else:
        return []
    # A field or an item that is assigned to binds no name.
    return [
        node.value
        for target in targets
        if not isinstance(target, cst.Attribute | cst.Subscript)
        for node in _walk(target)
        if isinstance(node, cst.Name)
    ]


def _is_crashing(method: _Method) -> bool:
    return bool(method.loads) and not method.guards and not method.is_exempt


def _shape(methods: Sequence[_Method]) -> Shape:
    # An override that only calls its base says nothing; the base does.
    methods = [method for method in methods if method.loads]
    crashing = [method for method in methods if _is_crashing(method)]
    if crashing:
        return Shape.CRASHING if all(m.fills for m in crashing) else Shape.UNTRACKED
    if not methods:
        return Shape.ABSENT
    return Shape.EXEMPT if any(m.is_exempt for m in methods) else Shape.GUARDED


# ---------------------------------------------------------------------------------- editing


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
        node.visit(replacer) if any(inner in edits for inner in _walk(node)) else node
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


def _guard(method: _Method) -> _Edits:
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
            raise method.refused(fill, f"the inert fill comes after {PREFIX_LENS} is read")
    comment = "# A capture batch has no prefix lengths. None of its rows is tracked: zeros do.\n"
    binding = f"{local} = {method.batch}.{PREFIX_LENS}\n"
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
            raise method.refused(load, f"{PREFIX_LENS} is read before {local} is bound")
        edits[load] = _Replacement(cst.Name(local))
    return edits


def _check_names(method: _Method) -> None:
    """Refuse what would make the guard's names mean something else."""
    if method.none_tests:
        raise method.refused(
            method.none_tests[0], f"a missing {PREFIX_LENS} is treated here already, another way"
        )
    for node in method.nodes:
        if _names_field(node) and node not in method.loads:
            raise method.refused(node, f"{PREFIX_LENS} is read through another name")
        if isinstance(node, cst.AssignTarget | cst.AugAssign | cst.Del) and any(
            load in _walk(node) for load in method.loads
        ):
            raise method.refused(node, f"{PREFIX_LENS} of the batch is assigned")
        names = _bound_names(node)
        if method.batch in names or method.graph in names:
            raise method.refused(node, f"{' and '.join(names)} is assigned anew")
        if method.local in names and node is not method.binding:
            raise method.refused(node, f"{method.local} is assigned twice")
        if isinstance(node, cst.Del | cst.Global | cst.Nonlocal):
            raise method.refused(node, "names are unbound or shared here")
        if (
            isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef)
            and node is not method.node
            and any(load in _walk(node) for load in method.loads)
        ):
            raise method.refused(node, f"an inner function reads {PREFIX_LENS}")


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


def _unused(method: _Method, names: Sequence[str]) -> str:
    used = {node.value for node in method.nodes if isinstance(node, cst.Name)}
    for name in names:
        if name not in used:
            return name
    raise RefusedError(f"{REFRESH} uses the names {' and '.join(names)} for something else")


def _common_statement(method: _Method) -> tuple[cst.CSTNode, cst.CSTNode]:
    """The innermost block that holds every load, and its first statement with one."""
    paths = [method.path(load) for load in method.loads]
    common = [nodes[0] for nodes in zip(*paths, strict=False) if len({*map(id, nodes)}) == 1]
    blocks = [node for node in common if isinstance(node, cst.IndentedBlock)]
    if not blocks:
        raise method.refused(method.node, "the whole method is on one line")
    below = paths[0].index(blocks[-1]) + 1
    return blocks[-1], min((path[below] for path in paths), key=method.order.__getitem__)


def _inert_fill(method: _Method) -> _Edits:
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

    alloc = _only(list(_walk(method.owner)), _allocates_rows, f"allocation of {STATIC_ROWS}")
    host = next(node.value for node in _walk(alloc) if isinstance(node, cst.Name))
    rows = f"{host}.{STATIC_ROWS}[:, 0]"
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
        and _is_field(test.left, batch, "mamba_track_mask")
        and len(test.comparisons) == 1
        and isinstance(test.comparisons[0].operator, cst.Is)
        and _is_name(test.comparisons[0].comparator, "None")
        and _ends_in_return(node)
    )


def _ends_in_return(node: cst.If) -> bool:
    """Whether the last statement of the ``if`` is a return of nothing."""
    last = node.body.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, cst.Return) and (last.value is None or _is_name(last.value, "None"))


def _allocates_rows(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.SimpleStatementLine) or not isinstance(node.body[0], cst.Assign):
        return False
    targets = [target.target for target in node.body[0].targets]
    return any(isinstance(t, cst.Attribute) and t.attr.value == STATIC_ROWS for t in targets)


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
