"""Asking a tree what it does, in a process of its own that imports that tree's SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inkling_sconv.names import REFRESH
from inkling_sconv.trees.tree import Tree


def examine_tree(tree: Tree, *, installed: bool) -> dict[str, Any]:
    """Run ``inkling_sconv.plugin.advice`` beside ``tree``.

    With ``installed``, SGLang's plugins are loaded first: what a server would run.

    Returns:
        ``tree``, ``state`` and ``rows``; ``why``, where the tree could not be driven; ``backend``,
        ``setting``, ``how`` and, where the plugin changed the state, ``bare``, where it could.
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it died without a word"]
        report |= {"state": "unknown", "why": lines[-1]}
        return report
    answer = json.loads(done.stdout.splitlines()[-1])
    report["how"] = "driven on CPU tensors" + (", SGLang's plugins loaded" if installed else "")
    if not answer["backends"]:
        return report | {"state": "absent", "why": f"no class defines {REFRESH}"}
    # A subclass without an override is not listed: what it does is what its base does.
    worst = max(answer["backends"], key=lambda b: sum(r["verdict"] == "broken" for r in b["rows"]))
    if answer["bare"] and answer["bare"][0] != worst["state"]:
        report["bare"] = answer["bare"][0]
    return report | {
        "backend": worst["name"],
        "state": worst["state"],
        "rows": worst["rows"],
        "setting": worst["setting"],
    }
