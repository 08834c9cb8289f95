"""How far the clocks of the nodes are apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

APART_S = 1.0
"""Difference from which tickets, certificates and the order of log lines suffer."""


def remark(mine_s: float, all_s: Sequence[float]) -> str:
    """Compare this node's time with those that all nodes read at one moment; empty if it is right.

    Parameters
    ----------
    mine_s, all_s : seconds of the epoch.
    """
    ahead_s = mine_s - statistics.median(all_s)
    if abs(ahead_s) < APART_S:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    return f"its clock is {abs(ahead_s):.1f} s {way} the median of all nodes"
