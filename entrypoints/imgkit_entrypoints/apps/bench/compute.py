"""``--compute`` and ``--overlap``: a device that multiplies matrices, alone and during a collective.

``--compute`` measures each rank's device without any other rank's help. ``--overlap`` runs a collective while
the device computes: how much of the shorter one is hidden?
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.collectives import Collective
from imgkit_entrypoints.apps.bench.sizes import LEAST_BATCHES

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.apps.bench.measurement import Measurer
    from imgkit_entrypoints.run.ranks import Ranks

ALONE_WIDTH = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices: large enough that a product keeps the whole device busy."""
COPIED_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""More than the caches of most devices hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Medians of one device."""

    matmul_TFLOPs: float
    """1e12 floating-point operations a second; float32 on a CPU, bfloat16 on a GPU."""
    memory_GBps: float
    """1e9 bytes a second that a copy reads and writes, both counted."""


def matrix_product(device: torch.device, width: int) -> Callable[[], object]:
    """A product of two square matrices of `width` rows on `device`; each call computes it anew."""
    import torch

    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, other = (torch.rand(width, width, device=device).to(kind) for _ in range(2))
    made = torch.empty(width, width, device=device, dtype=kind)
    return lambda: torch.mm(one, other, out=made)


def measure_device(here: Ranks, seconds: float) -> DeviceSpeed:
    """Time products and copies on this rank's device for about `seconds` each; a collective call."""
    import torch

    width, size = ALONE_WIDTH[here.device.type], COPIED_BYTES[here.device.type]
    product_s = _once_s(matrix_product(here.device, width), here, seconds)
    given = torch.zeros(size, dtype=torch.uint8, device=here.device)
    taken = torch.ones_like(given)
    copy_s = _once_s(lambda: taken.copy_(given), here, seconds)
    return DeviceSpeed(matmul_TFLOPs=2 * width**3 / product_s / 1e12, memory_GBps=2 * size / copy_s / 1e9)


def _once_s(work: Callable[[], object], here: Ranks, seconds: float) -> float:
    """Median time of one call of `work`, over batches that fill `seconds`."""
    from imgkit_entrypoints.apps.bench import measurement

    def launch(async_op: bool = False) -> None:
        work()

    launch()  # the first call allocates and chooses an algorithm
    guess_s = measurement.time_batch(launch, 1, here)
    each = max(1, int(seconds / LEAST_BATCHES / max(guess_s, 1e-7)))
    return statistics.median(measurement.time_batch(launch, each, here) for _ in range(LEAST_BATCHES)) / each


SHORT_WIDTH = {"cpu": 256, "cuda": 4096}
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


def measure_overlap(measurer: Measurer, op: Collective, size_bytes: int) -> OverlapTimes:
    """Time `op` alone, as much computing alone, and both at once; a collective call.

    Raises
    ------
    OutOfMemory : on all ranks.
    """
    from imgkit_entrypoints.apps.bench import measurement

    here, launch = measurer.here, measurer.slots(op, size_bytes)[0].launch
    alone = [measurement.time_once(launch, here).took for _ in range(LEAST_BATCHES)]
    product = matrix_product(here.device, SHORT_WIDTH[here.device.type])
    product()
    one_s = statistics.median(
        measurement.time_batch(lambda async_op=False: product(), 1, here) for _ in range(LEAST_BATCHES)
    )
    fitting = statistics.median(alone) / max(one_s, 1e-9)
    count = int(measurement.agreed(lambda: (min(MOST_PRODUCTS, max(1, round(fitting))),), 1, here)[0])

    def products(async_op: bool = False) -> None:
        for _ in range(count):
            product()

    rows = []
    for _ in range(LEAST_BATCHES):  # in turn, so that a slow phase of the machine meets all three
        rows += [
            measurement.time_once(launch, here).took,
            measurement.time_batch(products, 1, here),
            measurement.time_once(launch, here, meanwhile=products).took,
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
