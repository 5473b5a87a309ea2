"""The base of every error that a command prints as one line."""


class UserError(Exception):
    """The user can mend this. The message is one line: what, where, what to do."""
