"""The runners and the draft's convolution of one SGLang tree, asked, mended and driven.

Scenarios of ``test/drive.py``; each takes no argument and returns what it saw, for JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import random
import sys
import traceback
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def _modules() -> dict[str, Any]:
    from inkling_sconv.plugin import fixes

    return {fix.name: importlib.import_module(fix.module) for fix in fixes.FIXES}


def _harms() -> dict[str, bool]:
    from inkling_sconv.plugin import fixes

    modules = _modules()
    return {fix.name: bool(fix.is_needed(modules[fix.name])) for fix in fixes.FIXES}


def _attributes() -> dict[str, Any]:
    import drive

    return drive.attributes()


def _differ(before: dict[str, Any]) -> list[str]:
    """Attributes that are another object now, and those that are new or gone."""
    import drive

    after = _attributes()
    same = {name for name, value in before.items() if after.get(name, before) is value}
    return sorted((set(before) | set(after)) - same - drive.OWN_STATE)


def _own(names: list[str]) -> list[str]:
    """Those of the modules that the fixes are for; a module that is imported meanwhile is new."""
    from inkling_sconv import names
    from inkling_sconv.plugin import fixes

    modules = tuple({f"{fix.module}." for fix in fixes.FIXES})
    return [name for name in names if name.startswith(modules)]


def _listen() -> list[str]:
    log: list[str] = []
    logger = logging.getLogger("inkling_sconv")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: log.append(f"{record.levelname} {record.getMessage()}")
    return log


def questions() -> dict[str, Any]:
    """Every question's answer in the bare tree, and what asking left behind."""
    from inkling_sconv.plugin import fixes
    from inkling_sconv.probe import runners

    modules = _modules()
    before = _attributes()
    first, second = _harms(), _harms()
    return {
        "harms": first,
        "again": second == first,
        "tracks": [
            runners.tracks_conv_windows(modules[fixes.FIXES[0].name], speculative=speculative)
            for speculative in (False, True)
        ],
        "left": _own(_differ(before)),
    }


def mended() -> dict[str, Any]:
    """As a server would: plugins, then the backend, among modules that are all imported."""
    from inkling_sconv import names
    from sglang.srt.plugins import load_plugins

    _modules()
    log, before = _listen(), _attributes()
    load_plugins()
    importlib.import_module(names.BACKEND_MODULE)
    return {"log": log, "changed": _own(_differ(before)), "harms": _harms()}


def other_model() -> dict[str, Any]:
    """A server that imports the runners, and never Inkling's backend."""
    from inkling_sconv import names
    from sglang.srt.plugins import load_plugins

    for name in (names.PREFILL_RUNNER_MODULE, names.DRAFT_EXTEND_RUNNER_MODULE):
        importlib.import_module(name)
    log, before = _listen(), _attributes()
    load_plugins()
    for name in (names.PREFILL_RUNNER_MODULE, names.DRAFT_EXTEND_RUNNER_MODULE):
        importlib.import_module(name)
    return {
        "log": log,
        "changed": _differ(before),
        "backend": names.BACKEND_MODULE in sys.modules,
    }


def undrivable() -> dict[str, Any]:
    """As ``mended``, with two runners of which the method raises that a question drives."""
    from inkling_sconv import names
    from sglang.srt.plugins import load_plugins

    def raises(*_: Any, **__: Any) -> None:
        raise LookupError("a fork of it")

    modules = _modules()
    modules["prefill-rows"].PrefillCudaGraphRunner.load_batch = raises
    modules["draft-checkpoint"].MultiLayerEagleDraftExtendCudaGraphRunner.get_forward_batch = raises
    log, before = _listen(), _attributes()
    load_plugins()
    importlib.import_module(names.BACKEND_MODULE)
    return {"log": log, "changed": _own(_differ(before))}


# ------------------------------------------------------------------------ the methods, driven


