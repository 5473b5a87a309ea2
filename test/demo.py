"""What a draft-extend capture does on each real SGLang, without us and with us. No GPU.

Every row is a process of its own: SGLang's class is driven on CPU tensors as it was published, then
SGLang's own ``load_plugins()`` runs, and the class that it leaves is driven again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import releases
from rich.console import Console
from rich.progress import track
from rich.table import Table

CODE = """
import importlib, json
from inkling_sconv import names
from inkling_sconv import plugin
from inkling_sconv import names
from inkling_sconv.probe import backend as probe
module = importlib.import_module(names.BACKEND_MODULE)
(cls,) = probe.find_backends(module)
without = probe.classify(cls)
from sglang.srt.plugins import load_plugins
load_plugins()
ours = probe.classify(cls)
print(json.dumps([without.state.value, without.capture, ours.state.value, ours.capture]))
"""


def look(name: str, folder: Path) -> tuple[str, str, str, str]:
    """State and capture of the tree ``name`` as published, then with our plugin loaded."""
    environment = releases.environment(releases.tree(name, folder / name), name)
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"demo: {name} does not run:\n{done.stderr[-2000:]}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, folder: Path) -> tuple[str, str, str, str]:
    """The table's cells for the tree ``name``."""
    state, without, now, ours = look(name, folder)
    crashes = state == "crashing"
    return (
        f"{name} fork" if name == releases.CRASHING else name,
        state,
        f"[red]dies: {without}" if crashes else f"starts: {without}",
        f"[green]starts: {ours}" if now == "grafted" else "left alone" if now == state else now,
    )


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="draft-extend capture of Inkling's MTP heads, no prefix lengths")
    for heading in ("SGLang", "state", "without inkling_sconv", "with inkling_sconv"):
        table.add_column(heading, overflow="fold")
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        rows = pool.map(lambda name: row(name, Path(folder)), releases.TREES)
        bar = track(rows, "driving SGLang", len(releases.TREES), console=console, transient=True)
        for cells in bar:
            table.add_row(*cells)
    console.print(table)
    if not cells[-1].startswith("[green]"):
        sys.exit("demo: the crashing fork was not cured")


if __name__ == "__main__":
    main()
