"""What a set of times says: nearest-rank percentiles and the coefficient of variation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value of nearest rank in sorted `ordered`: one that was measured, never between two."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def variation(values: Sequence[float]) -> float:
    """Standard deviation by mean; 0 for one value."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
