"""The fixes around the backend: which are applied where, what they change and do."""

import importlib
import itertools
import logging
import os
import sys
import types
from dataclasses import replace
from typing import Any
from unittest import mock

import fix_mutants
import fix_scenarios
import pytest
import releases
import torch
from inkling_sconv import __version__
from inkling_sconv.plugin import fixes
from test_releases import ATTRIBUTES, FIXES, METHODS, STATES

ALL = [fix.name for fix in fixes.FIXES]
ROWS, TRACKING, EXTEND, CHECKPOINT, WINDOW, STATE = ALL
HARMS = {
    "0.5.17": [name for name in ALL if name != EXTEND],
    releases.CRASHING: [CHECKPOINT, WINDOW, STATE],
    **{tree: [EXTEND, CHECKPOINT, WINDOW, STATE] for tree in ("0.5.18", "0.5.19")},
    **{tree: [EXTEND, CHECKPOINT, WINDOW] for tree in ("0.5.20", "0.5.21")},
    **{tree: [WINDOW] for tree in ("0.5.22", "0.5.23")},
}
APPLIED = {
    fix.name: f"WARNING {fix.name} ({fix.change}): {fix.harm}; fix applied." for fix in fixes.FIXES
}
OVERWRITES = (
    "the refresh overwrites its slots in draft-extend; left alone. "
    "It needs draft-extend, and INKLING_SCONV_DRAFT_EXTEND unset."
)


def list_changed(names: list[str]) -> list[str]:
    return sorted(attribute for name in names for attribute in ATTRIBUTES[name])


def read_log(seen: dict[str, Any]) -> list[str]:
    """The lines after the backend's own, with their levels and without our version."""
    return [line.replace(f"inkling_sconv {__version__}: ", "") for line in seen["log"][1:]]


# ---------------------------------------------------------------------------------- in a server

SERVERS = [
    *((tree, None, {}, FIXES[STATES[tree]], []) for tree in releases.TREES),
    *((tree, None, {"FIXES": ",".join(ALL)}, HARMS[tree], []) for tree in releases.TREES),
    *((tree, "off", {"FIXES": ",".join(ALL)}, [], []) for tree in ("0.5.17", "crashing")),
    (
        "0.5.17",
        None,
        {"FIXES": " Prefill-Rows , banana,apple"},
        [ROWS],
        [
            "WARNING INKLING_SCONV_FIXES: ignored unknown fix apple, banana; choose from "
            f"{', '.join(ALL)}, or none."
        ],
    ),
    ("0.5.20", None, {"FIXES": CHECKPOINT}, [], [f"WARNING {CHECKPOINT}: {OVERWRITES}"]),
    (
        "crashing",
        None,
        {"FIXES": f"{CHECKPOINT},{WINDOW}", "DRAFT_EXTEND": "inert"},
        [WINDOW],
        [f"WARNING {CHECKPOINT}: {OVERWRITES}"],
    ),
]


@pytest.mark.parametrize(("tree", "mode", "variables", "applied", "warnings"), SERVERS)
def test_servers(drive, tree, mode, variables, applied, warnings):
    variables = {f"INKLING_SCONV_{name}": value for name, value in variables.items()}
    seen = drive(tree, "fixes", mode, **variables)
    assert seen["needed"] == [HARMS[tree]] * 2 and seen["changed by asking"] == []
    # Without speculation, every release tracks.
    assert seen["tracks"] == [True, TRACKING not in HARMS[tree]]
    assert read_log(seen) == [*warnings, *(APPLIED[name] for name in applied)]
    grafted = METHODS if tree == releases.CRASHING and mode != "off" else []
    assert seen["changed"] == sorted([*grafted, *list_changed(applied)])
    assert seen["still needed"] == [name for name in HARMS[tree] if name not in applied]


