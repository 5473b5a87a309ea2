"""Arguments, exit codes and errors that several commands share."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from inkling_sconv.errors import Interrupted, give_reason, make_line

HEALTHY, NEEDS_THE_FIX, COULD_NOT_TELL = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that ask a command to end."""


def _declare_tree(kinds: str) -> Any:
    text = f"{kinds} Default: the installed SGLang."
    return typer.Argument(metavar="TREE", help=text, show_default=False)


Readable = Annotated[
    Path | None, _declare_tree("A checkout, a folder with sglang in it, or a wheel.")
]
Editable = Annotated[Path | None, _declare_tree("A checkout, or a folder with sglang in it.")]
InertFill = Annotated[
    bool, typer.Option("--inert-fill", help="Also add inert fields; untracked trees need them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Commands(TyperGroup):
    """The commands, with one handler for whatever happens in them."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run a command line, and exit; what could not be done is one line on stderr and exit 2."""
        try:
            code = super().main(*arguments, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except BaseException as error:
            code = _report(error)
        try:
            sys.stdout.flush()
        except OSError:
            # Python would try again when it ends, and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(code if isinstance(code, int) else HEALTHY)


def _report(error: BaseException) -> int:
    """Print one line about ``error``, and return the exit code."""
    if isinstance(error, SystemExit):
        if not isinstance(error.__context__, BrokenPipeError):
            return error.code if isinstance(error.code, int) else COULD_NOT_TELL
        # Typer exits with 1 then.
        error = error.__context__
    # Typer has its own copy of Click's errors: a wrong command line, or a request for help.
    if hasattr(error, "format_message"):
        message = error.format_message()
        if not message or "\n" in message:
            # The help, which Rich has printed already, or which is the message.
            print(message, end="", file=sys.stderr)
            return COULD_NOT_TELL
    else:
        message = give_reason(error)
    warn(message)
    return COULD_NOT_TELL


def prepare_process() -> None:
    """Let signals end the command in order, and let nothing fail at what a name contains."""
    for number in SIGNALS:
        # A signal that nohup ignores stays ignored.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    # A file must not get the number of a stream: what is meant for that would go into it.
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        warn("standard output is closed; nothing done")
        sys.exit(COULD_NOT_TELL)
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def ignore_signals() -> None:
    """Let no signal change what has been done and said."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, _: object) -> NoReturn:
    # A second signal must not keep the first from putting things back.
    ignore_signals()
    raise Interrupted(f"interrupted by {signal.Signals(number).name}")


def warn(message: str) -> None:
    """Print one line on stderr."""
    with contextlib.suppress(OSError):
        print(f"inkling-sconv: {make_line(message)}", file=sys.stderr, flush=True)


def fail(message: str, code: int = COULD_NOT_TELL) -> NoReturn:
    """Print one line on stderr and exit with ``code``."""
    warn(message)
    raise typer.Exit(code)
