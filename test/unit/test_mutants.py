"""Wrong versions of our own method: the contract's tests must catch each by the rule it breaks."""

from __future__ import annotations

import mutants
import releases


def test_every_mutant_is_caught(drive, record_property):
    caught = drive(releases.CRASHING, "mutants")
    rows = (f"{wrong.name:36} {caught.get(wrong.name, '-')}" for wrong in mutants.MUTANTS)
    record_property("table", "\n".join(("mutant -> the first test that catches it", *rows)))
    assert len(mutants.REJECTED_DESIGNS) == 4
    assert caught.keys() == {wrong.name for wrong in mutants.MUTANTS}
