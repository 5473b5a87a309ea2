"""Whether an SGLang tree would start our servers, asked on a CPU.

A scenario of ``test/drive.py``. The tree's own code parses and checks the options of every server
that we start, makes the front end up to the first request, and makes the KV pools of the target and
of each MTP head. The GPU is a stand-in, and no scheduler runs.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from inkling_sconv.probe.stand_ins import Blank, Stub, make_instance
from inkling_sconv.proof.checkpoint import write_checkpoint
from inkling_sconv.proof.server import (
    BASE_OPTIONS,
    TINY_OPTIONS,
    find_last_exception,
    list_mtp_options,
)

MODELS = "sglang.srt.models.inkling"
REGISTERED = Path(__file__).resolve().parent / "registered/inkling"
MEMORY = 141 * 2**30
TOKENS = 256


def clear_caches() -> None:
    """Forget what SGLang found out about the device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@contextlib.contextmanager
def pretend_gpu() -> Iterator[None]:
    """Have torch describe an H200, and SGLang ask for it again. No kernel can run."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
    )
    described: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (MEMORY, MEMORY),
    }
    answers = {name: mock.Mock(return_value=value) for name, value in described.items()}
    try:
        with mock.patch.multiple(torch.cuda, **answers):
            clear_caches()
            yield
    finally:
        clear_caches()


def import_modules() -> None:
    """Import what loads CUDA libraries where there seems to be a GPU."""
    # 0.5.17 compiles its MoE kernels with helion, which does not run without a GPU.
    for name in ("helion", "helion.language"):
        sys.modules.setdefault(name, mock.MagicMock())
    for name in ("sglang.srt.entrypoints.http_server", MODELS):
        importlib.import_module(name)


def list_servers() -> dict[str, list[str]]:
    """The arguments of every server that the registered tests start, from the model on.

    ``verify`` and the benchmarks start such servers too.
    """
    sys.path.insert(0, str(REGISTERED))
    import harness

    modules = [importlib.import_module(path.stem) for path in sorted(REGISTERED.glob("test_*.py"))]
    classes = [
        cls
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, harness.OneServer)
    ]
    different: dict[tuple[Any, int], type] = {}
    # OneServer itself is a server without speculation.
    for cls in (harness.OneServer, *classes):
        different.setdefault((cls.options, cls.heads), cls)
    servers = {
        f"{cls.__module__}.{cls.__name__}": harness.make_server("", {}, *options, heads=heads)
        for (options, heads), cls in different.items()
    }
    servers["soak"] = sys.modules["test_inkling_soak"].make_server("")
    return {name: server.command[3:] for name, server in servers.items()}


def write_unbanded(model: Path, heads: int) -> None:
    """Write the tiny Inkling with ``heads`` MTP heads of full attention."""
    write_checkpoint(model, mtp_heads=heads)
    config = json.loads((model / "config.json").read_text())
    for name in ("mtp_local_layer_ids", "mtp_local_extent"):
        del config["text_config"][name]
    (model / "config.json").write_text(json.dumps(config))


def resolve(arguments: Sequence[str]) -> Any:
    """The tree's own object of a server's arguments: parsed, completed, checked and published."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    resolved = prepare_server_args([*arguments])
    # Older releases complete them while they parse.
    if hasattr(resolved, "resolve_once"):
        resolved.resolve_once()
    engine._set_envs_and_config(resolved)
    resolved.check_server_args()
    publish(resolved, role="tokenizer")
    return resolved


