"""What a draft-extend capture does on each SGLang, without the plugin and with it. No GPU.

Each tree gets a process of its own. It runs SGLang's class on CPU tensors as published, then SGLang
loads its plugins, and the class runs again.
"""

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
from inkling_sconv.probe.backend import classify, find_backends
(cls,) = find_backends(importlib.import_module(names.BACKEND_MODULE))
before = classify(cls)
from sglang.srt.plugins import load_plugins
load_plugins()
after = classify(cls)
print(json.dumps([before.state.value, before.capture, after.state.value, after.capture]))
"""
INTRODUCTION = """\
At start-up an Inkling server with MTP captures a CUDA graph of draft-extend. SGLang's method
_refresh_track_conv_indices runs in that capture, on a batch without prefix lengths. Here it runs
on such a batch in every release and in a fork that has the bug, without the plugin and with it."""
CURED = "The fork dies at start-up without the plugin. With it, the capture succeeds."


def run_capture(name: str, folder: Path) -> tuple[str, str, str, str]:
    """The table's cells for the tree ``name``."""
    environment = releases.environment(releases.tree(name, folder / name), name)
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"demo: {name} does not run:\n{done.stderr[-2000:]}")
    state, capture, state_with, capture_with = json.loads(done.stdout.splitlines()[-1])
    return (
        "0.5.18 without the guard (fork)" if name == releases.CRASHING else name,
        state,
        f"[red]dies: {capture}" if state == "crashing" else f"succeeds: {capture}",
        f"[green]succeeds: {capture_with}" if state_with == "grafted" else "method left alone",
    )


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(INTRODUCTION, highlight=False)
    table = Table("SGLang", "state", "without inkling_sconv", "with inkling_sconv")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = pool.map(lambda name: run_capture(name, Path(folder)), releases.TREES)
        for cells in track(
            rows, "running SGLang", len(releases.TREES), console=console, transient=True
        ):
            table.add_row(*cells)
    console.print(table)
    if not cells[-1].startswith("[green]"):
        sys.exit("demo: the fork still dies with the plugin")
    console.print(CURED)


if __name__ == "__main__":
    main()
