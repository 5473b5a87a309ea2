"""Wrong versions of our own method, each with the rule of docs/contract.md whose tests must fail.

``test/unit/test_mutants.py`` runs them inside the crashing fork. An edit names a definition and
replaces text of it as ``ast.unparse`` writes it, so that layout and comments do not matter.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inkling_sconv.ops import track_conv_indices as ops
from inkling_sconv.plugin import backend as plugin_backend

HERE = Path(__file__).resolve().parent

FORMULA = "track_conv_indices_ref"
REFRESH = "_refresh_track_conv_indices"
INERT = "InertTracking"
EXEMPT = "_is_exempt"


@dataclass(frozen=True)
class Mutant:
    """``edits`` are old text, new text, and so on; each old text stands once in ``definition``."""

    name: str
    rule: str
    definition: str
    edits: tuple[str, ...]

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
        for old, new in zip(self.mutant.edits[::2], self.mutant.edits[1::2], strict=True):
            assert text.count(old) == 1, f"{self.mutant.name}: {text.count(old)} places of {old!r}"
            text = text.replace(old, new)
        return ast.parse(text).body[0]


def read_table(table: dict[tuple[str, str], dict[str, tuple[str, ...]]]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(name, rule, definition, edits)
        for (definition, rule), mutants in table.items()
        for name, edits in mutants.items()
    )


EARLY = "forward_batch.mamba_track_mask is None and (not on_graph_path or "
GUARD = "prefix_lens is None and on_graph_path"
FORGET = "metadata.track_conv_indices = None"
FILL = ".fill(forward_batch, rows)"
UNMASKED = "rows > 0 and (not InertTracking.owns(forward_batch.mamba_track_mask))"
DESTINATIONS = "metadata.track_cache_indices = forward_batch.mamba_track_indices"
SEQLENS = "track_seqlens = forward_batch.mamba_track_seqlens"
SET = "metadata.track_conv_indices = track_conv_indices("
BOUND = "rows > buffer.shape[0]"
EXEMPTION = "exempt and forward_batch.forward_mode.is_draft_extend_v2()"
LAST = "query_start_loc[-1:].to(torch.int64) - 1"

REJECTED_DESIGNS = read_table(
    {
        (REFRESH, "rule 2"): {
            "revert #34043": (EARLY, f"{EARLY}True or "),
            "return early for prefill": (
                EARLY,
                f"{EARLY}forward_batch.forward_mode.name == 'EXTEND' or ",
            ),
        },
        (REFRESH, "rule 4"): {
            "guard on None alone": (
                *(GUARD, "prefix_lens is None"),
                *(UNMASKED, f"on_graph_path and {UNMASKED}"),
            ),
        },
        (REFRESH, "rule 8"): {
            "guard inside the inert fill": (
                *("out = None", "out = None; filled = False"),
                *(FILL, f"{FILL}; filled = True"),
                *(GUARD, "prefix_lens is None and filled"),
            ),
        },
    }
)

NO_GUARD, *OTHERS = read_table(
    {
        (REFRESH, "rule 3"): {
            "no guard": (GUARD, "False"),
            "prefix written into the batch": (
                SET,
                "if prefix_lens is None: forward_batch.extend_prefix_lens = track_seqlens * 0"
                f"\n    {SET}",
            ),
        },
        (FORMULA, "formula"): {
            "no lower clamp": (
                "(ends[:, None] + offsets).clamp_(min=0)",
                "ends[:, None] + offsets",
            ),
            "no upper clamp": ("last_token, out=", "last_token + (1 << 40), out="),
            "truncating division": ("'floor'", "'trunc'"),
            "no chunk alignment": ("[:live] + aligned", "[:live] + tracked"),
            "prefix added": ("tracked - prefix_lens", "tracked + prefix_lens"),
            "prefix ignored": ("tracked - prefix_lens[:live]", "tracked"),
            "window one row late": ("arange(-window, 0,", "arange(1 - window, 1,"),
            "window backwards": ("arange(-window, 0,", "arange(-1, -window - 1, -1,"),
            "int32 indices": ("window), dtype=torch.int64", "window), dtype=torch.int32"),
        },
        (FORMULA, "rule 3"): {
            "prefix of ones": (
                "to(torch.int64)\n",
                "to(torch.int64) - (prefix_lens is None)\n",
            ),
        },
        (FORMULA, "rule 6"): {
            "tail not zeroed": ("out[live:].zero_()", "pass"),
            "live ignores prefix lengths": ("live = min(live, prefix_lens.shape[0])", "pass"),
            "live ignores track seqlens": ("min(rows, track_seqlens.shape[0])", "rows"),
        },
        (FORMULA, "rule 7"): {
            "last token read on the host": (LAST, f"{LAST} + 0 * int(query_start_loc[-1])"),
        },
        (FORMULA, "rule 10"): {"no tokens gives -1": ("- 1).clamp_(min=0)", "- 1)")},
        (REFRESH, "rule 1"): {
            "no early return": (EARLY, f"False and {EARLY}"),
            "early return keeps old indices": (FORGET, "pass"),
        },
        (REFRESH, "rule 2"): {
            "destinations not inert": (DESTINATIONS, "pass"),
            "destinations made up": ("hasattr(metadata, TRACK_CACHE_INDICES)", "True"),
            "live destinations overwritten": (
                SEQLENS,
                f"{SEQLENS}\n    if hasattr(metadata, TRACK_CACHE_INDICES): {DESTINATIONS}",
            ),
        },
        (INERT, "rule 2"): {
            "inert mask True": ("self.mask = torch.zeros(", "self.mask = torch.ones("),
            "inert indices not the dummy slot": (
                "self.indices = torch.z",
                "self.indices = 1 + torch.z",
            ),
            "inert indices left out": ("forward_batch.mamba_track_indices = ", "ignored = "),
            "inert fields allocated per call": ("self.mask[:rows]", "self.mask[:rows].clone()"),
        },
        (EXEMPT, "rule 2"): {
            "exempt for every mode": (EXEMPTION, "exempt"),
            "exempt though inert is asked for": ("exempt and", "True and"),
        },
        (REFRESH, "rule 4"): {
            "guard inverted": (GUARD, "prefix_lens is None and not on_graph_path")
        },
        (REFRESH, "rule 5"): {
            "buffer reallocated": ("out = buffer[:rows]", "out = buffer[:rows].clone()"),
            "eager writes the graph buffer": (
                "out = None",
                "out = getattr(self, STATIC_INDICES)[:rows]",
            ),
            "bound not checked": (BOUND, "False"),
            "bound off by one": (BOUND, "rows >= buffer.shape[0]"),
        },
        (REFRESH, "rule 9"): {
            "unmasked rows accepted": (UNMASKED, "False"),
            "zero rows refused": (UNMASKED, UNMASKED.removeprefix("rows > 0 and ")),
        },
        (INERT, "rule 9"): {
            "own mask only": ("(self.mask, host_mask)", "(self.mask,)"),
            "addresses never forgotten": ("= weakref.WeakValueDictionary()", "= {}"),
        },
        (REFRESH, "rule 10"): {
            "missing seqlens accepted": ("if track_seqlens is None", "if False")
        },
        (REFRESH, "rule 11"): {
            "exempt keeps old indices": (FORGET, f"if not on_graph_path: {FORGET}"),
            "exempt drops the slots": (
                FORGET,
                f"{FORGET}; forward_batch.mamba_track_indices = None",
            ),
            "exempt drops the destinations": (
                FORGET,
                f"{FORGET}; metadata.track_cache_indices = None",
            ),
            "exempt fills the inert fields": (
                FORGET,
                f"{FORGET}; on_graph_path and self._inkling_sconv_inert{FILL}",
            ),
            "exempt checks the bound": (
                FORGET,
                f"{FORGET}; assert rows <= getattr(self, STATIC_INDICES).shape[0]",
            ),
        },
        (REFRESH, "formula"): {
            "exempt ignores the mask": (
                f"{EARLY}_is_exempt(",
                "forward_batch.mamba_track_mask is None and not on_graph_path or (_is_exempt(",
            ),
        },
        (EXEMPT, "rule 11"): {
            "never exempt": (EXEMPTION, "False"),
            "older backend not exempt": ("draft_extend', True)", "draft_extend', False)"),
        },
        ("_alloc_inert_tracking", "rule 11"): {
            "not exempt by default": ("bool=True", "bool=False")
        },
    }
)

CONTROLS = read_table(
    {(REFRESH, ""): {"unchanged method": ()}, (FORMULA, ""): {"unchanged formula": ()}}
)
"""Built like the mutants, without an edit: every test passes, or the others prove nothing."""

MUTANTS = (*REJECTED_DESIGNS, NO_GUARD, *OTHERS)


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
