"""The fixes in one SGLang tree: what asks for them, what they change, what fixed methods do.

Scenarios of ``test/drive.py``. Each returns what it found, for JSON.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from inkling_sconv import names
from inkling_sconv.plugin.fixes import FIXES, save_classes
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe import runners
from inkling_sconv.probe.stand_ins import AllOn, Stub, make_instance, use_configuration


def import_modules() -> dict[str, Any]:
    return {fix.name: importlib.import_module(fix.module) for fix in FIXES}


def list_needed() -> list[str]:
    return [fix.name for fix in FIXES if fix.is_needed(sys.modules[fix.module])]


def find_changed(before: dict[str, Any]) -> list[str]:
    """Changed attributes of the modules that the fixes are for."""
    import drive

    modules = tuple({f"{fix.module}." for fix in FIXES})
    return [name for name in drive.find_changed(before) if name.startswith(modules)]


def load_plugin() -> dict[str, Any]:
    """As a server: the plugins, then the backend, with every module of a fix imported already."""
    import drive
    from sglang.srt.plugins import load_plugins

    before = drive.read_attributes()
    with record_log() as log:
        load_plugins()
        importlib.import_module(names.BACKEND_MODULE)
    return {"log": log, "changed": find_changed(before)}


@contextlib.contextmanager
def record_log() -> Iterator[list[str]]:
    """What the plugin logs, with levels."""
    log: list[str] = []
    logger = logging.getLogger("inkling_sconv")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: log.append(f"{record.levelname} {record.getMessage()}")
    try:
        yield log
    finally:
        logger.removeHandler(handler)


def apply_fixes() -> dict[str, Any]:
    """What the tree needs, asked twice; what asking changes; and then ``load_plugin``."""
    import drive

    modules, before = import_modules(), drive.read_attributes()
    needed = [list_needed(), list_needed()]
    tracks = [
        runners.tracks_conv_windows(modules["prefill-rows"], speculative=speculative)
        for speculative in (False, True)
    ]
    asking = {"needed": needed, "tracks": tracks, "changed by asking": find_changed(before)}
    return {**asking, **load_plugin(), "still needed": list_needed()}


def apply_where_runners_raise() -> dict[str, Any]:
    """``load_plugin`` in a fork where two of the methods that questions run raise."""

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("a fork of it")

    modules = import_modules()
    modules["prefill-rows"].PrefillCudaGraphRunner.load_batch = fail
    modules["draft-checkpoint"].MultiLayerEagleDraftExtendCudaGraphRunner.get_forward_batch = fail
    return load_plugin()


# ------------------------------------------------------------------------------ fixed methods


def check_prefill_rows(module: Any) -> None:
    runner = runners.make_prefill_runner(module)
    for requests in (3, 1, 2):
        batch = runner.load_batch(runners.make_prefill_batch(requests))
        assert batch.batch_size == requests and batch.mamba_track_mask.tolist() == [True] * requests
        mask, slots = (
            runner.buffer_registry.get_slot(name).buffer.tolist() for name in runners.TRACK_FIELDS
        )
        padded = 4 - requests
        assert mask == [True] * requests + [False] * padded
        assert slots == [7] * requests + [0] * padded
    runner = runners.make_prefill_runner(module, tracking=False)
    assert runner.load_batch(runners.make_prefill_batch(2)).mamba_track_mask is None


def check_prefill_tracking(module: Any) -> None:
    for speculative, extra, radix in itertools.product((False, True), repeat=3):
        # As in 0.5.17, the release that needs the fix: one is a method, the other a value.
        arguments = SimpleNamespace(
            enable_mamba_extra_buffer=lambda extra=extra: extra, disable_radix_cache=not radix
        )
        algorithm = AllOn(is_none=not speculative)
        model_runner = SimpleNamespace(server_args=arguments, spec_algorithm=algorithm)
        runner = make_instance(
            module.PrefillCudaGraphRunner, "_is_mamba_track_enabled", model_runner=model_runner
        )
        assert runner._is_mamba_track_enabled() is (extra and radix)
        assert model_runner.spec_algorithm is algorithm


def check_draft_extend(module: Any) -> None:
    """In draft-extend nothing is computed; everything else is as before."""
    for cls in probe.find_backends(module):
        for by_name in (False, True):
            rig = probe.Rig(cls)
            batch = rig.make_batch("DRAFT_EXTEND_V2", 2)
            slots = batch.mamba_track_indices = torch.tensor([5, 6])
            rig.backend.sconv_metadata.track_conv_indices = torch.ones(1)
            given = {"forward_batch": batch, "on_graph_path": True}
            refresh = getattr(rig.backend, names.REFRESH)
            refresh(**given) if by_name else refresh(*given.values())
            assert rig.backend.sconv_metadata.track_conv_indices is None
            assert batch.mamba_track_indices is slots and batch.mamba_track_mask is None
        state = probe.classify(cls).state
        assert state in (probe.State.EXEMPT, probe.State.UNTRACKED), state


NO_CHECKPOINTS = (
    "draft-checkpoint: slots are translated on the host, as in a unified pool; draft-extend graphs "
    "keep no checkpoints."
)


def check_draft_checkpoint(module: Any) -> None:
    with record_log() as log:
        whole, step = make_draft_runners(module, make_backends(True, True))
    assert log == []
    slots = whole.buffers.mamba_track_indices
    assert slots.tolist() == [0] * 4 and slots.dtype is torch.int64
    for size in (1, 2, 4):
        batch = step.get_forward_batch(size)
        view = batch.mamba_track_indices
        assert batch.batch_size == len(view) == size and view.data_ptr() == slots.data_ptr()
    # Live slots, what the padded batch of the replay sees, and the argument by position or name.
    for live, padded, by_name in (
        ([5, 6, 7, 8], [5, 6, 7, 8], False),
        ([9, 3, 4], [9, 3, 4, 0], False),
        ([2], [2], False),
        (None, [0, 0, 0, 0], False),
        ([6, 6], [6, 6], True),
    ):
        prepare(module, whole, live, 3 if live is None else len(live), by_name=by_name)
        assert whole.buffers.mamba_track_indices is slots
        assert slots[: whole.bs].tolist() == padded
    for recordable in ((False, False), (True, False), (None,)):
        with record_log() as log:
            whole, step = make_draft_runners(module, make_backends(*recordable))
        (line,) = log
        assert line.startswith("WARNING") and line.endswith(NO_CHECKPOINTS)
        assert getattr(whole.buffers, "mamba_track_indices", None) is None
        assert step.get_forward_batch(2).mamba_track_indices is None
        prepare(module, whole, [5], 1)


def prepare(module: Any, whole: Any, live: list[int] | None, size: int, **how: bool) -> None:
    batch = Stub(
        batch_size=size,
        mamba_track_indices=None if live is None else torch.tensor(live),
        seq_lens_cpu=None,
        seq_lens_sum=None,
    )
    # The kernel that fills the other buffers needs a GPU.
    with mock.patch.object(module, "fill_draft_extend_prepare_buffers"):
        whole.prepare(forward_batch=batch) if how.get("by_name") else whole.prepare(batch)
    assert whole.raw_bs == size


def make_backends(*recordable: bool | None) -> list[Any]:
    """A backend for each step: whether a graph may record its gather of slots.

    None is a backend without short convolutions.
    """
    return [
        SimpleNamespace()
        if value is None
        else SimpleNamespace(short_conv_backend=SimpleNamespace(_slot_gather_recordable=value))
        for value in recordable
    ]


def make_draft_runners(module: Any, backends: list[Any]) -> tuple[Any, Any]:
    """The composite runner of draft-extend and one step of it, for up to four requests.

    ``backends`` are those of the steps.
    """
    step = make_instance(
        module.MultiLayerEagleDraftExtendCudaGraphRunner,
        "get_forward_batch",
        captured_req_width=2,
        extend_seq_lens_cpu=[2] * 4,
        num_front_tokens=0,
        model_runner=Stub(
            model_config=SimpleNamespace(
                dtype=torch.float32, hidden_size=2, vocab_size=8, hf_config=object()
            )
        ),
        prune_draft_extend_logits=True,
    )
    given = {
        "max_bs": 4,
        "captured_req_width": 2,
        "capture_bs": [1, 2, 4],
        "device": "cpu",
        "num_front_tokens": 0,
        "seq_len_fill_value": 1,
        "prune_draft_extend_logits": True,
        "draft_extend_attn_backend_list": backends,
        "runners": [step],
        "_vocab_size": lambda: 8,
    }
    cls = module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    hidden_size = mock.patch.object(module, "get_draft_input_from_target_hidden_dim", lambda _: 2)
    with hidden_size, use_configuration(vars(module), AllOn()):
        step.buffers = make_instance(cls, "_allocate_buffers", **given)._allocate_buffers()
    buckets = SimpleNamespace(_pad_to_bucket=lambda n, sizes: min(s for s in sizes if s >= n))
    whole = make_instance(
        cls, "prepare", **given, buffers=step.buffers, get_runner=lambda _: buckets
    )
    return whole, step


def check_draft_window(module: Any) -> None:
    """A request of six tokens, in the state as 3, 4 and 5, accepts three more."""
    import draft_pools

    context = importlib.import_module(names.CONFIG_MODULES[0])
    has_grid = hasattr(context, names.TRACK_GRID)
    # The last one as in releases with a grid, whichever this is.
    for interval, grid, extra_buffer, make_grid, crossed in (
        (4, 4, True, False, True),
        (8, 8, True, False, True),
        (16, 16, True, False, False),
        (8, 8, False, False, False),
        (8, 16, True, False, not has_grid),
        (8, 16, True, True, False),
    ):
        made = mock.patch.object(context, names.TRACK_GRID, lambda _: None, create=True)
        slots = torch.tensor([1])
        convolution = make_instance(
            module.ShortConvolution,
            "_update_sconv_cache_for_draft_extend",
            _conv_state=lambda _, slots=slots: Stub(track_cache_indices=slots),
        )
        cache = torch.zeros(2, 3, 1)
        cache[0, :, 0] = torch.arange(3.0, 6.0)
        batch = Stub(
            batch_size=1,
            seq_lens=torch.tensor([10]),
            mamba_track_indices=slots,
            spec_info=Stub(num_accept_tokens=torch.tensor([3]), num_front_tokens=2),
        )
        rows = torch.arange(4.0, 10.0)[:, None]
        with (
            made if make_grid else contextlib.nullcontext(),
            draft_pools.configure(module, interval, grid, extra_buffer=extra_buffer),
        ):
            convolution._update_sconv_cache_for_draft_extend(batch, cache, slots - 1, rows)
        kept = [5, 6, 7] if crossed else [0, 0, 0]
        assert cache[:, :, 0].tolist() == [[6, 7, 8], kept]


def check_draft_state(module: Any) -> None:
    """Three heads share two pools: a prefill clears each pool once, draft-extend none."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    once = [("clear", [3]), ("copy", [5], [4])]
    for mode, by_name, expected in (
        ("EXTEND", False, once),
        ("DECODE", False, once),
        ("DRAFT_EXTEND_V2", False, []),
        ("DRAFT_EXTEND_V2", True, []),
    ):
        calls: list[list[Any]] = [[], []]
        first, second = (
            Stub(
                req_to_token_pool=Stub(
                    mamba_pool=Stub(
                        clear_slots=lambda slots, to=to: to.append(("clear", slots.tolist())),
                        copy_from=lambda src, dst, to=to: to.append(
                            ("copy", src.tolist(), dst.tolist())
                        ),
                    )
                )
            )
            for to in calls
        )
        architecture = Stub(architectures=["InklingForConditionalGenerationMTP"])
        worker = make_instance(
            module.MultiLayerEagleDraftWorker,
            "_apply_deferred_mamba_init_to_draft_pools",
            draft_runner=Stub(model_config=Stub(hf_config=architecture)),
            draft_runner_list=[first, second, first],
        )
        slots = (torch.tensor([n]) for n in (3, 5, 4))
        batch = Stub(
            forward_mode=ForwardMode[mode], **dict(zip(names.CLEAR_FIELDS, slots, strict=True))
        )
        apply = worker._apply_deferred_mamba_init_to_draft_pools
        apply(forward_batch=batch) if by_name else apply(batch)
        assert calls == [expected] * 2


