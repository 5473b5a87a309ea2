"""``inkling-sconv doctor``."""

import json
import re
from typing import Annotated, Any

import typer

from inkling_sconv.cli import common
from inkling_sconv.cli.common import COULD_NOT_TELL, HEALTHY, NEEDS_THE_FIX
from inkling_sconv.errors import make_line
from inkling_sconv.trees.tree import Tree, open_tree

STYLES = {"holds": "green", "limit": "yellow", "broken": "red"}


def doctor(
    path: common.Readable = None,
    static: Annotated[
        bool, typer.Option("--static", help="Judge from the syntax tree alone; import nothing.")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Run a tree's class on CPU tensors, and check it against the whole contract.

    Exit 0: healthy; 1: needs the fix; 2: could not tell.

    Without TREE, SGLang's plugins are loaded first: the answer is about what a server would run.
    """
    with open_tree(path) as tree:
        report = _read_tree(tree) if static else _run_tree(tree, installed=path is None)
    if path is not None and path.suffix == ".whl":
        # It was unpacked into a folder that is gone by now.
        report["tree"] = str(path)
    if as_json:
        print(json.dumps(report))
    else:
        _print_report(report)
    raise typer.Exit(report["exit"])


def _read_tree(tree: Tree) -> dict[str, Any]:
    """Report what the syntax tree alone says."""
    from inkling_sconv.codemod.shape import read_shape

    state = read_shape(tree.backend.read_bytes()).value
    codes = {"guarded": HEALTHY, "exempt": HEALTHY, "absent": COULD_NOT_TELL}
    return {
        "tree": str(tree.root),
        "how": "from the syntax tree alone; nothing was run",
        "state": state,
        "setting": "",
        "exit": codes.get(state, NEEDS_THE_FIX),
        "rows": [],
    }


def _run_tree(tree: Tree, *, installed: bool) -> dict[str, Any]:
    """Report what the tree's class does when it runs."""
    from inkling_sconv.plugin.settings import describe_plugin
    from inkling_sconv.trees.examine import examine_tree

    report = examine_tree(tree, installed=installed)
    if installed:
        report["plugin"] = describe_plugin()
    if "backend" not in report:
        return report | {"exit": COULD_NOT_TELL}
    broken = any(row["verdict"] == "broken" for row in report["rows"])
    return report | {"exit": NEEDS_THE_FIX if broken else HEALTHY}


def _advise_environment(report: dict[str, Any]) -> str:
    """Describe what to change in the environment, so that the plugin applies missing fixes."""
    from inkling_sconv.plugin.settings import list_obstacles

    fixes = {row["fix"] for row in report["rows"] if row["verdict"] != "holds"} - {""}
    if not fixes:
        return ""
    setting = report["setting"]
    # A TREE is examined without plugins, so variables do not matter.
    obstacles = list_obstacles(fixes, setting) if "plugin" in report else []
    steps = [f"unset {' and '.join(obstacles)}"] if obstacles else []
    steps += [f"set {setting}"] if setting else []
    return ", ".join(steps)


def _advise(report: dict[str, Any]) -> str:
    """Describe what to do next."""
    state, tree = report["state"], report["tree"]
    if state == "absent":
        return "nothing to do: no Inkling backend here, unless your fork renamed its method"
    if report["exit"] == COULD_NOT_TELL:
        static = f"inkling-sconv doctor --static {tree}"
        pattern = r"No module named '([\w.]+)'|cannot import name .* from '([\w.]+)'"
        missing = re.search(pattern, report.get("why", ""))
        if not missing:
            return static
        module = (missing[1] or missing[2]).split(".")[0]
        which = "" if missing[1] else " (the version that this SGLang pins)"
        return f"pip install {module}{which}, or, without importing: {static}"
    advice = _advise_environment(report)
    if report["exit"] == HEALTHY and advice:
        return f"it starts and is safe. Optional, for more tokens a step (docs/fixes.md): {advice}"
    if report["exit"] == HEALTHY:
        return "nothing to do: it starts and is safe"
    if state == "crashing":
        if tree.endswith(".whl"):
            return "unpack the wheel, and run doctor on the folder"
        apply = f"inkling-sconv apply --diff {tree}"
        return f"{advice}, or {apply}" if advice and "plugin" in report else apply
    if state == "untracked":
        return advice or (
            "upgrade to SGLang 0.5.18 or newer, or install the plugin, which fixes the runner too; "
            "apply --inert-fill fixes the method alone"
        )
    if advice:
        return f"{advice} for servers, or cherry-pick the changes named beside the broken rows"
    return "read the broken rows; apply cannot fix them"


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    if report["rows"]:
        title = f"{report['backend']} in {report['tree']}"
        if console.is_terminal:
            _print_table(console, title, report["rows"])
        else:
            # A table would be cut to a width that nobody chose.
            print(make_line(title))
            for row in report["rows"]:
                change = f" ({row['change']})" if row["change"] else ""
                print(make_line(f"{row['verdict']}: {row['asked']}{change}: {_describe(row)}"))
        limits = sum(row["verdict"] == "limit" for row in report["rows"])
        if limits and report["exit"] == HEALTHY:
            print(f"limits: {limits}, known; the server's answers stay right")
    if "plugin" in report:
        print(make_line(f"plugin: {report['plugin']}"))
    why = f" ({report['why']})" if "why" in report else ""
    bare = f", {report['bare']} without plugins" if "bare" in report else ""
    how = f", {report['how']}" if "how" in report else ""
    print(make_line(f"state: {report['state']}{why}{bare}{how}"))
    print(make_line(f"next: {_advise(report)}"))


def _print_table(console: Any, title: str, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=make_line(title))
    for heading in ("", "check", "upstream", "found"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        verdict = Text(row["verdict"], style=STYLES[row["verdict"]])
        table.add_row(verdict, row["asked"], row["change"], Text(make_line(_describe(row))))
    console.print(table)


def _describe(row: dict[str, Any]) -> str:
    """Return what was seen, and the fix."""
    fixed = row["fix"] and row["verdict"] != "holds"
    return f"{row['seen']}; fixed by {row['fix']}" if fixed else str(row["seen"])
