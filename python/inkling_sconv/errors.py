"""The error that a command prints as one line, and one line for any other error."""

_EXTRA = ("libcst", "packaging", "requests", "rich", "typer")


class UserError(Exception):
    """An error that the user can fix. The message is one line: what, where, what to do."""


class Interrupted(BaseException):
    """A signal asked the command to end. The message names it."""


def describe_error(error: BaseException) -> str:
    """Return ``TYPE: MESSAGE``, like the last line of a traceback."""
    return f"{type(error).__name__}: {error}"


def give_reason(error: BaseException) -> str:
    """Say in a line why something could not be done. An unforeseen error says so."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRA:
        return f"{error.name} is not installed; pip install 'sglang-inkling-sconv[cli]'"
    if isinstance(error, UserError | Interrupted):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"unforeseen {describe_error(error)}; please report it"


def make_line(text: str) -> str:
    """Replace line ends, escape sequences and all else that is not printable by their escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
