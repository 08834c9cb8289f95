"""``--for 30m``: the largest size again and again, with a timeline. Values are verified throughout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from imgkit_entrypoints.apps.bench.judge.percentiles import spread
from imgkit_entrypoints.apps.bench.judge.timeline import Moment
from imgkit_entrypoints.apps.bench.measure import timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.measurement import Measurement, Measurer

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
    began, part_s = time.monotonic(), max(LEAST_S, total_s / PARTS)
    for op, size_bytes in itertools.cycle(sized):
        part_began = time.monotonic()
        found: list[Measurement] = []
        over, done = False, False
        while not over:
            found.append(measurer.measure(op, size_bytes, found[-1].counts if found else None))
            now = time.monotonic()
            answers = (now - part_began >= part_s, now - began >= total_s)
            over, done = map(bool, timing.agreed(lambda: answers, 2, measurer.here))  # noqa: B023 - called at once
            over = over or done
        factor = op.factor(measurer.group.size)
        take(op, _moment(op, factor, found, time.monotonic() - began), found)
        if done:
            return


def _moment(op: Collective, factor: float, found: Sequence[Measurement], at_s: float) -> Moment:
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
        busbw_GBps=factor * found[0].size_bytes / times.median / 1e9,
        wrong=sum(checked) if checked else None,
    )
