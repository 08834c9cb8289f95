"""The bandwidth between two nodes, both directions at once. The preflight compares pairs of nodes by it."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import collectives, measurement
from imgkit_entrypoints.apps.bench.measurement import Measurer
from imgkit_entrypoints.apps.bench.sizes import MIN_BATCHES
from imgkit_entrypoints.run.ranks import Ranks

# Launches of all batches together. The preflight of a whole run waits for them.
_MAX_LAUNCHES = 200


def measure_exchange_GBps(measurer: Measurer, size_bytes: int) -> float:
    """Return the bandwidth of each direction between the two ranks in 1e9 B/s; a collective call.

    Both ranks send and receive at the same time. The result is the median of several batches (many launches
    with one wait), on the slower rank.
    """
    ranks = measurer.ranks
    item_bytes = measurer.dtype.item_bytes
    count = max(1, size_bytes // item_bytes)
    sendrecv = collectives.find_collective("sendrecv")
    dtype = getattr(torch, measurer.dtype.torch)
    (buffers,) = collectives.allocate(sendrecv, count, dtype, ranks)
    # Send random numbers, since links and processors may treat a buffer of zeros better.
    measurer.noise.fill(buffers.input, ranks.rank, 0)
    launch = collectives.bind(sendrecv, buffers, ranks)
    launch()  # sets up the connection
    single_s = _slowest(measurement.time_batch(launch, 1, ranks), ranks)
    launches = _plan_launches(measurer, single_s)
    batches = [measurement.time_batch(launch, launches, ranks) for _ in range(MIN_BATCHES)]
    seconds = _slowest(statistics.median(batches) / launches, ranks)
    return count * item_bytes / seconds / 1e9


def _plan_launches(measurer: Measurer, single_s: float) -> int:
    """Return the launches of each batch, for the options and the seconds of one launch."""
    iterations = measurer.options.iters
    if iterations is None:
        fitting = int(measurer.options.seconds / max(single_s, 1e-7))  # a clock may show no time at all
        iterations = min(_MAX_LAUNCHES, fitting)
    return max(1, iterations // MIN_BATCHES)


def _slowest(seconds: float, ranks: Ranks) -> float:
    """Return the time of the slower of the two ranks; a collective call."""
    tensor = torch.tensor([seconds], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
