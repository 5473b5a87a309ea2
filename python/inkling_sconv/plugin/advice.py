"""What to set so that the plugin makes every fix that a tree needs.

``python -m inkling_sconv.plugin.advice`` asks the SGLang that this Python imports, and prints JSON;
``inkling-sconv doctor`` runs it in a process per tree.
"""

from __future__ import annotations

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


def advise_setting(found: Sequence[Row], state: State, asked: Set[str] = frozenset()) -> str:
    """The variables with which the plugin applies every fix that a row of ``found`` names.

    Args:
        found: the rows of a backend.
        state: the state of that backend without the plugin.
        asked: the fixes that ``INKLING_SCONV_FIXES`` names already.

    Returns:
        ``NAME=VALUE``, separated by spaces. Empty if the plugin's defaults do it, or there is
        nothing to fix.
    """
    left = {row.fix for row in found if row.fix and row.verdict is not Verdict.HOLDS}
    default = {fix.name for fix in FIXES if state.value in fix.default_for}
    if state is State.UNKNOWN or left <= default:
        return ""
    chosen = [fix for fix in FIXES if fix.name in left | default | asked]
    setting = f"{names.FIXES_VARIABLE}={','.join(fix.name for fix in chosen)}"
    if state is State.GUARDED and any(fix.needs_draft_extend_exemption for fix in chosen):
        setting = f"{names.MODE_VARIABLE}=fast {setting}"
    return setting


def main() -> None:
    """Print what is found as one JSON object on the last line of standard output.

    With the argument ``--plugins``, SGLang's plugins are loaded first: what a server would run.
    Another argument is the name of the backend's module in a fork that moved it.
    """
    bare: dict[str, State] = {}
    name = next((a for a in sys.argv[1:] if not a.startswith("-")), names.BACKEND_MODULE)
    if "--plugins" in sys.argv[1:]:
        backends = find_backends(importlib.import_module(name))
        bare = {backend.__qualname__: classify(backend).state for backend in backends}
        importlib.import_module(names.PLUGIN_GROUP).load_plugins()
    module = importlib.import_module(name)
    result: dict[str, Any] = {"bare": [*bare.values()], "backends": []}
    for backend in find_backends(module):
        report = classify(backend)
        found = excuse_early_return([*check_backend(backend)], report.state)
        result["backends"].append(
            {
                "name": backend.__qualname__,
                "state": report.state.value,
                "why": report.why,
                "rows": [asdict(row) for row in found],
                "setting": advise_setting(
                    found,
                    bare.get(backend.__qualname__, report.state),
                    (read_fix_names() or frozenset()) if bare else frozenset(),
                ),
            }
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
