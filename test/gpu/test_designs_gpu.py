"""The rejected designs and the missing guard, in real CUDA graphs: each must turn a check red."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "inkling"))

import harness
import mutants
import test_inkling_refresh_capture as capture
from inkling_sconv import plugin, probe
from inkling_sconv.probe import Rig


def refuses(subject: type) -> bool:
    rig = Rig(subject, device="cuda")
    batch = rig.batch("EXTEND", 1, mask=[True], track_seqlens=[64])
    try:
        rig.refresh(batch, [0, 64], on_graph_path=False)
    except (RuntimeError, AttributeError):
        return True
    return False


CHECKS = {
    "refresh in the graph": lambda subject: capture.live_replays_differ(subject, True),
    "refresh in front of the graph": lambda subject: capture.live_replays_differ(subject, False),
    "prefill capture, inert scatter": lambda s: capture.inert_replays_differ(s, "EXTEND"),
    "draft-extend capture, inert scatter": lambda s: capture.inert_replays_differ(
        s, "DRAFT_EXTEND_V2"
    ),
    "live batch without prefix refused": lambda subject: not refuses(subject),
}


def host() -> type:
    module = importlib.import_module(plugin.BACKEND_MODULE)
    return probe.find_backends(module)[0]


def figures(subject: type) -> dict[str, str]:
    """``{check: "" where it is green, else what was seen}``."""
    seen = {}
    for name, check in CHECKS.items():
        try:
            seen[name] = str(int(failed)) if (failed := check(subject)) else ""
        except Exception as error:
            torch.cuda.synchronize()
            seen[name] = f"{type(error).__name__}"
    return seen


NO_GUARD = mutants.mutant(
    "no guard",
    mutants.BACKEND,
    ("        if prefix_lens is None and on_graph_path:", "        if False:"),
)


@pytest.mark.parametrize(
    "wrong", (*mutants.CONTROLS, NO_GUARD, *mutants.REJECTED_DESIGNS), ids=lambda m: m.name
)
def test_designs(wrong):
    seen = figures(mutants.build(wrong, host()))
    if "INKLING_SCONV_LOGS" in os.environ:
        harness.record(f"design-{wrong.name.replace(' ', '-').replace(':', '')}", **seen)
    assert any(seen.values()) == (wrong not in mutants.CONTROLS), seen
