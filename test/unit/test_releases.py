"""Every release and the crashing fork: what the plugin changes there, to the attribute."""

import pytest
import releases

STATES = {
    "0.5.17": "untracked",
    **dict.fromkeys(("0.5.18", "0.5.19", "0.5.20", "0.5.21"), "guarded"),
    **dict.fromkeys(("0.5.22", "0.5.23"), "exempt"),
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
    "draft-extend": [f"{MODULE}.{CLASS}._refresh_track_conv_indices"],
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
# On by default, in the order of their log lines. The fork is made of 0.5.18, whose prefill graphs
# need no fix.
FIXES = {
    "untracked": [name for name in ATTRIBUTES if name != "draft-extend"],
    "crashing": ["draft-checkpoint", "draft-window", "draft-state"],
    "guarded": [],
    "exempt": ["draft-window"],
}
CAPTURE = {
    **dict.fromkeys(("untracked", "exempt"), "no indices"),
    "guarded": "inert indices",
    "crashing": CRASH,
}
LEFT_ALONE = {
    "untracked": "starts; this method alone would not fix its tracking; left alone.",
    "guarded": "healthy, the guard is there; left alone.",
    "exempt": "healthy, draft-extend is exempt; left alone.",
}


def list_default_fixes(tree: str, but: str = "") -> list[str]:
    return [name for name in FIXES[STATES[tree]] if name != but]


def list_fixed(tree: str, but: str = "") -> list[str]:
    """The attributes that the default fixes change."""
    return [attribute for name in list_default_fixes(tree, but) for attribute in ATTRIBUTES[name]]


def check_log(lines: list[str], tree: str, but: str = "") -> None:
    """One line for each fix that is on by default, and nothing else."""
    names = list_default_fixes(tree, but)
    assert len(lines) == len(names), lines
    for line, name in zip(lines, names, strict=True):
        assert line.startswith("WARNING inkling_sconv ") and f": {name} (" in line
        assert line.endswith("; fix applied.")


def check_grafted(seen: dict, tree: str, log: list[str], but: str = "") -> None:
    """The method is replaced with one walk over the modules, and the fixes are applied."""
    first, *fixes = log
    assert first.startswith("WARNING inkling_sconv ")
    assert f"{CLASS} is {STATES[tree]} (draft-extend capture: {CAPTURE[STATES[tree]]}): " in first
    assert "replaced _refresh_track_conv_indices, extended _alloc_graph_buffers." in first
    assert seen["states"][CLASS]["state"] == "grafted" and seen["walks"] == 1
    if "changed" in seen:
        assert seen["changed"] == sorted(METHODS + list_fixed(tree, but))
    check_log(fixes, tree, but)


@pytest.mark.parametrize("mode", (None, "fast", "force", "off"))
@pytest.mark.parametrize("tree", releases.TREES)
def test_each_mode_changes_what_it_says(drive, tree, mode):
    seen, state = drive(tree, "early", mode), STATES[tree]
    before = {"state": state, "capture": CAPTURE[state]}
    assert seen["bare"][CLASS] == before
    if mode == "off":
        (line,) = seen["log"]
        assert seen["changed"] == [] and "INKLING_SCONV=off" in line
    elif mode == "fast" or state == "crashing" or (mode == "force" and state != "exempt"):
        check_grafted(seen, tree, seen["log"])
        assert seen["states"][CLASS]["capture"] == "no indices"
        return
    else:
        line, *fixes = seen["log"]
        refused = " INKLING_SCONV=force is refused here; fast replaces the method."
        assert line.startswith("INFO inkling_sconv ") and f"{CLASS} is {state} (" in line
        assert line.endswith(LEFT_ALONE[state] + refused * (mode == "force"))
        assert seen["changed"] == sorted(list_fixed(tree))
        check_log(fixes, tree)
    assert seen["states"][CLASS] == before and seen["walks"] == 0


@pytest.mark.parametrize("tree", releases.TREES)
def test_the_order_of_a_server(drive, tree):
    seen = drive(tree, "late")
    assert not seen["imported_by_runners"], "the test is void: the runners import the backend"
    assert not seen["imported_by_plugins"] and seen["changed_by_plugins"] == []
    assert seen["tools"] == [], "a server loads what only the command line needs"
    if STATES[tree] == "crashing":
        check_grafted(seen, tree, seen["log"])
    else:
        assert seen["states"][CLASS]["state"] == STATES[tree]
        assert seen["log"][0].endswith(LEFT_ALONE[STATES[tree]])
        check_log(seen["log"][1:], tree)


@pytest.mark.parametrize(
    ("tree", "mode"),
    [("crashing", "auto"), ("0.5.17", "force"), *((tree, "fast") for tree in releases.RELEASES)],
)
def test_the_contract_holds_where_we_graft(drive, tree, mode):
    seen = drive(tree, "contract", mode)
    assert seen["code"] == 0 and " passed" in seen["output"], seen["output"]


def test_an_unknown_mode_is_one_warning_and_auto(drive):
    seen = drive("crashing", "late", "banana")
    warning, *log = seen["log"]
    assert warning.startswith("WARNING") and "'banana'" in warning
    assert "auto, fast, force, off; using auto." in warning
    check_grafted(seen, "crashing", log)


@pytest.mark.parametrize(
    ("tree", "mode", "form"),
    (
        *(("crashing", None, form) for form in ("", "exempt", " Inert ", "banana")),
        ("0.5.17", "force", "inert"),
        ("0.5.21", "fast", "inert"),
        *((tree, "fast", "inert") for tree in releases.RELEASES if STATES[tree] == "exempt"),
    ),
)
def test_forms_of_draft_extend(drive, tree, mode, form):
    seen = drive(tree, "early", mode, INKLING_SCONV_DRAFT_EXTEND=form)
    log, inert = seen["log"], form.strip().lower() == "inert"
    if form == "banana" or (inert and STATES[tree] == "exempt"):
        warning, *log = log
        words = "is refused here" if inert else "is not one of exempt, inert"
        assert warning.startswith("WARNING ") and warning.endswith(f" {words}; using exempt.")
        inert = False
    assert seen["states"][CLASS]["capture"] == ("inert indices" if inert else "no indices")
    # Inert draft-extend sends every checkpoint to slot 0.
    check_grafted(seen, tree, log, "draft-checkpoint" if inert else "")


def test_the_form_is_not_read_where_nothing_is_replaced(drive):
    seen = drive("0.5.21", "early", INKLING_SCONV_DRAFT_EXTEND="banana")
    assert seen["changed"] == [] and len(seen["log"]) == 1


def test_registering_twice_grafts_once(drive):
    seen = drive("crashing", "twice")
    check_grafted(seen, "crashing", seen["log"])


@pytest.mark.parametrize("tree", releases.TREES)
def test_it_would_start_our_servers(drive, tree):
    seen = drive(tree, "launches")
    # Speculation by 2 and 8 heads, NGRAM or none, the prefill graphs, both caches, and the soak.
    assert len(seen["servers"]) >= 8 and len(seen["pools"]) >= 4
    assert not any(seen["servers"].values()), seen["servers"]
    assert not any(seen["pools"].values()), seen["pools"]
    parsed, completed, checked = seen["changed"].values()
    assert parsed == "sglang serve: error: unrecognized arguments: --no-such-option"
    assert completed.startswith("sglang/srt/") and "should be in range (0, 1.0]" in completed
    assert checked.startswith("sglang/srt/") and ": AssertionError" in checked
    refused = (
        "sglang/srt/entrypoints/openai/serving_inkling.py, _check_served_tokenizer: ValueError"
    )
    assert (seen["tokenizer"] or "").startswith(refused) == (tree == "0.5.23"), seen["tokenizer"]
    missing = "sglang/srt/mem_cache/swa_memory_pool.py, get_key_buffer: KeyError: 1"
    full = missing if tree == "0.5.21" else None
    assert seen["unbanded"] == {"2": full, "8": full}
