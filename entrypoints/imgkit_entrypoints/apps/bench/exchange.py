"""Measure the bandwidth between two nodes in both directions at once.

The preflight, which checks nodes before a run, uses this to compare pairs of nodes.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import collectives, measurement
from imgkit_entrypoints.apps.bench.measurement import Measurer
from imgkit_entrypoints.apps.bench.sizes import MIN_BATCHES
from imgkit_entrypoints.run.ranks import Ranks

# Limit for the launches in all batches together. It is low, because the whole run waits for the preflight.
_MAX_LAUNCHES = 200


def measure_exchange_GBps(measurer: Measurer, size_bytes: int) -> float:
    """Return the bandwidth of each direction between the two ranks in GB/s (1e9 B/s).

    Both ranks must call this function. They send and receive at the same time. A batch is a number of
    launches after which a rank waits once. The result is the median of several batches on the slower rank.
    """
    ranks = measurer.ranks
    item_bytes = measurer.dtype.item_bytes
    count = max(1, size_bytes // item_bytes)
    sendrecv = collectives.find_collective("sendrecv")
    dtype = getattr(torch, measurer.dtype.torch)
    (buffers,) = collectives.allocate(sendrecv, count, dtype, ranks)
    # Send random numbers, because links and processors may transfer a buffer of zeros faster.
    measurer.noise.fill(buffers.input, ranks.rank, 0)
    launch = collectives.bind(sendrecv, buffers, ranks)
    launch()  # the first launch sets up the connection, so it is not timed
    single_s = _find_slowest(measurement.time_batch(launch, 1, ranks), ranks)
    launches = _plan_launches(measurer, single_s)  # equal on both ranks, because `single_s` is
    batches = [measurement.time_batch(launch, launches, ranks) for _ in range(MIN_BATCHES)]
    seconds = _find_slowest(statistics.median(batches) / launches, ranks)
    return count * item_bytes / seconds / 1e9


def _plan_launches(measurer: Measurer, single_s: float) -> int:
    """Return the number of launches in each batch.

    It is derived from ``--iters``, or from the time budget and `single_s`, the seconds of one launch.
    """
    iterations = measurer.options.iters
    if iterations is None:
        # A coarse clock may measure 0 s, hence the minimum of 1e-7 s.
        launches_that_fit = int(measurer.options.seconds / max(single_s, 1e-7))
        iterations = min(_MAX_LAUNCHES, launches_that_fit)
    return max(1, iterations // MIN_BATCHES)


def _find_slowest(seconds: float, ranks: Ranks) -> float:
    """Return the larger of the times that the two ranks pass to this function, on both ranks."""
    tensor = torch.tensor([seconds], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
