"""The rejected designs and the missing guard, in real CUDA graphs: each must turn a check red."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "inkling"))

import harness
import mutants
import test_inkling_refresh_capture as capture
from inkling_sconv import names
from inkling_sconv.probe import backend as probe
from inkling_sconv.probe.backend import Rig


def refuses(subject: type) -> bool:
    rig = Rig(subject, device="cuda")
    batch = rig.make_batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        rig.refresh(batch, [0, 64], on_graph_path=False)
    except (RuntimeError, AttributeError):
        return True
    return False


INERT, EXEMPT = {"exempt_draft_extend": False}, {}
# In which form of draft-extend, and what is asked.
CHECKS: dict[str, tuple[dict[str, bool], Callable[[type], int]]] = {
    "refresh in the graph": (EXEMPT, lambda s: capture.live_replays_differ(s, True)),
    "refresh in front of the graph": (EXEMPT, lambda s: capture.live_replays_differ(s, False)),
    "prefill capture, inert scatter": (EXEMPT, lambda s: capture.inert_replays_differ(s, "EXTEND")),
    "draft-extend capture, left alone": (EXEMPT, capture.exempt_captures_differ),
    "draft-extend capture, inert scatter": (
        INERT,
        lambda s: capture.inert_replays_differ(s, capture.DRAFT_EXTEND),
    ),
    "live batch without prefix refused": (EXEMPT, lambda s: not refuses(s)),
}


def host() -> type:
    module = importlib.import_module(names.BACKEND_MODULE)
    return probe.find_backends(module)[0]


def figures(wrong: mutants.Mutant) -> dict[str, str]:
    """``{check: "" where it is green, else what was seen}``."""
    seen = {}
    for name, (form, check) in CHECKS.items():
        try:
            failed = check(mutants.build(wrong, host(), **form))
            seen[name] = str(int(failed)) if failed else ""
        except Exception as error:
            torch.cuda.synchronize()
            seen[name] = f"{type(error).__name__}"
    return seen


@pytest.mark.parametrize(
    "wrong", (*mutants.CONTROLS, mutants.NO_GUARD, *mutants.REJECTED_DESIGNS), ids=lambda m: m.name
)
def test_designs(wrong):
    seen = figures(wrong)
    if "INKLING_SCONV_LOGS" in os.environ:
        name = re.sub(r"[^\w.]+", "-", wrong.name.removeprefix("design: "))
        harness.record(f"design-{name}", **seen)
    assert any(seen.values()) == (wrong not in mutants.CONTROLS), seen
