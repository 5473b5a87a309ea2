"""``inkling-sconv revert``."""

from inkling_sconv.cli.common import Editable, one_line_errors
from inkling_sconv.cli.edit import open_editable


def revert(path: Editable = None) -> None:
    """Undo apply: put the file back, byte for byte."""
    from inkling_sconv.trees.replacement import restore_file

    with one_line_errors():
        file = open_editable(path).backend
        if restore_file(file):
            print(f"{file}: as it was before apply")
        else:
            print(f"{file}: is back already")
