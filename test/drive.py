"""One SGLang tree with our plugin in it, driven as SGLang would drive it.

The process imports everything around the backend once. Then it reads one JSON job a line from
stdin, forks a child for each, and prints what the child found as JSON. A job is
``{"scenario": ..., "environment": {...}, "file": FOLDER or null}``; FOLDER holds another
``inkling_sconv_backend.py``. Scenarios:

``late``      load_plugins(), then the import of the backend: the order of a real server.
``early``     the backend first, then load_plugins(): every attribute of every SGLang module before
              and after.
``hooked``    as ``late``, with another plugin that registered a hook on the same method.
``patched``   as ``early``, with the method replaced by hand in between.
``twice``     as ``late``, then register() again.
``contract``  the tests of ``test/contract``.
``mutants``   the same tests against the mutants.
``texts``     no plugin: the states of the classes in every file of FOLDER.
``checks``    no plugin: what ``inkling_sconv.plugin.advice`` prints.
``status``    what ``python -m inkling_sconv`` prints.
``designs``   no plugin: the checks of ``test/designs.py``, for the crashing tree.
``launches``  no plugin: the checks of ``test/launches.py``.

Every other scenario is one of ``test/fix_scenarios.py``.
"""

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from inkling_sconv import names
from inkling_sconv.probe import backend as probe

CONTRACT = Path(__file__).resolve().parent / "contract"
sys.path.insert(0, str(CONTRACT))

PACKAGE = "sglang.srt.layers.attention.linear"
RUNNER_PACKAGE = "sglang.srt.model_executor.runner"
AROUND = (
    PACKAGE,
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    "sglang.srt.layers.attention.linear.short_conv_backend",
    names.DRAFT_EXTEND_RUNNER_MODULE,
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
    names.DRAFT_WORKER_MODULE,
    names.SHORT_CONVOLUTION_MODULE,
)
MAINS = {"checks": "inkling_sconv.plugin.advice", "status": "inkling_sconv.__main__"}
LOADING = ("late", "early", "hooked", "patched", "twice")
# What the command line needs; no server may load it.
TOOLS = (
    *("libcst", "rich", "typer", "requests"),
    *(f"inkling_sconv.{name}" for name in ("cli", "codemod", "fork_ci", "proof", "trees")),
)
# SGLang's own note that it has loaded its plugins.
OWN_STATE = {"sglang.srt.plugins._plugins_loaded"}


def import_runners() -> None:
    """Import everything around the backend that takes part in a capture; not the backend itself."""
    package = importlib.import_module(RUNNER_PACKAGE)
    runners = (f"{RUNNER_PACKAGE}.{m.name}" for m in pkgutil.iter_modules(package.__path__))
    for name in (*AROUND, *runners):
        importlib.import_module(name)


def read_attributes() -> dict[str, Any]:
    """Every attribute of every loaded SGLang module and of its classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "sglang":
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for attribute, content in vars(value).items():
                    found[f"{name}.{value.__qualname__}.{attribute}"] = content
    return found


def find_changed(before: dict[str, Any]) -> list[str]:
    """Attributes that are another object now, or gone, or new in a class that was there."""
    after = read_attributes()
    differ = {name for name, value in before.items() if after.get(name) is not value}
    new = {n for n in after if isinstance(before.get(n.rpartition(".")[0]), type)} - before.keys()
    return sorted((differ | new) - OWN_STATE)


def classify_all(module: Any) -> dict[str, dict[str, str]]:
    """``{class: its state, and what its capture did}``."""
    found = {}
    for cls in probe.find_backends(module):
        report = probe.classify(cls)
        found[cls.__qualname__] = {"state": report.state.value, "capture": report.capture}
    return found


def classify_files(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """``{file: its classes}``; each file is a module of its own beside the tree's other modules."""
    found = {}
    for number, path in enumerate(sorted(folder.iterdir())):
        name = f"{PACKAGE}.text_{number}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[path.name] = classify_all(module)
    return found


def run_contract() -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
        code = pytest.main([*options, str(CONTRACT)])
    return {"code": int(code), "output": output.getvalue()}


def run_main(module: Any) -> dict[str, Any]:
    """What ``module.main()`` prints and returns."""
    sys.argv[1:] = []
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = module.main()
    return {"code": code, "output": output.getvalue()}


def load_plugin(scenario: str) -> dict[str, Any]:
    """Load our plugin before or after the backend; what it logs, and what it changes."""
    from inkling_sconv import plugin
    from sglang.srt.plugins import hook_registry, load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    walk = hook_registry._propagate_patch = mock.Mock(wraps=hook_registry._propagate_patch)
    log: list[str] = []
    logger = logging.getLogger("inkling_sconv")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: log.append(f"{record.levelname} {record.getMessage()}")
    is_imported = names.BACKEND_MODULE in sys.modules
    result: dict[str, Any] = {"log": log, "imported_by_runners": is_imported}
    if scenario in ("early", "patched"):
        module = importlib.import_module(names.BACKEND_MODULE)
        result["bare"] = classify_all(module)
        if scenario == "patched":
            (cls,) = probe.find_backends(module)
            setattr(cls, names.REFRESH, lambda self, batch, on_graph_path: None)
        before = read_attributes()
        load_plugins()
        result["changed"] = find_changed(before)
    else:
        if scenario == "hooked":
            HookRegistry.register(
                f"{names.BACKEND_MODULE}.InklingShortConvAttnBackend.{names.REFRESH}",
                lambda original, *args: original(*args),
                HookType.AROUND,
                source=HookSource("other", "other-dist"),
            )
        before, loaded = read_attributes(), set(sys.modules)
        load_plugins()
        result["imported_by_plugins"] = names.BACKEND_MODULE in sys.modules
        result["changed_by_plugins"] = find_changed(before)
        module = importlib.import_module(names.BACKEND_MODULE)
        if scenario == "twice":
            plugin.register()
        result["tools"] = sorted(n for n in set(sys.modules) - loaded if n.startswith(TOOLS))
    return {**result, "walks": walk.call_count, "states": classify_all(module)}


def play(scenario: str, folder: str | None) -> dict[str, Any]:
    """Run one scenario in this process, which it spoils."""
    if scenario in LOADING:
        return load_plugin(scenario)
    if scenario == "contract":
        return run_contract()
    if scenario == "texts":
        return classify_files(Path(folder))
    if scenario in MAINS:
        return run_main(importlib.import_module(MAINS[scenario]))
    if scenario in ("mutants", "designs", "launches"):
        return importlib.import_module(scenario).run_all()
    return importlib.import_module("fix_scenarios").play(scenario)


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Play ``job`` in a forked child and return its result, or ``{"error": ...}``."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        os.environ.update(job["environment"])
        if job["file"]:
            importlib.import_module(PACKAGE).__path__.insert(0, job["file"])
        try:
            result = play(job["scenario"], job["file"])
        except BaseException:
            result = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the child died"}


def main() -> None:
    # SGLang prints while it is imported; answers go where the asker looks for them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_runners()
    # Else each child's first collection walks, and so copies, all that was imported.
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