@pytest.mark.parametrize("tree", ("0.5.17",))
def test_a_runner_that_cannot_be_run_is_one_line(drive, tree):
    seen = drive(tree, "fixes-fail", INKLING_SCONV_FIXES=",".join(ALL))
    assert read_log(seen) == [
        f"ERROR {ROWS} (#34184): LookupError: a fork of it; left alone.",
        APPLIED[TRACKING],
        f"ERROR {CHECKPOINT} (0.5.22): LookupError: a fork of it; left alone.",
        APPLIED[WINDOW],
        APPLIED[STATE],
    ]
    assert seen["changed"] == list_changed([TRACKING, WINDOW, STATE])


@pytest.mark.parametrize("tree", [tree for tree, needed in HARMS.items() if len(needed) > 1])
def test_fixed_methods(drive, tree):
    seen = drive(tree, "check-fixes")
    assert seen == {name: ["", [], [name], list_changed([name])] for name in HARMS[tree]}


@pytest.mark.parametrize("tree", ("0.5.17",))
def test_wrong_fixes_are_caught(drive, tree):
    seen = drive(tree, "check-wrong-fixes")
    # Those without an edit pass, or the others prove nothing.
    assert [name for name, failure in seen.items() if not failure] == ALL


# --------------------------------------------------------- applying one, and putting classes back

_serial = itertools.count()


def make_module() -> types.ModuleType:
    """A module with one runner that does harm, and a class that it took from elsewhere."""
    module = types.ModuleType(f"fake_runner_{next(_serial)}")
    exec("class Runner:\n    harm = 'done'\n    def load(self): pass", vars(module))
    vars(module)["Foreign"] = dict
    return module


def make_fix(module: types.ModuleType, name: str = "one", **fields: Any) -> fixes.Fix:
    """A fix that replaces the harm and adds an attribute."""

    def apply(module: types.ModuleType) -> None:
        module.Runner.harm = "none"
        module.Runner.added = True

    given = {
        "is_needed": lambda module: module.Runner.harm == "done",
        "apply": apply,
        "default_for": frozenset({"untracked"}),
        **fields,
    }
    return fixes.Fix(name, "#1", module.__name__, "it harms", **given)


def record_log(log: list[str]) -> Any:
    return lambda level, line: log.append(f"{logging.getLevelName(level)} {line}")


def check_applying(subject: Any) -> None:
    """``_apply_if_needed`` where it works, where nothing is wrong, and where it fails."""
    works = "WARNING one (#1): it harms; fix applied."
    fails = "ERROR one (#1): {}; left alone."
    calls = itertools.count()

    def fail(*_: Any) -> None:
        raise LookupError("a fork of it")

    def apply_half(module: types.ModuleType) -> None:
        module.Runner.harm = "none"
        module.Runner.added = True
        fail()

    def is_needed_on_the_cpu(module: types.ModuleType) -> bool:
        return torch.ones(1).is_cpu and module.Runner.harm == "done"

    for fields, line in (
        ({}, works),
        ({"is_needed": is_needed_on_the_cpu}, works),
        ({"is_needed": lambda _: False, "apply": fail}, None),
        ({"is_needed": lambda _: True}, fails.format("it does not help here")),
        ({"is_needed": fail}, fails.format("LookupError: a fork of it")),
        ({"apply": apply_half}, fails.format("LookupError: a fork of it")),
        (
            {"is_needed": lambda _: next(calls) == 0 or fail()},
            fails.format("LookupError: a fork of it"),
        ),
    ):
        module = make_module()
        before, log = dict(vars(module.Runner)), []
        with mock.patch.object(subject, "log", record_log(log)), torch.device("meta"):
            subject._apply_if_needed(make_fix(module, **fields), module)
        assert log == ([] if line is None else [line])
        assert (module.Runner.harm == "none") == (line == works)
        assert (dict(vars(module.Runner)) == before) == (line != works)


# ------------------------------------------------------------------------------ choosing by name