def _prefill_host(module: Any, tracking: bool = True) -> Any:
    """A prefill runner of four request slots, whose ``load_batch`` is the tree's."""
    from inkling_sconv import names

    registry = importlib.import_module(names.BUFFER_REGISTRY_MODULE).build_prefill_registry(
        device=torch.device("cpu"),
        max_bs=4,
        max_num_token=16,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=tracking,
        share_pool=False,
    )
    return stand_ins.make_instance(
        module.PrefillCudaGraphRunner,
        "load_batch",
        buffer_registry=registry,
        capture_num_tokens=[16],
        _pad_to_bucket=lambda *_: 16,
        _is_full_backend=True,
        _capture_req_slots=4,
        _prefill_static_buffers=defaultdict(lambda: torch.zeros(4, dtype=torch.int64)),
    )


def rows(module: Any) -> dict[str, Any]:
    """The track buffers after each of three loads, and what ``load_batch`` returned."""
    from inkling_sconv.probe import runners

    host, seen = _prefill_host(module), []
    for requests in (3, 1, 2):
        batch = host.load_batch(runners._prefill_batch(requests))
        seen.append(
            [
                requests,
                batch.batch_size,
                batch.mamba_track_mask.tolist(),
                *(
                    host.buffer_registry.get_slot(name).buffer.tolist()
                    for name in ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens")
                ),
            ]
        )
    without = _prefill_host(module, tracking=False).load_batch(runners._prefill_batch(2))
    return {"loads": seen, "without tracking": without.mamba_track_mask is None}


def tracking(module: Any) -> dict[str, bool]:
    """``_is_mamba_track_enabled`` by speculation, extra buffer and radix cache."""
    from inkling_sconv.probe import runners
    from inkling_sconv.probe.stand_ins import AllOn

    found = {}
    for speculative in (False, True):
        for extra in (True, False):
            for radix in (True, False):
                set_to = AllOn(enable_mamba_extra_buffer=extra, disable_radix_cache=not radix)
                # Up to 0.5.17 these are methods and attributes of the server's arguments.
                arguments = types.SimpleNamespace(
                    enable_mamba_extra_buffer=lambda extra=extra: extra,
                    disable_radix_cache=not radix,
                )
                algorithm = AllOn(is_none=not speculative)
                host = stand_ins.make_instance(
                    module.PrefillCudaGraphRunner,
                    "_is_mamba_track_enabled",
                    model_runner=AllOn(spec_algorithm=algorithm, server_args=arguments),
                )
                with runners._configured(module, set_to):
                    name = f"speculative={speculative} extra={extra} radix={radix}"
                    found[name] = host._is_mamba_track_enabled()
                assert algorithm.is_none() is not speculative
    return found


