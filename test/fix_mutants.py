"""Wrong versions of the fixes, by the check that must catch each.

Checks named for a fix are ``fix_scenarios.CHECKS``, which run in a tree. ``applying`` and
``choosing`` are in ``test/unit/test_fixes.py``.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any, NamedTuple

from inkling_sconv.plugin import fixes, settings


class Mutant(NamedTuple):
    """``old`` stands once in the function ``definition``, as ``ast.unparse`` writes it."""

    name: str
    rule: str
    definition: str
    old: str = ""
    new: str = ""


ROWS = "buffer[runner.raw_bs:].zero_()"
DECIDE = "wrapped.__func__(Override(runner, model_runner=model_runner), "
KEEP = "slots[:live].copy_(batch.mamba_track_indices[:live])"
VIEW = "slots[:batch.batch_size]"
BATCH = "args[0] if args else kwargs['forward_batch']"
IS_DRAFT_EXTEND = "batch.forward_mode.is_draft_extend_v2()"
EXEMPTION = "fix.needs_draft_extend_exemption and "
ON_BY_DEFAULT = "bool(states & fix.default_for)"

TABLE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("_clear_stale_rows", "prefill-rows"): {
        "from one row later": (ROWS, "buffer[runner.raw_bs + 1:].zero_()"),
        "the last live row too": (ROWS, "buffer[runner.raw_bs - 1:].zero_()"),
        "all rows": (ROWS, "buffer.zero_()"),
        "one row only": (ROWS, "buffer[runner.raw_bs:runner.raw_bs + 1].zero_()"),
        "the mask only": ("runners.TRACK_FIELDS", "runners.TRACK_FIELDS[:1]"),
        "slots that do not exist": ("if runner.buffer_registry.has_slot(name)", "if True"),
        "the batch is lost": ("return batch", "return None"),
    },
    ("_track_under_speculation", "prefill-tracking"): {
        "as with speculation": ("is_none=lambda: True", "is_none=lambda: False"),
        "always": (DECIDE, f"True or {DECIDE}"),
        "as before": (DECIDE, "wrapped("),
        "the algorithm changed for good": (
            "algorithm = ",
            "model_runner.spec_algorithm = algorithm = ",
        ),
    },
    ("_keep_draft_checkpoints", "draft-checkpoint"): {
        "where slots are translated": ("if not _translates_slots_on_host(runner)", "if True"),
        "slots in 32 bits": ("dtype=torch.int64", "dtype=torch.int32"),
        "a copy in each batch": (VIEW, f"{VIEW}.clone()"),
        "all slots in each batch": (VIEW, "slots"),
        "padded rows stale": ("slots[live:].zero_()", "pass"),
        "live rows zeroed": ("if live:", "if False:"),
        "the last row left out": (
            KEEP,
            "slots[:live - 1].copy_(batch.mamba_track_indices[:live - 1])",
        ),
        "another buffer": (
            KEEP,
            "runner.buffers.mamba_track_indices = batch.mamba_track_indices.clone()",
        ),
        "slots of a batch without any": (
            "live = 0 if batch.mamba_track_indices is None else batch.batch_size",
            "live = batch.batch_size",
        ),
        "the batch by position only": (BATCH, "args[0]"),
        "prepare is not called": ("result = wrapped(*args, **kwargs)", "result = None"),
    },
    ("_translates_slots_on_host", "draft-checkpoint"): {
        "one recordable backend is enough": ("not all(", "not any("),
        "the other way round": ("not all(", "all("),
        "without short convolutions": ("recordable', False)", "recordable', True)"),
    },
    ("_place_draft_checkpoints", "draft-window"): {
        "an interval of its own": ("int(module.get_exec().mamba.mamba_track_interval)", "8"),
        "the interval as a method": ("staticmethod(", "("),
        "the method is not put there": (
            "setattr(cls, name, vars(InklingShortConvolution)[name])",
            "pass",
        ),
    },
    ("_clear_draft_states_once", "draft-state"): {
        "never cleared": (f"None if {IS_DRAFT_EXTEND}", "None if True"),
        "cleared in each step": (f"None if {IS_DRAFT_EXTEND}", "None if False"),
        "cleared in draft-extend only": (IS_DRAFT_EXTEND, f"not {IS_DRAFT_EXTEND}"),
        "not cleared in any extend": (
            IS_DRAFT_EXTEND,
            "batch.forward_mode.is_extend(include_draft_extend_v2=True)",
        ),
        "the batch by position only": (BATCH, "args[0]"),
    },
    ("_apply_where_needed", "applying"): {
        "applied without harm": (
            "not is_needed():\n            return",
            "False:\n            return",
        ),
        "not checked again": ("not is_needed():\n            log(", "True:\n            log("),
        "classes are not restored": ("restore_classes()\n", "pass\n"),
        "an error propagates": ("except Exception", "except ValueError"),
        "an error is not logged as one": ("logging.ERROR", "logging.INFO"),
        "no reason": ("why = 'it does not help here'", "pass"),
        "on the default device": ("with torch.device('cpu')", "if True"),
    },
    ("save_classes", "applying"): {
        "what was added stays": ("delattr(cls, name)", "pass"),
        "what was replaced stays": ("setattr(cls, name, value)", "pass"),
    },
    ("install_fixes", "choosing"): {
        "where it is off by default": (ON_BY_DEFAULT, f"not {ON_BY_DEFAULT}"),
        "everywhere": (ON_BY_DEFAULT, "True"),
        "what was not asked for": ("fix.name in asked", "fix.name not in asked"),
        "where slots are overwritten": (EXEMPTION, "False and "),
        "only with the exemption": (EXEMPTION, ""),
        "one exempt backend is enough": ("not all(", "not any("),
        "a warning unasked": ("if asked is not None:", "if True:"),
    },
    ("_read_known_names", "choosing"): {
        "unknown names are silent": ("asked.difference(known)", "set()"),
    },
    ("read_fix_names", "choosing"): {
        "names as they are written": (".lower()", ""),
        "none is a name": ("{'', 'none'}", "{''}"),
        "empty is none": ("if not value", "if FIXES_VARIABLE not in os.environ"),
    },
}
MUTANTS = [
    Mutant(name, rule, definition, *edit)
    for (definition, rule), mutants in TABLE.items()
    for name, edit in mutants.items()
]
CONTROL = Mutant("unchanged", "", "")
"""Built like the mutants, without an edit: every check passes, or the others prove nothing."""


def build(mutant: Mutant) -> Any:
    """A copy of the module ``fixes`` with ``mutant`` in it, or in its ``read_fix_names``."""
    module = _copy(fixes, mutant)
    if mutant.definition == "read_fix_names":
        module.read_fix_names = _copy(settings, mutant).read_fix_names
    return module


def _copy(original: types.ModuleType, mutant: Mutant) -> Any:
    tree = ast.parse(inspect.getsource(original))
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name == mutant.definition:
            text = ast.unparse(node)
            assert text.count(mutant.old) == 1, f"{mutant.name}: not one place of {mutant.old!r}"
            tree.body[place : place + 1] = ast.parse(text.replace(mutant.old, mutant.new)).body
    module = types.ModuleType(original.__name__)
    exec(compile(tree, f"<{mutant.name}>", "exec"), vars(module))
    return module
