"""``--duration 30m``: the largest size again and again, with a timeline. Values are verified throughout."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.collectives import Collective
from imgkit_entrypoints.apps.bench.record import spread

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measurement import Measurement, Measurer

PARTS = 60
"""Moments of a whole timeline; each operation has its turn."""
LEAST_S = 1.0


def run(
    measurer: Measurer,
    sized: Sequence[tuple[Collective, int]],
    total_s: float,
    take: Callable[[Collective, Moment, Sequence[Measurement]], None],
) -> None:
    """Measure the operations in turn for `total_s`, and `take` each moment; a collective call.

    Raises
    ------
    Stopped, OutOfMemory : on all ranks.
    """
    from imgkit_entrypoints.apps.bench import measurement

    began, part_s = time.monotonic(), max(LEAST_S, total_s / PARTS)
    for op, size_bytes in itertools.cycle(sized):
        part_began = time.monotonic()
        found: list[Measurement] = []
        over, done = False, False
        while not over:
            found.append(measurer.measure(op, size_bytes, found[-1].counts if found else None))
            now = time.monotonic()
            answers = (now - part_began >= part_s, now - began >= total_s)
            over, done = map(bool, measurement.agreed(lambda: answers, 2, measurer.here))  # noqa: B023 - called at once
            over = over or done
        take(op, _moment(op, measurer.group.size, found, time.monotonic() - began), found)
        if done:
            return


def _moment(op: Collective, ranks: int, found: Sequence[Measurement], at_s: float) -> Moment:
    times = spread([took / one.counts.launches for one in found for took in one.batches])
    checked = [one.wrong for one in found if one.wrong is not None]
    return Moment(
        at_s=at_s,
        op=op.name,
        size_bytes=found[0].size_bytes,
        iterations=sum(one.counts.total for one in found),
        low_us=times.low * 1e6,
        median_us=times.median * 1e6,
        high_us=times.high * 1e6,
        busbw_GBps=op.busbw_GBps(found[0].size_bytes, times.median, ranks),
        wrong=sum(checked) if checked else None,
    )


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
