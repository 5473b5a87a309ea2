"""The decision table in ``docs/`` is what running the designs gives."""

from __future__ import annotations

import designs
import releases


def test_the_page_is_not_stale(drive):
    found = drive(releases.CRASHING, "designs")
    broken = {
        name: {row["asked"] for row in rows if row["verdict"] == "broken"}
        for name, rows in found.items()
    }
    assert len(found) == 8
    for name, checks in broken.items():
        assert bool(checks) != name.startswith(designs.FIX), (name, checks)
    assert designs.PAGE.read_text() == designs.page(found), "stale: run make designs"