CHECKS: dict[str, Callable[[Any], None]] = {
    "prefill-rows": check_prefill_rows,
    "prefill-tracking": check_prefill_tracking,
    "draft-extend": check_draft_extend,
    "draft-checkpoint": check_draft_checkpoint,
    "draft-window": check_draft_window,
    "draft-state": check_draft_state,
}


def check_fix(fix: Any) -> str:
    """Apply ``fix``, run its check, and put the classes back; how it failed, or an empty string."""
    module = import_modules()[fix.name]
    restore = save_classes(module)
    try:
        fix.apply(module)
        CHECKS[fix.name](module)
    except Exception:
        return traceback.format_exc()
    finally:
        restore()
    return ""


def check_fixes() -> dict[str, Any]:
    """Each fix that the tree needs, alone: how it failed, what it cures, and what it changes."""
    import drive

    modules, before, needed, found = import_modules(), drive.read_attributes(), list_needed(), {}
    for fix in FIXES:
        if fix.name in needed:
            failure, left = check_fix(fix), find_changed(before)
            restore = save_classes(modules[fix.name])
            fix.apply(modules[fix.name])
            cured = [name for name in needed if name not in list_needed()]
            found[fix.name] = [failure, left, cured, find_changed(before)]
            restore()
    return found


def check_wrong_fixes() -> dict[str, str]:
    """``{wrong version: how its check failed}``."""
    from fix_mutants import CONTROL, MUTANTS, build

    found = {fix.name: check_fix(fix) for fix in build(CONTROL).FIXES}
    for mutant in MUTANTS:
        if mutant.rule in CHECKS:
            (wrong,) = (fix for fix in build(mutant).FIXES if fix.name == mutant.rule)
            found[f"{mutant.rule}: {mutant.name}"] = check_fix(wrong)
    return found


