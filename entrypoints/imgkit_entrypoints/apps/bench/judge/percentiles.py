"""Statistics of a set of times: nearest-rank percentiles and the coefficient of variation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted `ordered`: always a measured value, never an interpolated one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def variation(values: Sequence[float]) -> float:
    """Standard deviation divided by the mean; 0 for one value."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
