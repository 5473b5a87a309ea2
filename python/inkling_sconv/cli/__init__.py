"""The command ``inkling-sconv``: one file a command, for parsing and printing only.

A command imports what it needs when it runs, so ``--help`` answers within a second.
"""

from typing import Annotated

import typer

from inkling_sconv import __version__
from inkling_sconv.cli.apply import apply
from inkling_sconv.cli.ci_init import ci_init
from inkling_sconv.cli.doctor import doctor
from inkling_sconv.cli.export import export
from inkling_sconv.cli.revert import revert
from inkling_sconv.cli.tiny import tiny
from inkling_sconv.cli.verify import verify
from inkling_sconv.cli.watch import watch

app = typer.Typer(
    help="Check how an SGLang tree tracks Inkling's conv state under CUDA graphs, and fix it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(apply)
app.command()(export)
app.command()(revert)
app.command()(verify)
# tiny has a parser of its own: ``python -m inkling_sconv.tiny`` runs it without Typer.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(tiny)
app.command(name="ci-init")(ci_init)
app.command()(watch)


@app.callback(invoke_without_command=True)
def print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle the options that come before a command."""
    if version:
        print(__version__)
        raise typer.Exit
