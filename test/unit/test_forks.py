"""Forks that differ from the crashing one, and plugins that were there first."""

import pytest
import releases
from test_releases import CLASS, METHODS, check_grafted, check_log, list_default_fixes, list_fixed


def crashing_text(*edits: tuple[str, str]) -> str:
    text = releases.backend_text(releases.CRASHING)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


OTHER_CRASH = ("        live = min(", "        self.fork_state.shape\n        live = min(")
RESULT = "        self.sconv_metadata.track_conv_indices = out"
SUBCLASS = f"\n\nclass Fork({CLASS}):\n    def "
OVERRIDE = """_refresh_track_conv_indices(self, forward_batch, on_graph_path):
        super()._refresh_track_conv_indices(forward_batch, on_graph_path)
"""


@pytest.mark.parametrize(
    ("edit", "words"),
    (
        (
            ("aligned - self.conv_state_len", "aligned - self.conv_state_len - 1"),
            ("unknown (live batch: indices differ from", "=force replaces the method."),
        ),
        ((RESULT, f"{RESULT}\n        forward_batch.mamba_extra = 1"), ("also sets mamba_extra",)),
        (OTHER_CRASH, ("unknown", "fork_state")),
        (("_refresh_track_conv_indices", "_refresh_windows"), ("no class",)),
    ),
    ids=("another window", "does more", "another crash", "another name"),
)
def test_a_method_that_is_not_recognised_is_left_alone(drive, edit, words):
    seen = drive("crashing", "early", text=crashing_text(edit))
    (line,) = seen["log"]
    assert seen["changed"] == [] and line.startswith("WARNING ") and "\n" not in line
    assert all(word in line for word in (*words, "left alone."))


def test_force_replaces_what_is_not_recognised(drive):
    seen = drive("crashing", "early", "force", crashing_text(OTHER_CRASH))
    assert seen["changed"] == METHODS and seen["states"][CLASS]["state"] == "grafted"


def test_force_restores_the_original_where_ours_fails(drive):
    text = crashing_text(("_graph_track_conv_indices", "_fork_rows"))
    seen = drive("crashing", "early", "force", text)
    line, *fixes = seen["log"]
    assert line.startswith("ERROR") and line.endswith("; the original is restored.")
    # One of the draft's fixes needs a method that leaves draft-extend alone.
    assert seen["changed"] == sorted(list_fixed("crashing", "draft-checkpoint"))
    check_log(fixes, "crashing", "draft-checkpoint")


def test_a_renamed_class_is_found_by_its_method(drive):
    text = crashing_text((CLASS, "ForkSconvBackend"))
    seen = drive("crashing", "early", text=text, INKLING_SCONV_FIXES="none")
    assert seen["changed"] == [name.replace(CLASS, "ForkSconvBackend") for name in METHODS]
    assert seen["states"]["ForkSconvBackend"]["state"] == "grafted"


@pytest.mark.parametrize("method", ("other(self): pass\n", OVERRIDE), ids=("inherits", "overrides"))
def test_a_subclass_gets_it_from_its_base(drive, method):
    seen = drive("crashing", "early", text=crashing_text() + SUBCLASS + method)
    check_grafted(seen, "crashing", seen["log"])
    assert {report["state"] for report in seen["states"].values()} == {"grafted"}
    assert len(seen["states"]) == 1 + (method == OVERRIDE)


@pytest.mark.parametrize(
    ("scenario", "words", "fixes"),
    (
        (
            "hooked",
            "already hooked by plugin other",
            list_default_fixes("crashing", "draft-checkpoint"),
        ),
        # The method in place does not crash any more.
        ("patched", "already replaced by __main__.load_plugin.<locals>.<lambda>", []),
    ),
)
@pytest.mark.parametrize("mode", ("auto", "force"))
def test_a_method_that_another_plugin_changed_is_left_alone(drive, scenario, words, fixes, mode):
    seen = drive("crashing", scenario, mode)
    line, *others = seen["log"]
    assert len(others) == len(fixes)
    assert all(f": {name} (" in other for name, other in zip(fixes, others, strict=True))
    assert line.startswith("WARNING") and words in line and "remove the other one" in line
    assert seen["states"][CLASS]["state"] != "grafted"
