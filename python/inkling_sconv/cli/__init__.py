"""The command ``inkling-sconv``. The files here only parse and print.

A command imports what it needs when it runs, so ``--help`` answers within a second.
"""

from typing import Annotated

import typer

from inkling_sconv import __version__
from inkling_sconv.cli.ci_init import ci_init
from inkling_sconv.cli.common import Commands
from inkling_sconv.cli.doctor import doctor
from inkling_sconv.cli.edit import apply, export, revert
from inkling_sconv.cli.verify import verify
from inkling_sconv.cli.watch import watch

app = typer.Typer(
    cls=Commands,
    help="Check how an SGLang tree tracks Inkling's conv state under CUDA graphs, and fix it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (doctor, apply, export, revert, verify, ci_init, watch):
    app.command()(command)


# It has a parser of its own: ``python -m inkling_sconv.tiny`` runs it without Typer.
@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def tiny(context: typer.Context) -> None:
    """Write a small Inkling checkpoint with MTP heads, without a download."""
    from inkling_sconv.proof import checkpoint

    raise typer.Exit(checkpoint.main(context.args))


@app.callback(invoke_without_command=True)
def print_version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle the options that come before a command."""
    if version:
        print(__version__)
        raise typer.Exit
