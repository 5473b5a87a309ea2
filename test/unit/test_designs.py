"""Wrong versions of our own method: each is caught, and ``docs/designs.md`` says what it breaks."""

import designs
import mutants
import releases


def test_every_mutant_is_caught(drive, record_property):
    caught = drive(releases.CRASHING, "mutants")
    rows = (f"{wrong.name:36} {caught.get(wrong.name, '-')}" for wrong in mutants.MUTANTS)
    record_property("table", "\n".join(("mutant -> the first test that catches it", *rows)))
    assert len(mutants.REJECTED_DESIGNS) == 4
    assert caught.keys() == {wrong.name for wrong in mutants.MUTANTS}


def test_the_page_of_designs_is_not_stale(drive):
    found = drive(releases.CRASHING, "designs")
    assert len(found) == 8
    for name, rows in found.items():
        breaks = any(row["verdict"] == "broken" for row in rows)
        assert breaks != name.startswith(designs.FIX), name
    assert designs.PAGE.read_text() == designs.format_page(found), "stale: run make designs"
