"""Wrong versions of the fixes, read from ``fix_mutants.txt``, and modules made of them.

Checks named for a fix are ``fix_scenarios.CHECKS``, which run in a tree. ``applying`` and
``choosing`` are in ``test/unit/test_fixes.py``.
"""

import ast
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from inkling_sconv.plugin import fixes, settings


class Mutant(NamedTuple):
    """``old`` stands once in the function ``definition``, as ``ast.unparse`` writes it."""

    name: str
    rule: str
    definition: str
    old: str = ""
    new: str = ""


def read_table() -> Iterator[Mutant]:
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("["):
            rule, definition = line.strip("[]").split(", ")
        elif line and not line.startswith("# "):
            name, edit = line.replace(r"\n", "\n").split(": ", 1)
            yield Mutant(name, rule, definition, *edit.split(" --> "))


MUTANTS = tuple(read_table())
CONTROL = Mutant("unchanged", "", "")
"""Built like the mutants, without an edit: every check passes, or the others prove nothing."""


def build(mutant: Mutant) -> Any:
    """A copy of the module ``fixes`` with ``mutant`` in it, or in its ``read_fix_names``."""
    module = _copy(fixes, mutant)
    if mutant.definition == "read_fix_names":
        module.read_fix_names = _copy(settings, mutant).read_fix_names
    return module


def _copy(original: types.ModuleType, mutant: Mutant) -> Any:
    tree = ast.parse(inspect.getsource(original))
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name == mutant.definition:
            text = ast.unparse(node)
            assert text.count(mutant.old) == 1, f"{mutant.name}: not one place of {mutant.old!r}"
            tree.body[place : place + 1] = ast.parse(text.replace(mutant.old, mutant.new)).body
    module = types.ModuleType(original.__name__)
    exec(compile(tree, f"<{mutant.name}>", "exec"), vars(module))
    return module
