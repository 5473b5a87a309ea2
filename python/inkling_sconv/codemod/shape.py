"""Classify a refresh from its source. Nothing is executed or written."""

import ast
import enum
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeGuard

# libcst.matchers and libcst.metadata would each double the import time.
import libcst as cst

from inkling_sconv.errors import UserError
from inkling_sconv.names import EXTEND_PREFIX_LENS, REFRESH, TRACK_MASK

MAX_DEPTH = 200


class RefusedError(UserError):
    """The file cannot be rewritten safely. The message says why, and at which line."""


class Shape(str, enum.Enum):
    """The state of a refresh by its syntax tree. ``probe.State`` is its state when it runs."""

    ABSENT = "absent"
    UNTRACKED = "untracked"
    CRASHING = "crashing"
    GUARDED = "guarded"
    EXEMPT = "exempt"


def read_shape(text: bytes) -> Shape:
    """Tell the state of a file's refresh from its syntax tree alone.

    Raises:
        RefusedError: the file is not Python, or is nested too deep.
    """
    return classify_methods(find_methods(parse(text)))


class RefreshMethod:
    """One definition of the refresh: its parameter names, and the nodes in it."""

    def __init__(self, module: cst.Module, owner: cst.ClassDef, node: cst.FunctionDef):
        params = (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
        names = [param.name.value for param in params]
        if len(names) < 3:
            raise RefusedError(f"{REFRESH} takes {names}; expected a third, the graph-path flag")
        self.module, self.owner, self.node = module, owner, node
        self.host, self.batch = names[:2]
        self.graph = "on_graph_path" if "on_graph_path" in names[2:] else names[2]
        self.nodes = list(walk(node))
        self.parents = {child: node for node in self.nodes for child in node.children}
        self.order = {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def loads(self) -> list[cst.CSTNode]:
        """Every ``BATCH.extend_prefix_lens``."""
        return [node for node in self.nodes if is_field(node, self.batch, EXTEND_PREFIX_LENS)]

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
        return None if self.binding is None else list_bound_names(self.binding)[0]

    @cached_property
    def none_tests(self) -> list[cst.CSTNode]:
        """Comparisons of the prefix lengths, or of their local, with None."""
        return [
            node
            for node in self.nodes
            if compares_with_none(node, cst.Is | cst.IsNot)
            and (
                is_field(node.left, self.batch, EXTEND_PREFIX_LENS)
                or (self.local is not None and is_name(node.left, self.local))
            )
        ]

    @cached_property
    def guards(self) -> list[cst.CSTNode]:
        """Each ``if``, or expression with one, that replaces missing lengths on the graph path."""
        return [
            node
            for node in self.nodes
            if isinstance(node, cst.If | cst.IfExp)
            and self._asks_for_missing_on_graph(node)
            and (
                isinstance(node, cst.IfExp)
                or any(self.local in list_bound_names(inner) for inner in walk(node.body))
            )
            # Not inside the fill's branch: a second call finds the mask set, and skips the branch.
            and not any(
                isinstance(outer, cst.If) and any(fill in walk(outer) for fill in self.fills)
                for outer in self.trace_path(node)
            )
        ]

    def _asks_for_missing_on_graph(self, node: cst.If | cst.IfExp) -> bool:
        test = node.test
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            sides = (test.left, test.right)
            return any(missing in sides for missing in self.none_tests) and any(
                is_name(side, self.graph) for side in sides
            )
        return test in self.none_tests and any(
            isinstance(outer, cst.If)
            and is_name(outer.test, self.graph)
            and node in walk(outer.body)
            for outer in self.trace_path(node)
        )

    @cached_property
    def fills(self) -> list[cst.CSTNode]:
        """Where the method puts an inert mask into the batch."""
        return [
            node
            for node in self.nodes
            if isinstance(node, cst.AssignTarget) and is_field(node.target, self.batch, TRACK_MASK)
        ]

    @property
    def is_exempt(self) -> bool:
        """Whether the method returns early for draft-extend."""
        return any(
            isinstance(node, cst.If)
            and ends_in_return(node)
            and any(
                isinstance(inner, cst.Attribute) and inner.attr.value.startswith("is_draft_extend")
                for inner in walk(node.test)
            )
            for node in self.nodes
        )

    def trace_path(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """List the nodes from the method down to ``node``."""
        path = [node]
        while path[-1] is not self.node:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def refuse(self, node: cst.CSTNode, reason: str) -> NoReturn:
        """Raise ``RefusedError`` with the line of ``node``."""
        from libcst.metadata import MetadataWrapper, PositionProvider

        positions = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        raise RefusedError(f"line {positions[node].start.line}: {reason}")


def parse(text: bytes) -> cst.Module:
    """Parse ``text``, the bytes of a file.

    Raises:
        RefusedError: it is not Python, or its bytes could not be written back as they are.
    """
    _check_python(text)
    # LibCST walks a tree with up to twenty calls a level.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 25 * MAX_DEPTH))
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise RefusedError(f"not Python at line {error.raw_line}: {error.message}") from None
    except (UnicodeDecodeError, LookupError, ValueError) as error:
        raise RefusedError(f"cannot be read as text: {error}") from None
    if module.bytes != text:
        raise RefusedError("cannot reproduce its bytes; does it have CR-only line ends?")
    return module


def _check_python(text: bytes) -> None:
    """Refuse what would kill LibCST: its parser overflows the stack on deep expressions."""
    too_deep = RefusedError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            level: list[ast.AST] = [ast.parse(text, "the file")]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
    except (SyntaxError, ValueError) as error:
        raise RefusedError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise too_deep from None
    if level:
        raise too_deep


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield ``node`` and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        yield (node := pending.pop())
        pending += reversed(node.children)


def find_methods(module: cst.Module) -> list[RefreshMethod]:
    """Find every refresh, including classes under a top-level ``if`` or ``try``."""
    owners = [node for node in module.body if isinstance(node, cst.ClassDef)]
    for compound in module.body:
        if isinstance(compound, cst.If | cst.Try):
            owners += [node for node in walk(compound) if isinstance(node, cst.ClassDef)]
    return [
        RefreshMethod(module, owner, node)
        for owner in owners
        for node in owner.body.body
        if isinstance(node, cst.FunctionDef) and node.name.value == REFRESH
    ]


def is_name(node: cst.CSTNode, value: str) -> bool:
    """Whether ``node`` is the name ``value``."""
    return isinstance(node, cst.Name) and node.value == value


def is_field(node: cst.CSTNode, owner: str, name: str) -> bool:
    """Whether ``node`` is ``owner.name``."""
    return (
        isinstance(node, cst.Attribute) and is_name(node.value, owner) and is_name(node.attr, name)
    )


def compares_with_none(node: cst.CSTNode, operators: Any) -> TypeGuard[cst.Comparison]:
    """Whether ``node`` compares X with None by one of ``operators``."""
    return (
        isinstance(node, cst.Comparison)
        and len(node.comparisons) == 1
        and isinstance(node.comparisons[0].operator, operators)
        and is_name(node.comparisons[0].comparator, "None")
    )


def names_field(node: cst.CSTNode) -> bool:
    """Whether ``node`` reads the field from any object, or is a string with the field's name."""
    return (isinstance(node, cst.Attribute) and is_name(node.attr, EXTEND_PREFIX_LENS)) or (
        isinstance(node, cst.SimpleString) and node.raw_value == EXTEND_PREFIX_LENS
    )


def list_bound_names(assign: cst.CSTNode) -> list[str]:
    """List the plain names that an assignment binds."""
    if isinstance(assign, cst.Assign):
        targets: list[cst.CSTNode] = [target.target for target in assign.targets]
    elif isinstance(assign, cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For | cst.CompFor):
        targets = [assign.target]
    elif isinstance(assign, cst.AsName):
        targets = [assign.name]
    else:
        return []
    # An assignment to a field or an item binds no name.
    return [
        node.value
        for target in targets
        if not isinstance(target, cst.Attribute | cst.Subscript)
        for node in walk(target)
        if isinstance(node, cst.Name)
    ]


def is_crashing(method: RefreshMethod) -> bool:
    """Whether the method reads the prefix lengths without a guard."""
    return bool(method.loads) and not method.guards and not method.is_exempt


def classify_methods(methods: Sequence[RefreshMethod]) -> Shape:
    """Classify a file by its definitions of the refresh."""
    # An override that only calls its base does what the base does.
    methods = [method for method in methods if method.loads]
    crashing = [method for method in methods if is_crashing(method)]
    if crashing:
        return Shape.CRASHING if all(m.fills for m in crashing) else Shape.UNTRACKED
    if not methods:
        return Shape.ABSENT
    return Shape.EXEMPT if any(m.is_exempt for m in methods) else Shape.GUARDED


def ends_in_return(node: cst.If) -> bool:
    """Whether the last statement of the ``if`` returns None."""
    last = node.body.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, cst.Return) and (last.value is None or is_name(last.value, "None"))
