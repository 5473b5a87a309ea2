"""Forks that differ from the crashing one, and plugins that were there first."""

from __future__ import annotations

import pytest
import releases
from test_releases import CLASS, METHODS, NO_FIXES, by_default, check_log, fixed


def crashing_text(*edits: tuple[str, str]) -> str:
    text = releases.backend_text(releases.CRASHING)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_a_renamed_class_is_found_by_its_method(drive):
    text = crashing_text((CLASS, "ForkSconvBackend"))
    seen = drive("crashing", "early", text=text, **NO_FIXES)
    assert seen["changed"] == [name.replace(CLASS, "ForkSconvBackend") for name in METHODS]
    assert seen["states"]["ForkSconvBackend"]["state"] == "grafted"


@pytest.mark.parametrize("override", (False, True))
def test_a_subclass_gets_it_from_its_base(drive, override):
    method = """
    def _refresh_track_conv_indices(self, forward_batch, on_graph_path):
        super()._refresh_track_conv_indices(forward_batch, on_graph_path)
"""
    text = crashing_text() + f"\n\nclass Fork({CLASS}):{method if override else ' pass'}\n"
    seen = drive("crashing", "early", text=text, **NO_FIXES)
    assert seen["changed"] == METHODS
    assert {report["state"] for report in seen["states"].values()} == {"grafted"}
    assert len(seen["log"]) == 1 and len(seen["states"]) == 1 + override


def test_a_fork_that_tracks_another_window_is_left_alone(drive):
    text = crashing_text(
        ("+ chunk_aligned - self.conv_state_len", "+ chunk_aligned - self.conv_state_len - 1")
    )
    seen = drive("crashing", "early", text=text)
    (line,) = seen["log"]
    assert seen["changed"] == [] and "unknown (live batch: window is not the reference's" in line
    assert "left alone. INKLING_SCONV=force replaces the method" in line and "\n" not in line


def test_a_fork_whose_method_does_more_is_left_alone(drive):
    text = crashing_text(
        (
            "        self.sconv_metadata.track_conv_indices = out",
            "        self.sconv_metadata.track_conv_indices = out\n"
            "        forward_batch.mamba_extra = out.sum()",
        )
    )
    seen = drive("crashing", "early", text=text)
    (line,) = seen["log"]
    assert seen["changed"] == [] and "also sets mamba_extra" in line


def test_a_crash_of_another_kind_is_left_alone(drive):
    text = crashing_text(
        ("        live = min(", "        self.fork_state.shape\n        live = min(")
    )
    seen = drive("crashing", "early", text=text)
    (line,) = seen["log"]
    assert seen["changed"] == [] and "unknown" in line and "fork_state" in line


def test_force_replaces_what_is_not_recognised(drive):
    text = crashing_text(
        ("        live = min(", "        self.fork_state.shape\n        live = min(")
    )
    seen = drive("crashing", "early", "force", text)
    assert seen["changed"] == METHODS and seen["states"][CLASS]["state"] == "grafted"


def test_force_is_taken_back_where_it_does_not_hold(drive):
    text = crashing_text(("_graph_track_conv_indices", "_fork_rows"))
    seen = drive("crashing", "early", "force", text)
    line, *fixes = seen["log"]
    assert line.startswith("ERROR") and "taken back" in line
    # The draft's, but for the one that needs a method that leaves draft-extend alone.
    assert seen["changed"] == sorted(fixed("crashing", "draft-checkpoint"))
    check_log(fixes, "crashing", "draft-checkpoint")


def test_a_file_without_the_method_is_left_alone(drive):
    text = crashing_text(("_refresh_track_conv_indices", "_refresh_windows"))
    seen = drive("crashing", "early", text=text)
    (line,) = seen["log"]
    assert seen["changed"] == [] and "no class" in line and "left alone" in line


@pytest.mark.parametrize(
    ("scenario", "words", "made"),
    (
        ("hooked", "already hooked by plugin other", by_default("crashing", "draft-checkpoint")),
        # What is there by then is no crashing method any more.
        ("patched", "already replaced by __main__.play.<locals>.<lambda>", []),
    ),
)
@pytest.mark.parametrize("mode", ("auto", "force"))
def test_another_plugin_s_method_is_not_stacked_upon(drive, scenario, words, made, mode):
    seen = drive("crashing", scenario, mode)
    line, *fixes = seen["log"]
    assert [name for fix in fixes for name in made if f": {name} (" in fix] == made
    assert len(fixes) == len(made)
    assert line.startswith("WARNING") and words in line and "SGLANG_PLUGINS" in line
    assert seen["states"][CLASS]["state"] != "grafted"
