"""One SGLang tree with our plugin in it, driven as SGLang would.

The process imports everything around the backend once, then reads one JSON job a line from stdin,
forks a child for each, and prints the child's JSON when it is done. A job is
``{"scenario": ..., "environment": {...}, "file": FOLDER or null}``; FOLDER holds another
``inkling_sconv_backend.py``. Scenarios:

``late``      load_plugins(), then the import of the backend: the order of a real server.
``early``     the backend first, then load_plugins(): every attribute of every SGLang module before
              and after.
``hooked``    as ``late``, with another plugin that registered a hook on the same method.
``patched``   as ``early``, with the method replaced by hand in between.
``twice``     as ``late``, then register() again.
``contract``  the tests of ``test/contract``.
``mutants``   the same tests against every mutant.
``texts``     no plugin: the states of the classes in every file of FOLDER.
``checks``    no plugin: what ``inkling_sconv.plugin.advice`` prints.
``designs``   no plugin: the rows of the decision table, for the crashing tree.

And those of ``test/mending.py``.
"""

from __future__ import annotations

import contextlib
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

import pytest

CONTRACT = Path(__file__).resolve().parent / "contract"
sys.path.insert(0, str(CONTRACT))

RUNNERS = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    "sglang.srt.layers.attention.linear.short_conv_backend",
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
    "sglang.srt.speculative.multi_layer_eagle_worker_v2",
    "sglang.srt.models.inkling_common.sconv",
)
RUNNER_PACKAGE = "sglang.srt.model_executor.runner"
# SGLang's own note that it has loaded its plugins.
OWN_STATE = {"sglang.srt.plugins._plugins_loaded"}

PACKAGE = "sglang.srt.layers.attention.linear"


def import_runners() -> None:
    """Everything around the backend that takes part in a capture; not the backend itself."""
    importlib.import_module(PACKAGE)
    package = importlib.import_module(RUNNER_PACKAGE)
    names = [f"{RUNNER_PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in (*RUNNERS, *names):
        importlib.import_module(name)


def attributes() -> dict[str, Any]:
    """Every attribute of every loaded SGLang module, and of every class defined in one."""
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


def changed(before: dict[str, Any]) -> list[str]:
    """What is another object now, or gone, or new in a class that was there."""
    after = attributes()
    differ = {name for name, value in before.items() if after.get(name) is not value}
    new = {n for n in after if isinstance(before.get(n.rpartition(".")[0]), type)} - before.keys()
    return sorted((differ | new) - OWN_STATE)


def states(module: Any) -> dict[str, dict[str, str]]:
    from inkling_sconv.probe import backend as probe

    found = {}
    for cls in probe.find_backends(module):
        report = probe.classify(cls)
        found[cls.__qualname__] = {"state": report.state.value, "capture": report.capture}
    return found


def texts(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """``{file: states}``; each file is a module of its own beside the tree's other modules."""
    found = {}
    for number, path in enumerate(sorted(folder.iterdir())):
        name = f"{PACKAGE}.text_{number}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[path.name] = states(module)
    return found


def play(scenario: str, folder: str | None) -> dict[str, Any]:
    """Run one scenario in this process, which it spoils."""
    if scenario == "contract":
        with contextlib.redirect_stdout(io.StringIO()) as output:
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
            code = pytest.main([*options, str(CONTRACT)])
        return {"code": int(code), "output": output.getvalue()}
    if scenario == "mutants":
        import mutants

        return mutants.run_all()
    if scenario == "texts":
        return texts(Path(folder))
    if scenario == "checks":
        from inkling_sconv.plugin import advice

        sys.argv[1:] = []
        with contextlib.redirect_stdout(io.StringIO()) as output:
            advice.main()
        return {"output": output.getvalue()}
    if scenario == "designs":
        import designs

        return designs.run_checks()
    import mending

    if scenario in mending.SCENARIOS:
        return mending.play(scenario)

    from inkling_sconv import names, plugin
    from inkling_sconv.probe import backend as probe
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    log: list[str] = []
    logger = logging.getLogger("inkling_sconv")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: log.append(f"{record.levelname} {record.getMessage()}")

    result: dict[str, Any] = {
        "log": log,
        "imported_by_runners": names.BACKEND_MODULE in sys.modules,
    }
    if scenario in ("early", "patched"):
        module = importlib.import_module(names.BACKEND_MODULE)
        result["bare"] = states(module)
        if scenario == "patched":
            (cls,) = probe.find_backends(module)
            setattr(cls, names.REFRESH, lambda self, batch, on_graph_path: None)
        before = attributes()
        load_plugins()
        result["changed"] = changed(before)
    else:
        if scenario == "hooked":
            HookRegistry.register(
                f"{names.BACKEND_MODULE}.InklingShortConvAttnBackend.{names.REFRESH}",
                lambda original, *args: original(*args),
                HookType.AROUND,
                source=HookSource("other", "other-dist"),
            )
        before = attributes()
        load_plugins()
        result["imported_by_plugins"] = names.BACKEND_MODULE in sys.modules
        result["changed_by_plugins"] = changed(before)
        module = importlib.import_module(names.BACKEND_MODULE)
        if scenario == "twice":
            plugin.register()
    return {**result, "states": states(module)}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """What a forked child makes of ``job``; ``{"error": ...}`` where it fails."""
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
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
