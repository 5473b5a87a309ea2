"""The rejected designs and the missing guard, in real CUDA graphs: each must fail a check."""

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

INERT = {"exempt_draft_extend": False}
# The form of draft-extend, and what counts the failures.
CHECKS: dict[str, tuple[dict[str, bool], Callable[[type], int]]] = {
    "refresh in the graph": ({}, lambda cls: capture.count_wrong_replays(cls, True)),
    "refresh in front of the graph": ({}, lambda cls: capture.count_wrong_replays(cls, False)),
    "prefill capture, inert scatter": (
        {},
        lambda cls: capture.count_wrong_inert_captures(cls, "EXTEND"),
    ),
    "draft-extend capture, left alone": ({}, capture.count_wrong_exempt_captures),
    "draft-extend capture, inert scatter": (
        INERT,
        lambda cls: capture.count_wrong_inert_captures(cls, capture.DRAFT_EXTEND),
    ),
    "live batch without prefix refused": ({}, lambda cls: not capture.refuses_live_batch(cls)),
}


def run_checks(wrong: mutants.Mutant) -> dict[str, str]:
    """``{check: ""}`` where nothing fails, else the number of failures, or the exception."""
    found = {}
    for name, (form, count_failures) in CHECKS.items():
        try:
            cls = mutants.build(wrong, capture.find_installed(), **form)
            found[name] = str(int(count_failures(cls)) or "")
        except Exception as error:
            torch.cuda.synchronize()
            found[name] = type(error).__name__
    return found


@pytest.mark.parametrize(
    "wrong", (*mutants.CONTROLS, mutants.NO_GUARD, *mutants.REJECTED_DESIGNS), ids=lambda m: m.name
)
def test_designs(wrong):
    found = run_checks(wrong)
    if "INKLING_SCONV_LOGS" in os.environ:
        harness.record("design-" + re.sub(r"\W+", "-", wrong.name), **found)
    assert any(found.values()) == (wrong not in mutants.CONTROLS), found
