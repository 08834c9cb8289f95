"""``--overlap``: a collective while the device computes. How much of the shorter one is hidden?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.measure import compute
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.counts import LEAST_BATCHES

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measure.measurement import Measurer

WIDTH = {"cpu": 256, "cuda": 4096}
"""Rows of the square matrices that are multiplied: one product is short beside a large collective."""
MOST_PRODUCTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTimes:
    """One collective with and without computing; medians of the slowest rank's times, in seconds."""

    op: str
    size_bytes: int
    communication_s: float
    computation_s: float
    both_s: float

    @property
    def hidden(self) -> float:
        """Share of the shorter one that the longer one hides, from 0 to 1."""
        saved = self.communication_s + self.computation_s - self.both_s
        return min(1.0, max(0.0, saved / min(self.communication_s, self.computation_s)))


def measure(measurer: Measurer, op: Collective, size_bytes: int) -> OverlapTimes:
    """Time `op` alone, as much computing alone, and both at once; a collective call.

    Raises
    ------
    OutOfMemory : on all ranks.
    """
    from imgkit_entrypoints.apps.bench.measure import timing

    here, launch = measurer.here, measurer.slots(op, size_bytes)[0].launch
    alone = [timing.once(launch, here).took for _ in range(LEAST_BATCHES)]
    product = compute.product(here.device, WIDTH[here.device.type])
    product()
    one_s = statistics.median(
        timing.batch(lambda async_op=False: product(), 1, here) for _ in range(LEAST_BATCHES)
    )
    fitting = statistics.median(alone) / max(one_s, 1e-9)
    count = int(timing.agreed(lambda: (min(MOST_PRODUCTS, max(1, round(fitting))),), 1, here)[0])

    def products(async_op: bool = False) -> None:
        for _ in range(count):
            product()

    rows = []
    for _ in range(LEAST_BATCHES):  # in turn, so that a slow phase of the machine meets all three
        rows += [
            timing.once(launch, here).took,
            timing.batch(products, 1, here),
            timing.once(launch, here, meanwhile=products).took,
        ]
    slowest = [max(column) for column in zip(*measurer.together(rows), strict=True)]
    communication_s, computation_s, both_s = (statistics.median(slowest[place::3]) for place in range(3))
    return OverlapTimes(
        op=op.name,
        size_bytes=size_bytes,
        communication_s=communication_s,
        computation_s=computation_s,
        both_s=both_s,
    )
