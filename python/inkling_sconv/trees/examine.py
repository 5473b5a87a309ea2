"""Examine a tree in a separate process, which imports that tree's SGLang."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inkling_sconv.names import REFRESH
from inkling_sconv.trees.tree import Tree


def examine_tree(tree: Tree, *, installed: bool) -> dict[str, Any]:
    """Run ``python -m inkling_sconv.plugin.advice`` with ``tree`` as its SGLang.

    With ``installed``, the process loads SGLang's plugins first, as a server does.

    Returns:
        ``tree``, ``state``, and ``rows``: the contract's checks. ``why``: the reason, if the state
        is unknown or absent. If the class was run: ``how``, its name as ``backend``, and the
        variables to set as ``setting``. ``bare``: the state without plugins, if they changed it.
    """
    report: dict[str, Any] = {"tree": str(tree.root), "rows": []}
    module = ".".join(tree.backend.relative_to(tree.root).with_suffix("").parts)
    ours = Path(__file__).resolve().parents[2]
    paths = [str(tree.root), str(ours), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "inkling_sconv.plugin.advice", module]
    if installed:
        command.append("--plugins")
    done = subprocess.run(
        command,
        env=environment,
        input="",
        capture_output=True,
        # A tree may print anything.
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the process ended without an error message"]
        return report | {"state": "unknown", "why": lines[-1]}
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        backends = list(answer["backends"])
    except (ValueError, LookupError, TypeError):
        return report | {"state": "unknown", "why": "the process ended without an answer"}
    report["how"] = "run on CPU tensors" + (", SGLang's plugins loaded" if installed else "")
    if not backends:
        return report | {"state": "absent", "why": f"no class defines {REFRESH}"}
    # A subclass is listed only if it overrides the refresh.
    worst = max(backends, key=lambda b: sum(r["verdict"] == "broken" for r in b["rows"]))
    bare = dict(zip((b["name"] for b in backends), answer["bare"], strict=False))
    if bare.get(worst["name"], worst["state"]) != worst["state"]:
        report["bare"] = bare[worst["name"]]
    keys = ("state", "rows", "setting", *(["why"] if worst["state"] == "unknown" else []))
    return report | {key: worst[key] for key in keys} | {"backend": worst["name"]}