def _draft_hosts(module: Any, recordable: tuple[bool | None, ...]) -> tuple[Any, Any]:
    """The composite runner and one step of it, with the tree's methods that a fix wraps.

    ``recordable`` says of each step's backend whether a graph may record its gather of slots; None:
    it has no short convolutions.
    """
    from inkling_sconv.probe.stand_ins import Stub

    sidecars = [
        types.SimpleNamespace()
        if value is None
        else types.SimpleNamespace(
            short_conv_backend=types.SimpleNamespace(_slot_gather_recordable=value)
        )
        for value in recordable
    ]
    step = stand_ins.make_instance(
        module.MultiLayerEagleDraftExtendCudaGraphRunner,
        "get_forward_batch",
        captured_req_width=2,
        extend_seq_lens_cpu=[2] * 4,
        num_front_tokens=0,
        model_runner=Stub(
            model_config=types.SimpleNamespace(
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
        "draft_extend_attn_backend_list": sidecars,
        "runners": [step],
        "_vocab_size": lambda: 8,
    }
    cls = module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    whole = stand_ins.make_instance(cls, "_allocate_buffers", **given)
    with mock.patch.object(module, "get_draft_input_from_target_hidden_dim", lambda _: 2):
        buffers = whole._allocate_buffers()
    whole = stand_ins.make_instance(
        cls,
        "prepare",
        **given,
        buffers=buffers,
        get_runner=lambda _: types.SimpleNamespace(
            _pad_to_bucket=lambda size, sizes: min(s for s in sizes if s >= size)
        ),
    )
    step.buffers = buffers
    return whole, step


def draft_buffers(module: Any) -> dict[str, Any]:
    """The checkpoint slots as captures and replays of draft-extend see them."""
    from inkling_sconv.probe.stand_ins import Stub

    found: dict[str, Any] = {}
    whole, step = _draft_hosts(module, (True, True))
    slots = getattr(whole.buffers, "mamba_track_indices", None)
    found["buffer"] = None if slots is None else [slots.tolist(), str(slots.dtype)]
    batches = [step.get_forward_batch(size) for size in (1, 2, 4)]
    views = [batch.mamba_track_indices for batch in batches]
    found["views"] = [
        None if view is None else [len(view), view.data_ptr() == slots.data_ptr()] for view in views
    ]
    found["other fields"] = [batch.batch_size for batch in batches]
    found["replays"] = []
    # The kernel that fills the other buffers needs a GPU.
    with mock.patch.object(module, "fill_draft_extend_prepare_buffers"):
        for live in ([5, 6, 7, 8], [9, 3, 4], [2], None, [6, 6]):
            size = 3 if live is None else len(live)
            batch = Stub(
                batch_size=size,
                mamba_track_indices=None if live is None else torch.tensor(live),
                seq_lens_cpu=None,
                seq_lens_sum=None,
            )
            keyword = {"forward_batch": batch} if size == 2 else {}
            whole.prepare(*(() if keyword else (batch,)), **keyword)
            kept = getattr(whole.buffers, "mamba_track_indices", None)
            at = None if kept is None else kept[: whole.bs].tolist()
            found["replays"].append([whole.raw_bs, whole.bs, kept is slots, at])
    found["translated"] = []
    for recordable in ((False, False), (True, False)):
        whole, step = _draft_hosts(module, recordable)
        kept = getattr(whole.buffers, "mamba_track_indices", None)
        found["translated"].append([kept is None, step.get_forward_batch(2).mamba_track_indices])
        with mock.patch.object(module, "fill_draft_extend_prepare_buffers"):
            batch = Stub(
                batch_size=1,
                mamba_track_indices=torch.tensor([5]),
                seq_lens_cpu=None,
                seq_lens_sum=None,
            )
            whole.prepare(batch)
    whole, step = _draft_hosts(module, (None,))
    found["without short convolutions"] = not hasattr(whole.buffers, "mamba_track_indices")
    return found


def window(module: Any) -> dict[str, Any]:
    """The convolution's method on one request, its interval read from the configuration."""
    from inkling_sconv.probe import runners
    from inkling_sconv.probe.stand_ins import AllOn, Stub

    found = {}
    for interval in (4, 8, 16):
        slots = torch.tensor([1])
        host = stand_ins.make_instance(
            module.ShortConvolution,
            "_update_sconv_cache_for_draft_extend",
            _conv_state=lambda _, slots=slots: Stub(track_cache_indices=slots),
        )
        cache = torch.zeros(2, 3, 1)
        cache[0, :, 0] = torch.tensor([3.0, 4.0, 5.0])
        batch = Stub(
            batch_size=1,
            seq_lens=torch.tensor([10]),
            mamba_track_indices=slots,
            spec_info=Stub(num_accept_tokens=torch.tensor([3]), num_front_tokens=2),
        )
        with runners._configured(module, AllOn(mamba=AllOn(mamba_track_interval=interval))):
            host._update_sconv_cache_for_draft_extend(
                batch, cache, torch.tensor([0]), torch.arange(4.0, 10.0)[:, None]
            )
        found[str(interval)] = cache[:, :, 0].tolist()
    return found


def state(module: Any) -> dict[str, Any]:
    """What the draft's worker does to its two pools, which three heads have, by forward mode."""
    from inkling_sconv.probe import runners
    from inkling_sconv.probe.stand_ins import Stub
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def pool(calls: list[Any]) -> Any:
        made = Stub(
            clear_slots=lambda slots: calls.append(["clear", slots.tolist()]),
            copy_from=lambda src, dst: calls.append(["copy", src.tolist(), dst.tolist()]),
        )
        return Stub(req_to_token_pool=Stub(mamba_pool=made))

    found = {}
    for name, keyword in (
        ("EXTEND", False),
        ("DECODE", False),
        ("DRAFT_EXTEND_V2", False),
        ("DRAFT_EXTEND_V2", True),
    ):
        calls: list[Any] = []
        first, second = pool(calls), pool(calls)
        architecture = Stub(architectures=["InklingForConditionalGenerationMTP"])
        worker = stand_ins.make_instance(
            module.MultiLayerEagleDraftWorker,
            "_apply_deferred_mamba_init_to_draft_pools",
            draft_runner=Stub(model_config=Stub(hf_config=architecture)),
            draft_runner_list=[first, second, first],
        )
        slots = (torch.tensor([n]) for n in (3, 5, 4))
        batch = Stub(
            forward_mode=ForwardMode[name],
            **dict(zip(runners.CLEAR_FIELDS, slots, strict=True)),
        )
        apply = worker._apply_deferred_mamba_init_to_draft_pools
        apply(**{"forward_batch": batch}) if keyword else apply(batch)
        found[f"{name}, by name" if keyword else name] = calls
    return found


# ---------------------------------------------------------------------- the fixes, one by one


def driven(fixes: Any = None) -> dict[str, Any]:
    """Each fix alone, in a tree that has every harm, and every wrapped method driven."""
    if fixes is None:
        from inkling_sconv.plugin import fixes
    modules = _modules()
    by_name = {fix.name: fix for fix in fixes.FIXES}
    found: dict[str, Any] = {"names": [[fix.name, fix.change] for fix in fixes.FIXES]}
    for name, drive in (
        ("prefill-rows", rows),
        ("prefill-tracking", tracking),
        ("draft-checkpoint", draft_buffers),
        ("draft-window", window),
        ("draft-state", state),
    ):
        log: list[str] = []
        fixes._mend(by_name[name], lambda level, line, log=log: log.append(line), modules[name])
        found[name] = {"log": log, **drive(modules[name])}
    found["harms"] = _harms()
    return found


def _in_a_child(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a fork of this process; its last line of traceback if raised."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        try:
            result = json.dumps(function(), default=repr)
        except BaseException:
            result = json.dumps({"raised": traceback.format_exc().strip().splitlines()[-1]})
        with os.fdopen(write, "w") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"raised": "died"}


def variant(*edits: tuple[str, str]) -> Any:
    """A copy of ``fixes.py``, with ``edits``; each ``old`` stands there exactly once."""
    from inkling_sconv.plugin import fixes

    text = inspect.getsource(fixes)
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    module = types.ModuleType("inkling_sconv.fixes_variant")
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    exec(compile(text, "<fixes>", "exec"), vars(module))
    return module


def wrong_fixes() -> dict[str, Any]:
    """``driven()`` of every wrong version of the fixes, each in a fork."""
    from fixes_mutants import DRIVEN

    _modules()
    edits: dict[str, tuple[str, str] | None] = {"unchanged": None, **DRIVEN}
    return {
        name: _in_a_child(lambda edit=edit: driven(variant(*([edit] if edit else []))))
        for name, edit in edits.items()
    }


# ---------------------------------------------------------------- the draft's state, by SGLang


def draft_states() -> dict[str, Any]:
    """The tree's own method beside ours, its Triton kernel interpreted, on steps without front."""
    from drafts_steps import Step, expected, run
    from inkling_sconv import names
    from inkling_sconv.probe import runners
    from inkling_sconv.probe.stand_ins import AllOn, Stub

    # Whether a kernel is interpreted is decided where it is decorated.
    sys.modules.pop(names.SHORT_CONVOLUTION_MODULE, None)
    os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.import_module(names.SHORT_CONVOLUTION_MODULE)
    draw = random.Random(0)
    seen = dict.fromkeys(
        ("compared", "tracked", "crossed", "states", "checkpoints", "misplaced"), 0
    )
    for number in range(200):
        requests, width = draw.randint(1, 4), draw.randint(1, 6)
        order = draw.sample(range(2 * requests + 1), 2 * requests)
        step = Step(
            order[:requests],
            [draw.randint(-1, width) for _ in range(requests)],
            [draw.randint(0, 40) for _ in range(requests)],
            order[requests:] if draw.random() < 0.8 else None,
            2 * requests + 1,
            width=width,
            interval=draw.choice((4, 16, 64)),
            window=draw.randint(1, 4),
            channels=draw.randint(1, 5),
        )

        def update(
            hidden: torch.Tensor,
            cache: torch.Tensor,
            step: Any = step,
            number: int = number,
            theirs: bool = True,
            **rest: Any,
        ) -> None:
            batch = Stub(
                batch_size=step.rows,
                seq_lens=rest["seq_lens"],
                mamba_track_indices=rest["track_slots"],
                spec_info=Stub(num_accept_tokens=rest["accepted"], num_front_tokens=0),
            )
            given = {
                "_conv_state": lambda _: types.SimpleNamespace(
                    track_cache_indices=rest["track_slots"]
                ),
                "_inkling_sconv_interval": lambda: rest["interval"],
            }
            cls = module.ShortConvolution if theirs else convolution.InklingShortConvolution
            name = "_update_sconv_cache_for_draft_extend"
            host = stand_ins.make_instance(cls, name, **given)
            flat = hidden.flatten(0, 1) if number % 2 else hidden
            extra = types.SimpleNamespace(
                mamba_track_interval=rest["interval"], enable_mamba_extra_buffer=True
            )
            # What it asks first goes into the kernel, which takes a bool.
            with (
                runners._configured(module, AllOn(mamba=extra)),
                mock.patch.object(module, "mamba_extra_buffer_enabled", lambda: True, create=True),
            ):
                getattr(host, name)(batch, cache, rest["cache_indices"], flat)

        theirs = run(update, step)
        ours = run(lambda *a, **k: update(*a, theirs=False, **k), step)
        assert torch.equal(ours, expected(step))
        crossed = step.kept is not None and any(
            (base + n) // step.interval > base // step.interval
            for base, n in zip(step.base, step.accepted, strict=True)
            if n >= 0
        )
        own = [slot + 1 for slot in step.own]
        seen["compared"] += 1
        seen["tracked"] += step.kept is not None
        seen["crossed"] += crossed
        seen["states"] += not torch.equal(theirs[own], ours[own])
        differ = not torch.equal(theirs, ours)
        seen["misplaced" if crossed else "checkpoints"] += differ
    return seen


def server_options() -> dict[str, Any]:
    """What the tree's own parser says of the options that our servers start with."""
    from inkling_sconv.proof.server import BASE_OPTIONS, MTP_OPTIONS
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        parser.parse_args(["--model-path=x", *BASE_OPTIONS, *MTP_OPTIONS])
        return {"refused": None}
    return {"refused": said.getvalue()}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "questions": questions,
    "mended": mended,
    "other-model": other_model,
    "undrivable": undrivable,
    "driven": driven,
    "wrong-fixes": wrong_fixes,
    "draft-states": draft_states,
    "server-options": server_options,
}


def play(scenario: str) -> dict[str, Any]:
    """Run one scenario in this process, which it spoils."""
    with contextlib.redirect_stdout(sys.stderr):
        # What a wrong fix leaves blank has no JSON of its own.
        return json.loads(json.dumps(SCENARIOS[scenario](), default=repr))
