"""The two timings, which are never mixed: a batch of launches with one wait, and every iteration by itself.

GPU times come from CUDA events, CPU times from the monotonic clock. Both hold for this rank alone;
`measurement` takes the slowest rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measure.operations import Launch
    from imgkit_entrypoints.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """The times of one iteration on this rank, in seconds."""

    took: float
    waited: float
    """Time from the launch to the end: the rank that comes last waits least."""


def meet(here: Ranks) -> None:
    """Let all ranks meet, with no work left on the device."""
    here.synchronize()
    dist.barrier()
    here.synchronize()


def batch(launch: Launch, count: int, here: Ranks) -> float:
    """Time `count` launches and one wait for all of them, in seconds."""
    meet(here)
    if here.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            launch()
        ended.record()
        here.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = time.perf_counter()
    for _ in range(count):
        launch()
    return time.perf_counter() - start


def once(launch: Launch, here: Ranks, meanwhile: Callable[[], object] | None = None) -> Once:
    """Time one launch and the wait for it, after all ranks have met; `meanwhile` runs between both."""
    meet(here)
    if here.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work = launch(async_op=True)
        if meanwhile:
            meanwhile()
        work.wait()
        ended.record()
        launched = time.perf_counter()
        here.synchronize()
        done = time.perf_counter()
        return Once(took=float(began.elapsed_time(ended)) / 1e3, waited=done - launched)
    start = time.perf_counter()
    work = launch(async_op=True)
    launched = time.perf_counter()
    if meanwhile:
        meanwhile()
    work.wait()
    done = time.perf_counter()
    return Once(took=done - start, waited=done - launched)


def agreed(values: Callable[[], tuple[float, ...]], size: int, here: Ranks) -> tuple[float, ...]:
    """Broadcast the `size` numbers that rank 0 computes. Ranks that decided alone could wait for ever."""
    numbers = torch.zeros(size, dtype=torch.float64)
    if here.rank == 0:
        numbers = torch.tensor(values(), dtype=torch.float64)
    numbers = numbers.to(here.device)
    dist.broadcast(numbers, 0)
    return tuple(numbers.tolist())