CHOOSE = "choose from steady, needy, rare, or none."
UNKNOWN = f"INKLING_SCONV_FIXES: ignored unknown fix %s; {CHOOSE}"
NO_LIST = f"INKLING_SCONV_FIXES names no known fix, so %s; {CHOOSE}"
DEFAULTS = NO_LIST % "the defaults stay on (steady, needy)"
# INKLING_SCONV_FIXES, the backend's state, whether each backend leaves draft-extend alone, the
# fixes that are applied, and the warning.
CHOICES = [
    *((value, "untracked", [True], ["steady", "needy"], None) for value in (None, "", " ")),
    *((None, "untracked", alone, ["steady"], None) for alone in ([False], [True, False])),
    (None, "guarded", [True], [], None),
    ("none", "untracked", [True], [], None),
    ("none,rare", "untracked", [True], ["rare"], None),
    (" Steady,NEEDY, ", "guarded", [True], ["steady", "needy"], None),
    *(
        ("steady,needy", "guarded", alone, ["steady"], f"needy: {OVERWRITES}")
        for alone in ([False], [True, False])
    ),
    ("rare,pear,banana", "untracked", [True], ["rare"], UNKNOWN % "banana, pear"),
    ("none,pear", "untracked", [True], [], UNKNOWN % "pear"),
    *(
        (value, "untracked", [True], ["steady", "needy"], DEFAULTS)
        for value in (",", " ; ", "steady;rare", "pear")
    ),
    (",", "guarded", [True], [], NO_LIST % "no fix is on"),
]


def check_choosing(subject: Any) -> None:
    """``install_fixes``: two fixes on by default, of which one needs the exemption, and one off."""
    for value, state, alone, applied, warning in CHOICES:
        modules = {name: make_module() for name in ("steady", "needy", "rare")}
        table = (
            make_fix(modules["steady"], "steady"),
            make_fix(modules["needy"], "needy", needs_draft_extend_exemption=True),
            make_fix(modules["rare"], "rare", default_for=frozenset()),
        )
        log: list[str] = []
        with (
            mock.patch.object(subject, "FIXES", table),
            mock.patch.object(subject, "leaves_draft_extend_alone", bool),
            mock.patch.object(subject, "log", record_log(log)),
            mock.patch.dict(os.environ, {} if value is None else {"INKLING_SCONV_FIXES": value}),
            mock.patch.dict(sys.modules, {m.__name__: m for m in modules.values()}),
        ):
            if value is None:
                os.environ.pop("INKLING_SCONV_FIXES", None)
            subject.install_fixes(alone, {state})
        assert [name for name, m in modules.items() if m.Runner.harm == "none"] == applied
        others = [line for line in log if not line.endswith("; fix applied.")]
        assert others == ([] if warning is None else [f"WARNING {warning}"])


CHECKS = {"applying": check_applying, "choosing": check_choosing}


@pytest.mark.parametrize("name", CHECKS)
def test_decisions(name):
    CHECKS[name](fixes)
    CHECKS[name](fix_mutants.build(fix_mutants.CONTROL))
    survivors = []
    for mutant in fix_mutants.MUTANTS:
        assert mutant.rule in CHECKS or mutant.rule in fix_scenarios.CHECKS
        if mutant.rule == name:
            wrong = fix_mutants.build(mutant)
            try:
                CHECKS[name](wrong)
                survivors.append(mutant.name)
            except Exception:
                continue
    assert survivors == []


def test_a_fix_waits_for_its_module(tmp_path, monkeypatch):
    name = f"fake_runner_{next(_serial)}"
    (tmp_path / f"{name}.py").write_text("class Runner:\n    harm = 'done'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("INKLING_SCONV_FIXES", raising=False)
    monkeypatch.setattr(fixes, "FIXES", (replace(make_fix(make_module()), module=name),))
    log: list[str] = []
    monkeypatch.setattr(fixes, "log", record_log(log))
    fixes.install_fixes([], {"untracked"})
    assert log == [] and name not in sys.modules
    assert importlib.import_module(name).Runner.harm == "none" and len(log) == 1
