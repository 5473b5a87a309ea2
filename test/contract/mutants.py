"""Wrong versions of our own method, from ``mutants.txt``, and a class made of each.

``test/unit/test_mutants.py`` runs them inside the crashing fork. An edit is made in one definition
as ``ast.unparse`` writes it, so layout and comments do not matter.
"""

import ast
import contextlib
import importlib
import inspect
import io
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inkling_sconv.ops import track_conv_indices as ops
from inkling_sconv.plugin import backend as plugin_backend

HERE = Path(__file__).resolve().parent
FORMULA = "track_conv_indices_ref"


@dataclass(frozen=True)
class Mutant:
    """``edits`` are pairs of old and new text of ``definition``."""

    name: str
    rule: str
    definition: str
    edits: tuple[tuple[str, str], ...] = ()
    is_rejected_design: bool = False

    def edit(self, tree: ast.Module) -> ast.Module:
        """``tree`` with the edited definition in it."""
        return ast.fix_missing_locations(_Editor(self).visit(tree))


class _Editor(ast.NodeTransformer):
    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        if getattr(node, "name", "") != self.mutant.definition:
            return self.generic_visit(node)
        text = ast.unparse(node)
        for old, new in self.mutant.edits:
            assert text.count(old) == 1, f"{self.mutant.name}: {text.count(old)} places of {old!r}"
            text = text.replace(old, new.replace(r"\n", "\n    "))
        return ast.parse(text).body[0]


def read_table() -> Iterator[Mutant]:
    for line in (HERE / "mutants.txt").read_text().splitlines():
        if line.startswith("["):
            rule, definition, *rejected = line.strip("[]").split(", ")
        elif line and not line.startswith("# "):
            name, edits = line.split(": ", 1)
            pairs = tuple(tuple(edit.split(" --> ")) for edit in edits.split(" && "))
            yield Mutant(name, rule, definition, pairs, bool(rejected))


MUTANTS = tuple(read_table())
REJECTED_DESIGNS = tuple(mutant for mutant in MUTANTS if mutant.is_rejected_design)
(NO_GUARD,) = (mutant for mutant in MUTANTS if mutant.name == "no guard")
CONTROLS = (
    Mutant("unchanged method", "", "_refresh_track_conv_indices"),
    Mutant("unchanged formula", "", FORMULA),
)
"""Built like the mutants, without an edit: every test passes, or the others prove nothing."""


def build(wrong: Mutant, host: type, **form: bool) -> type:
    """A subclass of ``host`` that has our methods with ``wrong`` in them.

    ``form`` goes to ``_alloc_inert_tracking``; without it, that takes its default.
    """
    module: Any = types.ModuleType(plugin_backend.__name__)
    tree = ast.parse(inspect.getsource(plugin_backend))
    if wrong.definition != FORMULA:
        tree = wrong.edit(tree)
    exec(compile(tree, f"<{wrong.name}>", "exec"), vars(module))
    if wrong.definition == FORMULA:
        formula = dict(vars(ops))
        edited = wrong.edit(ast.parse(inspect.getsource(ops.track_conv_indices_ref)))
        exec(compile(edited, f"<{wrong.name}>", "exec", dont_inherit=True), formula)
        module.track_conv_indices = formula[FORMULA]
    ours = module.InklingSconvBackend

    def alloc(self: Any) -> None:
        super(subclass, self)._alloc_graph_buffers()
        ours._alloc_inert_tracking(self, **form)

    refresh = ours._refresh_track_conv_indices
    members = {"_alloc_graph_buffers": alloc, "_refresh_track_conv_indices": refresh}
    subclass = type(wrong.name, (host,), members)
    return subclass


class _Runner:
    """A pytest plugin that gives each mutant to the tests of its rule, until one of them fails."""

    def __init__(self, subjects: dict[Mutant, type]):
        self.subjects = subjects
        self.caught: dict[str, str] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = metafunc.function.__name__
        chosen = [
            pytest.param(cls, id=mutant.name)
            for mutant, cls in self.subjects.items()
            if not mutant.rule or name.startswith(f"test_{mutant.rule.replace(' ', '_')}_")
        ]
        metafunc.parametrize("subject", chosen, scope="session")

    def pytest_runtest_setup(self, item: Any) -> None:
        if item.callspec.params["subject"].__name__ in self.caught:
            pytest.skip("caught")

    def pytest_exception_interact(self, node: Any) -> None:
        if hasattr(node, "callspec"):
            self.caught.setdefault(node.callspec.params["subject"].__name__, node.originalname)


def run_all() -> dict[str, str]:
    """``{mutant: the test that caught it}``; run where SGLang is the crashing fork."""
    from inkling_sconv import names
    from inkling_sconv.probe.backend import find_backends
    from sglang.srt.plugins import load_plugins

    load_plugins()
    grafted = find_backends(importlib.import_module(names.BACKEND_MODULE))[0]
    bare = {
        name: inspect.unwrap(vars(grafted)[name])
        for name in (names.ALLOC_GRAPH_BUFFERS, names.REFRESH)
    }
    host = type("Host", (grafted,), bare)
    runner = _Runner({mutant: build(mutant, host) for mutant in (*CONTROLS, *MUTANTS)})
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, "--hypothesis-profile=mutants", str(HERE)], plugins=[runner])
    if code is not pytest.ExitCode.TESTS_FAILED:
        raise SystemExit(f"pytest did not run ({code!r}):\n{output.getvalue()}")
    return runner.caught
