"""Which variables to set, so that the plugin applies every fix that a tree needs.

``python -m inkling_sconv.plugin.advice`` examines the SGLang that this Python imports, and prints
JSON. ``inkling-sconv doctor`` runs it in a process of its own for each tree.
``settings.list_obstacles`` names the variables to unset.
"""

import importlib
import json
import sys
from collections.abc import Sequence, Set
from dataclasses import asdict
from typing import Any

from inkling_sconv import names
from inkling_sconv.plugin.fixes import FIXES
from inkling_sconv.plugin.settings import read_fix_names
from inkling_sconv.probe.backend import State, classify, find_backends
from inkling_sconv.probe.contract import Row, Verdict, check_backend, excuse_early_return


def advise_setting(rows: Sequence[Row], state: State, asked: Set[str] = frozenset()) -> str:
    """Say which variables make the plugin apply the fix of every failed check.

    Args:
        rows: the contract's checks of a backend.
        state: the state of that backend without the plugin.
        asked: the fixes that ``INKLING_SCONV_FIXES`` names already.

    Returns:
        ``NAME=VALUE``, separated by spaces. Empty if the defaults suffice, or the state is unknown.
    """
    needed = {row.fix for row in rows if row.fix and row.verdict is not Verdict.HOLDS}
    default = {fix.name for fix in FIXES if state.value in fix.default_for}
    if state is State.UNKNOWN or needed <= default:
        return ""
    chosen = [fix for fix in FIXES if fix.name in needed | default | asked]
    return f"{names.FIXES_VARIABLE}={','.join(fix.name for fix in chosen)}"


def examine_backends(name: str, *, load_plugins: bool) -> dict[str, Any]:
    """Check each Inkling backend in the module ``name``.

    With ``load_plugins``, SGLang loads its plugins first, to examine what a server would run.

    Returns:
        ``backends``: ``name``, ``state``, ``why``, ``rows`` and ``setting`` of each. ``bare``: the
        states without plugins; empty if ``load_plugins`` is false.
    """
    bare: dict[str, State] = {}
    module = importlib.import_module(name)
    if load_plugins:
        bare = {cls.__qualname__: classify(cls).state for cls in find_backends(module)}
        importlib.import_module(names.PLUGIN_GROUP).load_plugins()
    asked = read_fix_names() if load_plugins else None
    backends = []
    for cls in find_backends(module):
        report = classify(cls)
        rows = excuse_early_return([*check_backend(cls)], report.state)
        backends.append(
            {
                "name": cls.__qualname__,
                "state": report.state.value,
                "why": report.why,
                "rows": [asdict(row) for row in rows],
                "setting": advise_setting(
                    rows, bare.get(cls.__qualname__, report.state), asked or set()
                ),
            }
        )
    return {"bare": [*bare.values()], "backends": backends}


def main() -> None:
    """Print ``examine_backends`` as JSON, on the last line of standard output.

    Arguments: ``--plugins``, to load SGLang's plugins first; and the backend's module, if a fork
    has moved it.
    """
    name = next((a for a in sys.argv[1:] if not a.startswith("-")), names.BACKEND_MODULE)
    print(json.dumps(examine_backends(name, load_plugins="--plugins" in sys.argv[1:])))


if __name__ == "__main__":
    main()
