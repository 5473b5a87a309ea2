"""How every benchmark sums up repeated measurements."""

import statistics
from collections.abc import Sequence


def summarize(values: Sequence[float]) -> dict[str, float]:
    """``median`` and ``spread``, half the distance of the quartiles; six digits of each."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": float(f"{middle:.6g}"), "spread": float(f"{(high - low) / 2:.6g}")}


def format_summary(summary: dict[str, float], places: int = 2) -> str:
    """The median, and in brackets the spread."""
    return f"{summary['median']:.{places}f} ({summary['spread']:.{places}f})"