def check_unified_memory() -> dict[str, str]:
    """What the tree's own checks of ``--enable-unified-memory`` say; empty where they say nothing.

    The rest of SGLang's argument processing needs a GPU.
    """
    from inkling_sconv.proof.checkpoint import write_checkpoint
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    checks: list[Any] = [
        getattr(ServerArgs, f"_{name}", None)
        or getattr(importlib.import_module("sglang.srt.arg_groups.kv_cache_hook"), name)
        for name in ("handle_unified_memory_pool", "handle_page_major_kv_layout")
    ]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_checkpoint(model)
        for algorithm, backend in itertools.product((None, "EAGLE"), ("triton", "fa4")):
            options = [f"--model-path={model}", "--enable-unified-memory"]
            options += [f"--attention-backend={backend}", "--speculative-eagle-topk=1"]
            if algorithm is not None:
                options.append(f"--speculative-algorithm={algorithm}")
            with mock.patch.object(ServerArgs, "__post_init__", lambda self: None):
                arguments = ServerArgs.from_cli_args(parser.parse_args(options))
            try:
                for check in checks:
                    check(arguments)
                found[f"{algorithm}, {backend}"] = ""
            except AssertionError as error:
                found[f"{algorithm}, {backend}"] = str(error)
    return found


def play(scenario: str) -> dict[str, Any]:
    """Run one scenario in this process, which it spoils."""
    import draft_pools

    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        "fixes": apply_fixes,
        "fixes-fail": apply_where_runners_raise,
        "check-fixes": check_fixes,
        "check-wrong-fixes": check_wrong_fixes,
        "draft-states": draft_pools.compare_draft_states,
        "draft-pools": draft_pools.compare_pools,
        "track-slots": draft_pools.name_track_slots,
        "unified-pools": draft_pools.compare_unified_pools,
        "unified-memory": check_unified_memory,
    }
    with contextlib.redirect_stdout(sys.stderr):
        # What a wrong fix leaves blank has no JSON of its own.
        return json.loads(json.dumps(scenarios[scenario](), default=repr))