def start(arguments: Sequence[str]) -> None:
    """Start a server without schedulers: its arguments, tokenizer and every HTTP handler."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.server_args import PortArgs

    async def serve(app: Any) -> None:
        async with http_server.lifespan(app):
            pass

    # The warm-up waits until the server listens.
    with pretend_gpu(), mock.patch.object(http_server, "_wait_and_warmup"):
        resolved = resolve(arguments)
        manager, templates = init_tokenizer_manager(resolved, PortArgs.init_new(resolved))
        state = http_server._GlobalState(manager, templates, scheduler_info={})
        http_server.set_global_state(state)
        app = http_server.app
        app.is_single_tokenizer_mode, app.server_args = True, resolved
        app.warmup_thread_kwargs = {}
        asyncio.run(serve(app))


def make_pools(arguments: Sequence[str]) -> None:
    """Make the KV pools of the target and of each MTP head, and look up their layers."""
    with pretend_gpu():
        resolved = resolve(arguments)
    for head in (None, *range(resolved.speculative_num_steps)):
        make_pool(resolved, head)


def make_pool(arguments: Any, head: int | None) -> None:
    """Make the KV pool of the target, or of one head, and look up the keys of its layers."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = make_instance(
        TpModelWorker,
        "_init_model_config",
        server_args=arguments,
        is_draft_worker=head is not None,
        context_length=None,
    )
    worker._init_model_config()
    config = worker.model_config
    (architecture,) = config.hf_config.architectures
    given: dict[str, Any] = {
        "model": object.__new__(getattr(sys.modules[MODELS], architecture)),
        "model_config": config,
        "is_draft_worker": head is not None,
        "draft_model_idx": head,
        "spec_algorithm": SpeculativeAlgorithm.from_string(arguments.speculative_algorithm),
    }
    wanted = inspect.signature(resolve_layer_indices).parameters
    layers = resolve_layer_indices(**{k: v for k, v in given.items() if k in wanted})
    given |= {
        "layer_info": layers,
        "server_args": arguments,
        "device": "cpu",
        "kv_cache_dtype": torch.bfloat16,
        "is_hybrid_swa": config.is_hybrid_swa,
        "is_hybrid_swa_compress": config.is_hybrid_swa_compress,
        "use_mla_backend": False,
        "post_capture_kv_active": False,
    }
    cls = kv_cache_configurator.KVCacheConfigurator
    fields = {f.name: given.get(f.name, Blank()) for f in dataclasses.fields(cls) if f.init}
    one_rank = Stub(attn_tp_size=1, attn_dcp_size=1)
    # With speculation a pool also has a kernel that copies, which needs a GPU.
    no_copy = Stub(speculative_algorithm=None)
    with (
        mock.patch.object(kv_cache_configurator, "get_parallel", lambda: one_rank),
        mock.patch.object(kv_cache_configurator, "get_spec", lambda: no_copy),
    ):
        pool = cls(**fields)._build_token_to_kv_pool(
            sizes=Stub(full_max_total_num_tokens=TOKENS, swa_max_total_num_tokens=TOKENS),
            is_dsa_model=False,
            is_dsv4_model=False,
            req_to_token_pool=Blank(),
        )
    for layer in range(config.num_hidden_layers) if head is None else [head]:
        assert len(pool.get_key_buffer(layer)) >= TOKENS


def ask(folder: Path, question: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> Any:
    """None, or the line that ``verify`` prints of a server which dies like this."""
    log = folder / "log"
    with log.open("w") as file, contextlib.redirect_stderr(file):
        try:
            question(arguments)
            return None
        except (Exception, SystemExit):
            traceback.print_exc()
    return find_last_exception(log) or log.read_text()[-4000:]


def run_all() -> dict[str, Any]:
    """What the tree says of our servers, of their pools, and of servers that may be refused."""
    import_modules()
    # What the registered tests and SGLang make in the folder for temporary files goes there too.
    with tempfile.TemporaryDirectory() as name, mock.patch.object(tempfile, "tempdir", name):
        folder, servers = Path(name), list_servers()
        plain = servers["harness.OneServer"]
        found: dict[str, Any] = {
            "servers": {name: ask(folder, start, one) for name, one in servers.items()},
            "pools": {
                name: ask(folder, make_pools, one)
                for name, one in servers.items()
                if "--enable-multi-layer-eagle" in one
            },
            "changed": {
                option: ask(folder, start, [*plain, option])
                for option in ("--no-such-option", "--swa-full-tokens-ratio=3", "--page-size=96")
            },
            "tokenizer": ask(folder, start, [one for one in plain if one not in TINY_OPTIONS]),
            "unbanded": {},
        }
        for heads in (2, 8):
            write_unbanded(model := folder / str(heads), heads)
            options = (*BASE_OPTIONS, *TINY_OPTIONS, *list_mtp_options(heads))
            found["unbanded"][heads] = ask(folder, make_pools, [f"--model-path={model}", *options])
    return found
