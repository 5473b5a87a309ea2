"""What the registered tests share: skips, a server per class, forks of SGLang, test plugins."""

import functools
import importlib
import json
import os
import platform
import re
import tempfile
import time
import unittest
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from inkling_sconv.codemod.guard import add_guard
from inkling_sconv.codemod.shape import Shape, read_shape
from inkling_sconv.codemod.unguard import remove_guard
from inkling_sconv.names import CRASHING_TREE_VARIABLE, PLUGIN_GROUP
from inkling_sconv.plugin.fixes import FIXES
from inkling_sconv.proof.checkpoint import write_checkpoint
from inkling_sconv.proof.server import BASE_OPTIONS, TINY_OPTIONS, Server
from inkling_sconv.trees.overlay import overlay_tree
from inkling_sconv.trees.tree import Tree, find_tree
from sglang.test.ci.ci_register import register_cuda_ci

# SGLang's run_suite.py refuses every file under test/registered that registers nothing.
register_cuda_ci(
    est_time=0, stage="base-b", runner_config="1-gpu-large", disabled="no tests: shared code"
)

LOGS = Path(os.environ.get("INKLING_SCONV_LOGS", tempfile.gettempdir()))

HAS_GPU = torch.cuda.is_available()
needs_gpu = unittest.skipUnless(HAS_GPU, "needs a GPU")


def is_needed(*fixes: str) -> bool:
    """Whether the installed SGLang needs one of these fixes."""
    found = (fix for fix in FIXES if fix.name in fixes)
    return any(fix.is_needed(importlib.import_module(fix.module)) for fix in found)


def needs_harm(*fixes: str) -> Any:
    """Skip where the installed SGLang needs none of these fixes: there, no harm can show."""
    needed = HAS_GPU and is_needed(*fixes)
    reason = f"this SGLang has no need of {', '.join(fixes)}" if HAS_GPU else "needs a GPU"
    return unittest.skipUnless(needed, reason)


def needs_crashing_fork(case: Any) -> Any:
    """Skip where no crashing fork is given, and none can be made of the installed SGLang."""
    reason = (
        "without its exemption and its guard this SGLang's refresh would still not crash: "
        f"{CRASHING_TREE_VARIABLE} can name a tree that does"
    )
    missing = HAS_GPU and not os.environ.get(CRASHING_TREE_VARIABLE) and _is_exempt()
    return needs_gpu(unittest.skipIf(missing, reason)(case))


@functools.cache
def _is_exempt() -> bool:
    return read_shape(find_tree(None).backend.read_bytes()) is Shape.EXEMPT


def make_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="inkling-sconv-"))


@functools.cache
def make_checkpoint(heads: int = 2) -> Path:
    """The tiny Inkling with ``heads`` MTP heads, written once per process."""
    folder = make_folder() / "tiny"
    write_checkpoint(folder, mtp_heads=heads)
    return folder


@functools.cache
def make_crashing_fork() -> Path:
    """A tree of between #34043 and #35042, with the inert fill and without the guard.

    ``INKLING_SCONV_CRASHING_TREE`` names it, a checkout of SGLang. Otherwise it is made of the
    installed SGLang.
    """
    if given := os.environ.get(CRASHING_TREE_VARIABLE):
        return find_tree(Path(given)).root
    tree = find_tree(None)
    text = remove_guard(add_guard(tree.backend.read_bytes(), inert_fill=True))
    return overlay_tree(tree, text, make_folder() / "tree").root


def make_applied_tree(root: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the tree at ``root`` after ``inkling-sconv apply``, then with ``edits``.

    Each edit is an old text, which must occur once, and the new one.
    """
    tree = Tree(root)
    text = add_guard(tree.backend.read_bytes()).decode()
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    return overlay_tree(tree, text.encode(), make_folder() / "tree").root


def make_plugin(function: str) -> Path:
    """A folder with which a server also loads the plugin ``server_plugins.FUNCTION``."""
    folder = make_folder()
    info = folder / "inkling_sconv_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: inkling-sconv-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{PLUGIN_GROUP}]\n{function} = server_plugins:{function}\n"
    )
    name = "server_plugins.py"
    (folder / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    return folder


def make_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Variables with which a server imports from ``folders`` first: forks, and test plugins."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), **variables}


def make_server(name: str, environment: dict[str, str], *options: str, heads: int = 2) -> Server:
    log = LOGS / f"server-{name}.log"
    options = (*BASE_OPTIONS, *TINY_OPTIONS, *options)
    return Server(make_checkpoint(heads), options, log, environment=environment)


def has_fix(server: Server, fix: str) -> bool:
    """Whether the server's log says that it applied this fix, or this SGLang does not need it."""
    log = server.log.read_text(errors="replace")
    return bool(re.search(rf": {fix} \(.*; fix applied\.$", log, re.MULTILINE)) or not is_needed(
        fix
    )


def read_conv_pools(folder: Path) -> list[torch.Tensor]:
    """The conv pools that an idle server with ``dump_conv_pools`` writes into ``folder``.

    The target's pools come first, then the drafts', stream by stream.
    """
    (folder / "wanted").touch()
    deadline = time.monotonic() + 60
    while not (folder / "done").exists():
        assert time.monotonic() < deadline, f"no pools in {folder}"
        time.sleep(0.1)
    return torch.load(folder / "pools.pt")


class OneServer:
    """A test class with one server. What its tests put into ``figures`` is recorded."""

    kind: str
    name: str
    heads = 2
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """``NAME=value`` of each."""

    @classmethod
    def make_environment(cls) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in cls.variables)

    @classmethod
    def setUpClass(cls) -> None:
        cls.figures: dict[str, Any] = {}
        cls.addClassCleanup(lambda: record(f"{cls.kind}-{cls.name}", **cls.figures))
        environment = cls.make_environment()
        cls.server = make_server(cls.name, environment, *cls.options, heads=cls.heads)
        cls.addClassCleanup(cls.server.stop)
        cls.server.__enter__()


def describe_machine() -> dict[str, Any]:
    """What figures are measured on."""
    machine = {
        "GPU": torch.cuda.get_device_name() if HAS_GPU else "no GPU",
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "triton")},
    }
    if given := os.environ.get(CRASHING_TREE_VARIABLE):
        machine["tree"] = Path(given).resolve().name
    return machine


def record(name: str, **figures: Any) -> None:
    """Write figures of a test, and what they were measured on, for ``docs/evidence.md``."""
    for stem, content in ((name, figures), ("machine", describe_machine())):
        (LOGS / f"{stem}.json").write_text(json.dumps(content, indent=1, default=asdict))
