"""The speed of one rank's device: matrix products and memory copies. The preflight compares nodes by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from imgkit_entrypoints.apps.bench import measurement
from imgkit_entrypoints.apps.bench.sizes import MIN_BATCHES

if TYPE_CHECKING:
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


def measure_device(ranks: Ranks, seconds: float) -> DeviceSpeed:
    """Time products and copies on this rank's device for about `seconds` each; a collective call."""
    width, size_bytes = WIDTH[ranks.device.type], COPIED_BYTES[ranks.device.type]
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    left, right = (torch.rand(width, width, device=ranks.device).to(dtype) for _ in range(2))
    product = torch.empty(width, width, device=ranks.device, dtype=dtype)
    product_s = _median_s(lambda: torch.mm(left, right, out=product), ranks, seconds)
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=ranks.device)
    target = torch.ones_like(source)
    copy_s = _median_s(lambda: target.copy_(source), ranks, seconds)
    return DeviceSpeed(
        matmul_TFLOPs=2 * width**3 / product_s / 1e12, memory_GBps=2 * size_bytes / copy_s / 1e9
    )


def _median_s(work: Callable[[], object], ranks: Ranks, seconds: float) -> float:
    """Return the median time of one call of `work`, over batches that fill `seconds`."""
    work()  # the first call allocates and chooses an algorithm
    guess_s = measurement.time_batch(work, 1, ranks)
    calls = max(1, int(seconds / MIN_BATCHES / max(guess_s, 1e-7)))
    batches = [measurement.time_batch(work, calls, ranks) for _ in range(MIN_BATCHES)]
    return statistics.median(batches) / calls
