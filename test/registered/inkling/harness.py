"""What the registered tests share: a checkpoint, and forks of the installed SGLang."""

from __future__ import annotations

import functools
import importlib
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import libcst as cst
import torch
from inkling_sconv.codemod import guard
from inkling_sconv.plugin.fixes import FIXES
from inkling_sconv.proof import checkpoint
from inkling_sconv.trees.tree import BACKEND, Tree
from sglang.test.ci.ci_register import register_cuda_ci

# SGLang's run_suite.py refuses every file under test/registered that registers nothing.
register_cuda_ci(
    est_time=0, stage="base-b", runner_config="1-gpu-large", disabled="no tests: shared code"
)

NO_GPU = None if torch.cuda.is_available() else "needs a GPU"
LOGS = Path(os.environ.get("INKLING_SCONV_LOGS", tempfile.gettempdir()))


@functools.cache
def checkpoint() -> Path:
    """The tiny Inkling, written once per process."""
    folder = Path(tempfile.mkdtemp(prefix="inkling-sconv-")) / "tiny"
    checkpoint.write_checkpoint(folder)
    return folder


def overlay(tree: Tree, text: str) -> Path:
    """``tree`` with another text in the backend's file: links, made in a temporary folder."""
    top = Path(tempfile.mkdtemp(prefix="inkling-sconv-"))
    original, copy = tree.root, top
    # Of the root, only the package: the rest of a site-packages is found as it was before.
    names = ["sglang"]
    for part in BACKEND.parts:
        for name in names:
            if name != part:
                (copy / name).symlink_to(original / name)
        original, copy = original / part, copy / part
        if part != BACKEND.name:
            copy.mkdir()
            names = [entry.name for entry in original.iterdir()]
    copy.write_text(text)
    return top


@functools.cache
def crashing_fork() -> Path:
    """The installed SGLang as it was between #34043 and #35042: inert fill, no guard."""
    tree = find(None)
    before = tree.backend.read_bytes()
    guarded = guard.add_guard(before, inert_fill=True).text.decode()
    remover = _GuardRemover()
    text = cst.parse_module(guarded).visit(remover).code
    assert remover.removed == 1, f"{remover.removed} guards in {tree.backend}"
    return overlay(tree, text)


def environment(tree: Path, **variables: str) -> dict[str, str]:
    """Variables with which a server imports from ``tree`` first: a fork, or a package of ours."""
    return {
        "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }


def applied(tree: Path, *edits: tuple[str, str]) -> Path:
    """``tree`` after ``inkling-sconv apply``, in a copy; then with ``edits`` in it."""
    fork = Tree(tree)
    text = guard.add_guard(fork.backend.read_bytes()).text.decode()
    return overlay(fork, replaced(text, *edits))


def replaced(text: str, *edits: tuple[str, str]) -> str:
    """``text`` with each ``old``, which stands there once, made ``new``."""
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    return text


def mutated(module: str, *edits: tuple[str, str]) -> Path:
    """A folder to put on ``PYTHONPATH``: a copy of our package with ``edits`` in one module."""
    package = Path(guard.__file__).parent
    top = Path(tempfile.mkdtemp(prefix="inkling-sconv-"))
    shutil.copytree(package, top / package.name)
    file = top / package.name / module
    file.write_text(replaced(file.read_text(), *edits))
    return top


def harmless(*names: str) -> str | None:
    """Why there is nothing to see with the fixes off; ``names`` are those that would mend it."""
    if NO_GPU:
        return NO_GPU
    found = (fix for fix in FIXES if fix.name in names)
    if any(fix.is_needed(importlib.import_module(fix.module)) for fix in found):
        return None
    return f"this SGLang has no need of {', '.join(names)}"


def dumping() -> tuple[Path, Path]:
    """A folder to put on ``PYTHONPATH``, and the one where a server then dumps its conv pools."""
    package = mutated("plugin.py", (REGISTER, REGISTER + _DUMP))
    pools = package / "pools"
    pools.mkdir()
    return package, pools


def dumped(pools: Path) -> list[torch.Tensor]:
    """The conv pools of a server with nothing to do: target's, then drafts', stream by stream."""
    (pools / "wanted").touch()
    deadline = time.monotonic() + 60
    while not (pools / "done").exists():
        assert time.monotonic() < deadline, f"no pools in {pools}"
        time.sleep(0.1)
    return torch.load(pools / "pools.pt")


REGISTER = "    wrapt.register_post_import_hook(_on_import, BACKEND_MODULE)\n"
# Runs in the scheduler's process: there is no other way to its pools.
_DUMP = """
    import pathlib, threading, time
    import torch
    folder = pathlib.Path(__file__).parents[1] / "pools"
    backends = []

    def collect(module):
        for cls in __import__("inkling_sconv.probe").probe.find_backends(module):
            def alloc(wrapped, instance, args, kwargs):
                wrapped(*args, **kwargs)
                backends.append(instance)
            wrapt.wrap_function_wrapper(cls, "__init__", alloc)

    def dump():
        # The plugin is loaded in the server's other processes too; they have no backend.
        while not (backends and (folder / "wanted").exists()):
            time.sleep(0.1)
        torch.cuda.synchronize()
        caches = {id(b._mamba_cache): b._mamba_cache for b in backends}
        torch.save([c.cpu() for m in caches.values() for c in m.conv], folder / "pools.pt")
        (folder / "done").touch()

    wrapt.register_post_import_hook(collect, BACKEND_MODULE)
    threading.Thread(target=dump, daemon=True).start()
"""


def record(name: str, **figures: Any) -> None:
    """Keep figures of a test, and what they were measured on, for ``docs/evidence.md``."""
    machine = {
        "GPU": torch.cuda.get_device_name(),
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "triton")},
    }
    for stem, content in ((name, figures), ("machine", machine)):
        (LOGS / f"{stem}.json").write_text(json.dumps(content, indent=1, default=asdict))


class _GuardRemover(cst.CSTTransformer):
    """Takes out ``if X is None and on_graph_path: X = ...``."""

    def __init__(self) -> None:
        super().__init__()
        self.removed = 0

    def leave_If(self, original_node: cst.If, updated_node: cst.If):  # noqa: N802
        test = original_node.test
        if not (
            isinstance(test, cst.BooleanOperation)
            and isinstance(test.operator, cst.And)
            and isinstance(test.left, cst.Comparison)
            and isinstance(test.right, cst.Name)
            and test.right.value == "on_graph_path"
        ):
            return updated_node
        self.removed += 1
        return cst.RemoveFromParent()
