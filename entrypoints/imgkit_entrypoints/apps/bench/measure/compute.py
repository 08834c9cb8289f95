"""``--compute``: how fast one device multiplies matrices and copies memory, without any other rank's help."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.measure.counts import LEAST_BATCHES

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.run.ranks import Ranks

WIDTH = {"cpu": 1024, "cuda": 8192}
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


def product(device: torch.device, width: int) -> Callable[[], object]:
    """A product of two square matrices of `width` rows on `device`; each call computes it anew."""
    import torch

    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, other = (torch.rand(width, width, device=device).to(kind) for _ in range(2))
    made = torch.empty(width, width, device=device, dtype=kind)
    return lambda: torch.mm(one, other, out=made)


def measure(here: Ranks, seconds: float) -> DeviceSpeed:
    """Time products and copies on this rank's device for about `seconds` each; a collective call."""
    import torch

    width, size = WIDTH[here.device.type], COPIED_BYTES[here.device.type]
    product_s = _once_s(product(here.device, width), here, seconds)
    given = torch.zeros(size, dtype=torch.uint8, device=here.device)
    taken = torch.ones_like(given)
    copy_s = _once_s(lambda: taken.copy_(given), here, seconds)
    return DeviceSpeed(matmul_TFLOPs=2 * width**3 / product_s / 1e12, memory_GBps=2 * size / copy_s / 1e9)


def _once_s(work: Callable[[], object], here: Ranks, seconds: float) -> float:
    """Median time of one call of `work`, over batches that fill `seconds`."""
    from imgkit_entrypoints.apps.bench.measure import timing

    def launch(async_op: bool = False) -> None:
        work()

    launch()  # the first call allocates and chooses an algorithm
    guess_s = timing.batch(launch, 1, here)
    each = max(1, int(seconds / LEAST_BATCHES / max(guess_s, 1e-7)))
    return statistics.median(timing.batch(launch, each, here) for _ in range(LEAST_BATCHES)) / each
