"""Every release and the crashing fork: recognised, cured or left alone, to the attribute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import releases
from conftest import TEST

STATES = {
    "0.5.17": "untracked",
    "0.5.18": "guarded",
    "0.5.19": "guarded",
    "0.5.20": "guarded",
    "0.5.21": "guarded",
    "0.5.22": "exempt",
    "0.5.23": "exempt",
    "crashing": "crashing",
}
CRASH = "AttributeError: 'NoneType' object has no attribute 'shape'"
CLASS = "InklingShortConvAttnBackend"
MODULE = "sglang.srt.layers.attention.linear.inkling_sconv_backend"
METHODS = [
    f"{MODULE}.{CLASS}.{name}" for name in ("_alloc_graph_buffers", "_refresh_track_conv_indices")
]
PREFILL = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
DRAFT_EXTEND = "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
CONVOLUTION = "sglang.srt.models.inkling_common.sconv.ShortConvolution"
WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
ATTRIBUTES = {
    "prefill-rows": [f"{PREFILL}.load_batch"],
    "prefill-tracking": [f"{PREFILL}._is_mamba_track_enabled"],
    "draft-checkpoint": [
        f"{DRAFT_EXTEND}.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner._allocate_buffers",
        f"{DRAFT_EXTEND}.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare",
        f"{DRAFT_EXTEND}.MultiLayerEagleDraftExtendCudaGraphRunner.get_forward_batch",
    ],
    "draft-window": [
        f"{CONVOLUTION}._update_sconv_cache_for_draft_extend",
        f"{CONVOLUTION}._inkling_sconv_interval",
    ],
    "draft-state": [f"{WORKER}._apply_deferred_mamba_init_to_draft_pools"],
}
# On by default, in the order of their log lines. 0.5.18, of which the fork is made, has
# prefill graphs that need none.
FIXES = {
    "untracked": [*ATTRIBUTES],
    "crashing": ["draft-checkpoint", "draft-window", "draft-state"],
    "guarded": [],
    "exempt": [],
}
CAPTURE = {
    "untracked": "no indices",
    "guarded": "inert indices",
    "exempt": "no indices",
    "crashing": CRASH,
}
HEALTHY = [tree for tree in releases.TREES if tree != releases.CRASHING]
NO_FIXES = {"INKLING_SCONV_FIXES": "none"}


def by_default(tree: str, but: str = "") -> list[str]:
    return [name for name in FIXES[STATES[tree]] if name != but]


def fixed(tree: str, but: str = "") -> list[str]:
    return [attribute for name in by_default(tree, but) for attribute in ATTRIBUTES[name]]


def check_log(lines: list[str], tree: str, but: str = "") -> None:
    """One line for each fix that is on by default, and nothing else."""
    names = by_default(tree, but)
    assert len(lines) == len(names), lines
    for line, name in zip(lines, names, strict=True):
        assert line.startswith("WARNING inkling_sconv ") and f": {name} (" in line
        assert line.endswith("; mended.")


def check_grafted(line: str, tree: str) -> None:
    assert line.startswith("WARNING inkling_sconv ")
    assert f"{CLASS} is {STATES[tree]} (draft-extend capture: {CAPTURE[STATES[tree]]}): " in line
    assert "replaced _refresh_track_conv_indices, extended _alloc_graph_buffers." in line


@pytest.mark.parametrize("tree", releases.TREES)
def test_auto_changes_the_crashing_tree_only(drive, tree):
    seen = drive(tree, "early", **NO_FIXES)
    assert seen["bare"][CLASS] == {"state": STATES[tree], "capture": CAPTURE[STATES[tree]]}
    crashing = STATES[tree] == "crashing"
    assert seen["changed"] == (METHODS if crashing else [])
    assert seen["states"][CLASS]["state"] == ("grafted" if crashing else STATES[tree])
    assert len(seen["log"]) == 1


@pytest.mark.parametrize("mode", (None, "fast"))
@pytest.mark.parametrize("tree", releases.TREES)
def test_what_the_default_fixes_change_too(drive, tree, mode):
    seen = drive(tree, "early", mode)
    grafts = mode == "fast" or STATES[tree] == "crashing"
    assert seen["changed"] == sorted((METHODS if grafts else []) + fixed(tree))
    check_log(seen["log"][1:], tree)


@pytest.mark.parametrize("tree", releases.TREES)
def test_auto_in_the_order_of_a_server(drive, tree):
    seen = drive(tree, "late")
    assert not seen["imported_by_runners"], "the test is void: the runners import the backend"
    assert not seen["imported_by_plugins"] and seen["changed_by_plugins"] == []
    assert seen["states"][CLASS]["state"] == (
        "grafted" if STATES[tree] == "crashing" else STATES[tree]
    )
    line, *fixes = seen["log"]
    level, words = {
        "untracked": ("INFO", "starts; its tracking needs more than this method; left alone."),
        "guarded": ("INFO", "healthy, the guard is there; left alone."),
        "exempt": ("INFO", "healthy, draft-extend is exempt; left alone."),
        "crashing": ("WARNING", f"({CRASH.join(('draft-extend capture: ', ''))}): replaced"),
    }[STATES[tree]]
    assert line.startswith(f"{level} inkling_sconv ") and words in line
    assert f"{CLASS} is {STATES[tree]} (" in line
    check_log(fixes, tree)


@pytest.mark.parametrize("tree", HEALTHY)
def test_force(drive, tree):
    seen = drive(tree, "early", "force", **NO_FIXES)
    (line,) = seen["log"]
    if STATES[tree] == "exempt":
        assert seen["changed"] == [] and seen["states"][CLASS]["state"] == "exempt"
        assert line.startswith("INFO ")
        assert line.endswith(" INKLING_SCONV=force is refused here; fast replaces the method.")
    else:
        assert seen["changed"] == METHODS
        assert seen["states"][CLASS] == {"state": "grafted", "capture": "no indices"}
        check_grafted(line, tree)


@pytest.mark.parametrize("tree", releases.TREES)
def test_fast(drive, tree):
    seen = drive(tree, "early", "fast", **NO_FIXES)
    (line,) = seen["log"]
    assert seen["changed"] == METHODS
    assert seen["states"][CLASS] == {"state": "grafted", "capture": "no indices"}
    check_grafted(line, tree)


@pytest.mark.parametrize(
    ("tree", "mode"),
    [("crashing", "auto"), ("0.5.17", "force"), *((tree, "fast") for tree in HEALTHY)],
)
def test_the_contract_holds_where_we_graft(drive, tree, mode):
    seen = drive(tree, "contract", mode)
    assert seen["code"] == 0 and " passed" in seen["output"], seen["output"]


@pytest.mark.parametrize("tree", releases.TREES)
def test_off(drive, tree):
    seen = drive(tree, "early", "off")
    assert seen["changed"] == [] and seen["states"][CLASS]["state"] == STATES[tree]
    assert len(seen["log"]) == 1 and "INKLING_SCONV=off" in seen["log"][0]


def test_an_unknown_mode_is_one_warning_and_auto(drive):
    seen = drive("crashing", "late", "banana")
    warning, graft, *fixes = seen["log"]
    assert warning.startswith("WARNING") and "'banana'" in warning
    assert "auto, fast, force, off; using auto." in warning
    assert "replaced" in graft and seen["states"][CLASS]["state"] == "grafted"
    check_log(fixes, "crashing")


@pytest.mark.parametrize("form", ("", "exempt", " Inert ", "banana"))
@pytest.mark.parametrize(
    ("tree", "mode"), (("crashing", None), ("0.5.17", "force"), ("0.5.21", "fast"))
)
def test_forms_of_draft_extend(drive, tree, mode, form):
    seen = drive(tree, "early", mode, INKLING_SCONV_DRAFT_EXTEND=form)
    log = seen["log"]
    if form == "banana":
        warning, *log = log
        assert warning.startswith("WARNING ") and warning.endswith(
            ": INKLING_SCONV_DRAFT_EXTEND='banana' is none of exempt, inert; using exempt."
        )
    inert = form == " Inert "
    assert seen["states"][CLASS] == {
        "state": "grafted",
        "capture": "inert indices" if inert else "no indices",
    }
    # An inert draft-extend has slot 0 for every checkpoint.
    but = "draft-checkpoint" if inert else ""
    assert seen["changed"] == sorted(METHODS + fixed(tree, but))
    check_grafted(log[0], tree)
    check_log(log[1:], tree, but)


@pytest.mark.parametrize("tree", [tree for tree in HEALTHY if STATES[tree] == "exempt"])
def test_inert_is_refused_where_the_runner_stages_the_slots(drive, tree):
    seen = drive(tree, "early", "fast", INKLING_SCONV_DRAFT_EXTEND="inert")
    warning, line = seen["log"]
    assert warning.startswith("WARNING ")
    assert warning.endswith(": INKLING_SCONV_DRAFT_EXTEND=inert is refused here; using exempt.")
    check_grafted(line, tree)
    assert seen["states"][CLASS] == {"state": "grafted", "capture": "no indices"}


def test_a_form_is_not_looked_at_where_nothing_is_replaced(drive):
    seen = drive("0.5.21", "early", INKLING_SCONV_DRAFT_EXTEND="banana")
    assert seen["changed"] == [] and len(seen["log"]) == 1


def test_registering_twice_grafts_once(drive):
    seen = drive("crashing", "twice")
    check_grafted(seen["log"][0], "crashing")
    check_log(seen["log"][1:], "crashing")
    assert seen["states"][CLASS]["state"] == "grafted"


def test_register_and_graft_walk_the_modules_once(tmp_path):
    """They take less than two and a half of the registry's walks over every loaded module."""
    # In milliseconds it would be a test of the machine: 58 - 90 on one within an hour. A fork of
    # a loaded process would pay for copying its pages too, so each try is a new one.
    code = """
import importlib, time
import drive
from inkling_sconv import names
from inkling_sconv import plugin
from sglang.srt.plugins import hook_registry
drive.import_runners()
importlib.import_module(names.BACKEND_MODULE)
def seconds(call, *arguments):
    start = time.process_time()
    call(*arguments)
    return time.process_time() - start
walks = [seconds(hook_registry._propagate_patch, object(), object(), None) for _ in range(3)]
print(seconds(plugin.register) / min(walks))
"""
    environment = releases.environment(
        releases.tree("0.5.17", tmp_path), "0.5.17", INKLING_SCONV="force", **NO_FIXES
    )
    environment["PYTHONPATH"] += f"{os.pathsep}{TEST}"
    tries = []
    while len(tries) < 3 and min(tries, default=2.5) >= 2.5:
        tries.append(float(subprocess.check_output([sys.executable, "-c", code], env=environment)))
    assert min(tries) < 2.5, tries


@pytest.mark.parametrize("tree", releases.RELEASES)
def test_the_options_of_our_servers_are_its_options(drive, tree):
    assert drive(tree, "server-options") == {"refused": None}
