"""The base of every error that a command prints as one line."""


class UserError(Exception):
    """An error that the user can fix. The message is one line: what, where, what to do."""
