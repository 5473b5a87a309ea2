"""``inkling-sconv watch``."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from inkling_sconv.cli.common import HEALTHY, NEEDS_THE_FIX, AsJson


def watch(
    release: Annotated[
        str | None, typer.Option(metavar="X", help="Examine only this release.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for SGLang releases newer than the tested ones, and tell the state of each.

    Exit 0: nothing is new; 1: a release is new or not recognised; 2: could not tell.
    """
    from inkling_sconv.codemod.shape import read_shape
    from inkling_sconv.trees.watch import look_for_releases

    def print_progress(what: str) -> None:
        if not as_json:
            print(f"{what} ...", flush=True)

    answer = look_for_releases(lambda text: read_shape(text).value, print_progress, release)
    print(json.dumps(asdict(answer)) if as_json else f"{answer.title}\n\n{answer.body}")
    raise typer.Exit(NEEDS_THE_FIX if answer.new else HEALTHY)
