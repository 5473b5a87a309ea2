"""The fixes with one line of them wrong; ``test/unit/test_fixes.py`` runs them."""

from __future__ import annotations

KEEP = "slots[:live].copy_(batch.mamba_track_indices[:live])"
CLEAR = "buffer[runner.raw_bs :].zero_()"
DECIDE = "return wrapped.__func__(_WithoutSpeculation.of(runner), *args, **kwargs)"
ONCE = "return None if batch.forward_mode.is_draft_extend_v2() else wrapped(*args, **kwargs)"

DRIVEN: dict[str, tuple[str, str]] = {
    "rows: from one later": (CLEAR, "buffer[runner.raw_bs + 1 :].zero_()"),
    "rows: the last live one too": (CLEAR, "buffer[runner.raw_bs - 1 :].zero_()"),
    "rows: all of them": (CLEAR, "buffer.zero_()"),
    "rows: one only": (CLEAR, "buffer[runner.raw_bs : runner.raw_bs + 1].zero_()"),
    "rows: the mask only": ("in runners.TRACK_FIELDS:", "in runners.TRACK_FIELDS[:1]:"),
    "rows: slots that are not there": ("if runner.buffer_registry.has_slot(name):", "if True:"),
    "rows: the batch is lost": (
        "                runner.buffer_registry.get_slot(name).buffer[runner.raw_bs :].zero_()\n"
        "        return batch\n",
        "                runner.buffer_registry.get_slot(name).buffer[runner.raw_bs :].zero_()\n"
        "        return None\n",
    ),
    "tracking: as with speculation": ("is_none=lambda: True", "is_none=lambda: False"),
    "tracking: always": (DECIDE, "return True"),
    "tracking: as it was": (DECIDE, "return wrapped(*args, **kwargs)"),
    "checkpoint: also where slots are translated": ("if not _translates(runner):", "if True:"),
    "checkpoint: one recordable backend is enough": ("return not all(", "return not any("),
    "checkpoint: the other way round": ("return not all(", "return all("),
    "checkpoint: also without short convolutions": (
        '"_slot_gather_recordable", False)',
        '"_slot_gather_recordable", True)',
    ),
    "checkpoint: slots in 32 bits": (
        "runner.max_bs, dtype=torch.int64",
        "runner.max_bs, dtype=torch.int32",
    ),
    "checkpoint: a copy in each batch": (
        "slots[: batch.batch_size]\n",
        "slots[: batch.batch_size].clone()\n",
    ),
    "checkpoint: all slots in each batch": ("slots[: batch.batch_size]\n", "slots\n"),
    "checkpoint: padded rows stale": ("            slots[live:].zero_()\n", ""),
    "checkpoint: live rows zeroed": (
        f"            if live:\n                {KEEP}\n",
        "",
    ),
    "checkpoint: the last row left out": (
        KEEP,
        "slots[: live - 1].copy_(batch.mamba_track_indices[: live - 1])",
    ),
    "checkpoint: another buffer": (
        KEEP,
        "runner.buffers.mamba_track_indices = batch.mamba_track_indices.clone()",
    ),
    "checkpoint: a batch without slots": (
        "live = 0 if batch.mamba_track_indices is None else batch.batch_size",
        "live = batch.batch_size",
    ),
    "checkpoint: the batch by position only": (
        '            batch = args[0] if args else kwargs["forward_batch"]\n            live',
        "            batch = args[0]\n            live",
    ),
    "checkpoint: prepare is not called": (
        "result = wrapped(*args, **kwargs)",
        "result = None",
    ),
    "window: an interval of its own": (
        "int(module.get_exec().mamba.mamba_track_interval)",
        "8",
    ),
    "window: the method is not put there": (
        "setattr(cls, name, vars(InklingShortConvolution)[name])",
        "pass",
    ),
    "state: never cleared": (ONCE, "return None"),
    "state: cleared in each step": (ONCE, "return wrapped(*args, **kwargs)"),
    "state: cleared in draft-extend only": (
        "None if batch.forward_mode.is_draft_extend_v2()",
        "None if not batch.forward_mode.is_draft_extend_v2()",
    ),
    "state: not cleared in any extend": (
        "batch.forward_mode.is_draft_extend_v2()",
        "batch.forward_mode.is_extend(include_draft_extend_v2=True)",
    ),
    "state: the batch by position only": (
        'batch = args[0] if args else kwargs["forward_batch"]\n        return None',
        "batch = args[0]\n        return None",
    ),
    "window: the interval as a method": ("staticmethod(\n        lambda:", "(\n        lambda:"),
}
"""Seen by driving the methods that a fix wraps."""

DECIDED: dict[str, tuple[str, str]] = {
    "mended without harm": (
        "        if not harms():\n            return\n",
        "",
    ),
    "not looked at again": (
        "        if not harms():\n            log(",
        "        if True:\n            log(",
    ),
    "what was added stays": ("            delattr(cls, name)\n", "            pass\n"),
    "what was replaced stays": (
        "                setattr(cls, name, value)\n",
        "                pass\n",
    ),
    "an error goes on into the import": (
        "except Exception as error:",
        "except ValueError as error:",
    ),
    "an error is not one": ("log(logging.ERROR, ", "log(logging.INFO, "),
    "no reason": ('why = "it does not help here"', "pass"),
    "where it was not proven": (
        "else not states & fix.default_for:",
        "else states & fix.default_for:",
    ),
    "everywhere": ("else not states & fix.default_for:", "else False:"),
    "what was not asked for": ("if fix.name not in asked if", "if fix.name in asked if"),
    "where slots are overwritten": (
        "if fix.needs_draft_extend_exemption and not all(",
        "if False and not all(",
    ),
    "those that need no exempt one": (
        "if fix.needs_draft_extend_exemption and not all(",
        "if not all(",
    ),
    "one backend that is alone is enough": ("not all(map(", "not any(map("),
    "said unasked": ("            if asked is not None:\n", "            if True:\n"),
    "names as they are written": ("{name.strip().lower() for", "{name for"),
    "none is a name": ('- {"", "none"}', '- {""}'),
    "an unknown name is silent": ("if unknown := names.difference(known):", "if unknown := set():"),
    "on the default device": ('with torch.device("cpu"):', "if True:"),
    "empty is none": (
        '    if not os.environ.get(VARIABLE, "").strip():\n',
        "    if VARIABLE not in os.environ:\n",
    ),
}
"""Seen in which fixes are made where, and in what is said."""
