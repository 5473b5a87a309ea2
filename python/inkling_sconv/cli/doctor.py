"""``inkling-sconv doctor``."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any

import typer

from inkling_sconv import names
from inkling_sconv.cli.common import (
    COULD_NOT_TELL,
    HEALTHY,
    NEEDS_THE_FIX,
    AsJson,
    Readable,
    one_line_errors,
)
from inkling_sconv.trees.tree import Tree

STYLES = {"holds": "green", "limit": "yellow", "broken": "red"}


def doctor(
    path: Readable = None,
    static: Annotated[
        bool, typer.Option("--static", help="Judge from the syntax tree alone; import nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a tree for the whole contract, on CPU tensors.

    Exit 0: healthy; 1: needs the fix; 2: could not tell.

    Without TREE, SGLang's plugins are loaded first: the answer is what a server would run.
    """
    from inkling_sconv.trees.tree import open_tree

    with one_line_errors(), open_tree(path) as tree:
        report = read_statically(tree) if static else examine(tree, installed=path is None)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    raise typer.Exit(report["exit"])


def read_statically(tree: Tree) -> dict[str, Any]:
    """The report of a tree that was not run."""
    from inkling_sconv.codemod.shape import Shape, read_shape

    found = read_shape(tree.backend.read_bytes())
    codes = {Shape.GUARDED: HEALTHY, Shape.EXEMPT: HEALTHY, Shape.ABSENT: COULD_NOT_TELL}
    return {
        "tree": str(tree.root),
        "how": "from the syntax tree alone; nothing was run",
        "state": found.value,
        "setting": "",
        "exit": codes.get(found, NEEDS_THE_FIX),
        "rows": [],
    }


def examine(tree: Tree, *, installed: bool) -> dict[str, Any]:
    """The report of a tree that was run."""
    from inkling_sconv.trees.examine import examine_tree

    report = examine_tree(tree, installed=installed)
    if installed:
        report["plugin"] = _plugin_state()
    if "backend" not in report:
        return report | {"exit": COULD_NOT_TELL}
    broken = any(row["verdict"] == "broken" for row in report["rows"])
    return report | {"exit": NEEDS_THE_FIX if broken else HEALTHY}


def _plugin_state() -> str:
    """What keeps our plugin out of a server of this Python, or that nothing does."""
    from inkling_sconv.plugin import settings

    if not settings.is_installed():
        return "its entry point is missing: pip install sglang-inkling-sconv"
    if not settings.is_allowed():
        return f"kept out by SGLANG_PLUGINS; add {names.PLUGIN} to it"
    values = {
        names.MODE_VARIABLE: "auto",
        names.FIXES_VARIABLE: "",
        names.DRAFT_EXTEND_VARIABLE: "",
    }
    values = {name: os.environ.get(name) or value for name, value in values.items()}
    return "loaded by servers, " + ", ".join(f"{n}={value}" for n, value in values.items() if value)


def _fix_for(row: dict[str, Any]) -> str:
    """The fix that mends a row that does not hold; empty where none does."""
    return "" if row["verdict"] == "holds" else row["fix"]


def _advice(report: dict[str, Any]) -> str:
    """What to change of the environment for the plugin to mend every row that a fix is for."""
    left = {*map(_fix_for, report["rows"])} - {""}
    if not left:
        return ""
    unset = []
    # A tree that was named is asked without plugins: no variable has kept it from being mended.
    if "plugin" in report:
        from inkling_sconv.plugin import settings

        variables = (names.MODE_VARIABLE, names.FIXES_VARIABLE, names.DRAFT_EXTEND_VARIABLE)
        mode, fixes, form = (os.environ.get(name, "").strip().lower() for name in variables)
        hindering = {
            "SGLANG_PLUGINS": not settings.is_allowed(),
            names.MODE_VARIABLE: mode == "off",
            names.FIXES_VARIABLE: fixes and not report["setting"],
            names.DRAFT_EXTEND_VARIABLE: form == "inert" and "draft-checkpoint" in left,
        }
        unset = [name for name, hinders in hindering.items() if hinders]
    steps = [f"unset {' and '.join(unset)}"] if unset else []
    steps += [f"set {report['setting']}"] if report["setting"] else []
    return ", ".join(steps)


def _next(report: dict[str, Any]) -> str:
    state, tree = report["state"], report["tree"]
    missing = re.search(
        r"No module named '([\w.]+)'|cannot import name .* from '([\w.]+)'", report.get("why", "")
    )
    if report["exit"] == COULD_NOT_TELL and missing:
        module = (missing[1] or missing[2]).split(".")[0]
        which = "" if missing[1] else " in the version that this SGLang pins"
        static = f"inkling-sconv doctor --static {tree}"
        return f"pip install {module}{which}, or judge without it: {static}"
    if report["exit"] == COULD_NOT_TELL:
        return f"inkling-sconv doctor --static {tree}"
    advice = _advice(report)
    if report["exit"] == HEALTHY and advice:
        return f"it starts and is safe; for more accepted tokens (docs/fixes.md), {advice}"
    if report["exit"] == HEALTHY:
        return "nothing: it starts and is safe"
    if state == "crashing":
        apply = f"inkling-sconv apply --diff {tree}"
        return f"{advice}, or {apply}" if advice and "plugin" in report else apply
    if state == "untracked":
        return advice or (
            "SGLang 0.5.18 or newer, or the plugin, which mends the runner; apply --inert-fill "
            "brings the method's half, not the runner's"
        )
    if advice:
        return f"{advice} for servers, or cherry-pick what stands beside the broken rows"
    return "read the broken rows: apply knows no edit for them"


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if report["rows"]:
        table = Table(title=f"{report['backend']} in {report['tree']}")
        for heading in ("", "asked", "upstream", "seen"):
            table.add_column(heading, overflow="fold")
        for row in report["rows"]:
            verdict = Text(row["verdict"], style=STYLES[row["verdict"]])
            fix = f"; mended by {_fix_for(row)}" if _fix_for(row) else ""
            table.add_row(verdict, row["asked"], row["change"], Text(row["seen"] + fix))
        console.print(table)
        limits = sum(row["verdict"] == "limit" for row in report["rows"])
        if limits and report["exit"] == HEALTHY:
            limit = "limit" if limits == 1 else "limits"
            print(f"{limits} {limit}: known, and harmless to what the server answers")
    if "plugin" in report:
        print(f"plugin: {report['plugin']}")
    why = f" ({report['why']})" if "why" in report else ""
    bare = f", {report['bare']} without plugins" if "bare" in report else ""
    how = f", {report['how']}" if "how" in report else ""
    print(f"state: {report['state']}{why}{bare}{how}")
    print(f"next: {_next(report)}")
