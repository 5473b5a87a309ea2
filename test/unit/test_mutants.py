"""Wrong versions of our own method: every one must be caught by the contract's tests."""

from __future__ import annotations

import io

import releases
from rich.console import Console
from rich.table import Table


def table(results: dict[str, dict[str, bool]]) -> str:
    """Mutants by rows, tests by columns; X where the test is red."""
    tests = list(next(iter(results.values())))
    grid = Table(title="mutant x test (X: red)", show_lines=False)
    grid.add_column("mutant", no_wrap=True)
    for number, _ in enumerate(tests, 1):
        grid.add_column(f"{number}", justify="center")
    for name, red in results.items():
        grid.add_row(name, *("X" if red[test] else "" for test in tests))
    console = Console(file=io.StringIO(), width=160)
    console.print(grid)
    for number, test in enumerate(tests, 1):
        console.print(f"{number:3} {test}")
    return console.file.getvalue()


def test_every_mutant_is_caught(drive, record_property):
    results = drive(releases.CRASHING, "mutants")
    record_property("table", table(results))
    red = {
        name: sorted(test for test, failed in tests.items() if failed)
        for name, tests in results.items()
    }
    controls = [name for name in red if name.startswith("unchanged")]
    assert len(controls) == 2 and not any(red[name] for name in controls)
    assert len([name for name in red if name.startswith("design: ")]) == 4
    assert len(red) >= 2 + 4 + 10
    survivors = [name for name, tests in red.items() if not tests and name not in controls]
    assert not survivors, f"nobody kills: {survivors}"
