"""The error that a command prints as one line, and one line for any other error."""


class UserError(Exception):
    """An error that the user can fix. The message is one line: what, where, what to do."""


def describe_error(error: BaseException) -> str:
    """Return ``TYPE: MESSAGE``, like the last line of a traceback."""
    return f"{type(error).__name__}: {error}"
