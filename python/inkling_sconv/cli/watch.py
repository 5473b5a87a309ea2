"""``inkling-sconv watch``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from inkling_sconv.cli.common import HEALTHY, NEEDS_THE_FIX, AsJson, one_line_errors


def watch(
    release: Annotated[
        str | None, typer.Option(metavar="X", help="Look at this release only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for SGLang releases newer than the last one that is known, and ask each for its state.

    Exit 0: nothing is new; 1: something is new or not recognised; 2: could not tell.
    """
    from inkling_sconv.trees.watch import look_for_releases

    def say(what: str) -> None:
        if not as_json:
            print(f"{what} ...", flush=True)

    with one_line_errors():
        answer = look_for_releases(_examine_wheel, say, release)
    print(json.dumps(answer.as_dict()) if as_json else f"{answer.title}\n\n{answer.body}")
    raise typer.Exit(NEEDS_THE_FIX if answer.new else HEALTHY)


def _examine_wheel(wheel: Path) -> dict[str, Any]:
    """The report of a wheel; with the syntax tree's state where its class could not be run."""
    from inkling_sconv.cli.doctor import read_statically
    from inkling_sconv.codemod.shape import RefusedError
    from inkling_sconv.trees.examine import examine_tree
    from inkling_sconv.trees.tree import AbsentError, TreeError, open_tree

    with open_tree(wheel) as tree:
        try:
            report = examine_tree(tree, installed=False)
            if report["state"] == "unknown":
                broken = [row["seen"] for row in report["rows"] if row["verdict"] == "broken"]
                report = {
                    "why": "; ".join(broken),
                    **report,
                    "static": read_statically(tree)["state"],
                }
        except AbsentError as error:
            return {"state": "absent", "why": str(error).removeprefix(f"{tree.root}: ")}
        except (TreeError, RefusedError) as error:
            return {"state": "unknown", "why": str(error).removeprefix(f"{tree.root}: ")}
        return report
