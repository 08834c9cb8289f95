"""The timeline of ``--for``: one moment after the other, and the moments that were slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench import sizes

SLOW = 0.7
"""Share of an operation's median bandwidth below which a moment is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One collective during a part of a long run; times of one operation, over the batches of that part."""

    at_s: float
    """Seconds from the start to the end of this part."""
    op: str
    size_bytes: int
    iterations: int
    low_us: float
    median_us: float
    high_us: float
    busbw_GBps: float
    """The bus bandwidth that belongs to the median."""
    wrong: int | None


def line(moment: Moment) -> str:
    """The moment as a row of the printed timeline."""
    wrong = "" if not moment.wrong else f"  {moment.wrong} WRONG"
    return (
        f"{clock(moment.at_s):>10}  {moment.op:14} {moment.median_us:11.1f} us ({moment.low_us:.1f} to "
        f"{moment.high_us:.1f}) {moment.busbw_GBps:10.3f} GBps of busbw{wrong}"
    )


def clock(seconds: float) -> str:
    """Write a time as ``1h02m03s``, ``2m03s`` or ``3s``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m{rest:02}s"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def sentences(moments: Sequence[Moment]) -> list[str]:
    """Sum up each operation, and name its slowest moment if it was slow."""
    told = []
    for name in dict.fromkeys(one.op for one in moments):
        mine = [one for one in moments if one.op == name]
        speeds = [one.busbw_GBps for one in mine]
        middle, what = statistics.median(speeds), f"{name} of {sizes.both(mine[0].size_bytes)}"
        told.append(
            f"{what} over {clock(moments[-1].at_s)}: {middle:.3g} GBps of busbw, from {min(speeds):.3g} to "
            f"{max(speeds):.3g} in {len(mine)} parts of the time."
        )
        slow = [one for one in mine if one.busbw_GBps < SLOW * middle]
        if slow:
            worst = min(slow, key=lambda one: one.busbw_GBps)
            told.append(
                f"SLOW AT TIMES: {what} was below {100 * SLOW:.0f} % of that in {len(slow)} of "
                f"{len(mine)} parts. The slowest ended {clock(worst.at_s)} after the start: "
                f"{worst.busbw_GBps:.3g} GBps."
            )
    return told
