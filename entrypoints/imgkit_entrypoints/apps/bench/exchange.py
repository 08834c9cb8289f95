"""The bandwidth between two nodes, both directions at once. The preflight compares pairs of nodes by it."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import collectives, measurement
from imgkit_entrypoints.apps.bench.measurement import Measurer
from imgkit_entrypoints.apps.bench.sizes import MIN_BATCHES

_MAX_LAUNCHES = 200


def measure_exchange_GBps(measurer: Measurer, size_bytes: int) -> float:
    """Return the bandwidth (1e9 B/s) of each direction between the two ranks; a collective call."""
    ranks, item_bytes = measurer.ranks, measurer.dtype.item_bytes
    count = max(1, size_bytes // item_bytes)
    (buffers,) = collectives.allocate(
        collectives.named("sendrecv"), count, getattr(torch, measurer.dtype.torch), ranks
    )
    measurer.noise.fill(buffers.input, ranks.rank, 0)
    launch = collectives.bind(collectives.named("sendrecv"), buffers, ranks)
    launch()  # the first exchange sets up the connection
    seconds = torch.tensor(
        [measurement.time_batch(launch, 1, ranks)], dtype=torch.float64, device=ranks.device
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    fitting = int(measurer.options.seconds / max(seconds.item(), 1e-7))
    launches = max(1, (measurer.options.iters or min(_MAX_LAUNCHES, fitting)) // MIN_BATCHES)
    batches = [measurement.time_batch(launch, launches, ranks) for _ in range(MIN_BATCHES)]
    seconds.fill_(statistics.median(batches) / launches)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # the slower of the two that measured it
    return count * item_bytes / float(seconds.item()) / 1e9
