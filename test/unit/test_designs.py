"""``docs/designs.md`` is what running the designs gives; only the rejected ones break."""

from __future__ import annotations

import designs
import releases


def test_the_page_is_not_stale(drive):
    found = drive(releases.CRASHING, "designs")
    assert len(found) == 8
    for name, rows in found.items():
        breaks = any(row["verdict"] == "broken" for row in rows)
        assert breaks != name.startswith(designs.FIX), name
    assert designs.PAGE.read_text() == designs.format_page(found), "stale: run make designs"
