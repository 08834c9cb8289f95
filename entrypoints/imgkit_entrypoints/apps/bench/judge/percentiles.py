"""Statistics of a set of times: their spread, nearest-rank percentiles, the coefficient of variation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The range of a set of times, without the fastest and the slowest tenth."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """True if a difference from `other` may be chance."""
        return self.low <= other.high and other.low <= self.high


def spread(times: Sequence[float]) -> Spread:
    """The spread of at least one time; with fewer than ten, none is left out."""
    ordered = sorted(times)
    cut = len(ordered) // 10
    return Spread(low=ordered[cut], median=statistics.median(ordered), high=ordered[-1 - cut])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted `ordered`: always a measured value, never an interpolated one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def variation(values: Sequence[float]) -> float:
    """Standard deviation divided by the mean; 0 for one value."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
