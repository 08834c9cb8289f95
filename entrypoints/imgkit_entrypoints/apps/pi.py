"""``dist-pi``: compute pi as the integral of 4/(1+x^2) over [0, 1] with the trapezoid rule.

The points of the rule are divided among all ranks.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps.share import share
from imgkit_entrypoints.arguments import Option, add_options, parse_positive
from imgkit_entrypoints.errors import EXIT_NO

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks

# Number of points that are computed with one call of each torch function. Two buffers of this size (512 KiB
# each) fit into the cache of a core, and the overhead of a call is divided among many points. Measured on one
# core in CPU seconds of 40 pairs, in comparison with 131072: 65536 is as fast, and 32768 is 3 to 5 % slower.
# One division for two or four points is slower, too: 0.77 and 0.69 times (0.96 and 0.87 with AVX2).
BLOCK = 65_536
# Blocks on a GPU are larger, because a GPU has no such cache, and each block costs a kernel launch and a
# wait.
BLOCK_CUDA = 1 << 24
ALONE = 50_000_000
"""Largest number of points that rank 0 computes alone, while all other ranks wait."""
# Part of the error of pi that is allowed for rounding.
ROUNDING = 1e-12
MAX_REPORTED = 16
"""Most processes that the report lists. For more, it lists only the slowest, the median and the fastest."""
OPTIONS = (Option("--intervals", "number of intervals", parse_positive, "N", default=100_000_000),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The number of points that a process computed, and the time that it took."""

    rank: int
    host: str
    points: int
    seconds: float

    @property
    def points_per_s(self) -> float:
        """Speed of the process, or 0 if it had no points."""
        return self.points / self.seconds if self.points else 0.0


def excess_of_ends(first: int, end: int, intervals: int) -> float:
    """Return by how much a sum over ``range(first, end)`` is too large if all points have the weight 1.

    In the trapezoid rule, the first point (0) and the last point (`intervals`) have the weight 1/2.
    """
    excess = 0.0
    if 0 in range(first, end):
        excess += 4.0 / 2  # half of 4/(1+x^2) at x = 0
    if intervals in range(first, end):
        excess += 2.0 / 2  # half of 4/(1+x^2) at x = 1
    return excess


def tolerance(intervals: int) -> float:
    """Return the largest error of pi that is accepted for n intervals.

    The trapezoid rule itself has the error h^2/12 * (f'(1) - f'(0)) = 1/(6 n^2). `ROUNDING` is added to it.
    """
    return 1.0 / (6.0 * intervals * intervals) + ROUNDING


def format_report(
    pi_estimate: float, intervals: int, results: Sequence[Work], seconds: float, alone: Work
) -> list[str]:
    """Return the lines that rank 0 prints: pi and its error, the speed of processes, and the efficiency.

    Parameters
    ----------
    pi_estimate : the computed value of pi.
    results : the work of each process.
    seconds : time from the common start until the slowest process has the sum.
    alone : work of rank 0 while all other processes were idle. The parallel efficiency is relative to this
        speed.
    """
    reported = results
    if len(results) > MAX_REPORTED:
        ordered = sorted(results, key=lambda work: work.points_per_s)
        reported = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
    speeds_per_s = [work.points_per_s for work in results]
    total_per_s = sum(work.points for work in results) / seconds
    efficiency = math.nan
    if alone.points:
        efficiency = total_per_s / (len(results) * alone.points_per_s)
    return [
        f"pi = {pi_estimate:.15f}, error {abs(pi_estimate - math.pi):.1e}, {intervals} intervals, "
        f"{len(results)} ranks, {seconds:.3f} s",
        *map(_format_work, reported),
        f"per process: {min(speeds_per_s):.3e} to {max(speeds_per_s):.3e} terms/s, "
        f"median {statistics.median(speeds_per_s):.3e}; together {total_per_s:.3e}",
        f"parallel efficiency {efficiency:.0%} of {len(results)} x {alone.points_per_s:.3e} terms/s "
        "(rank 0 while the others wait)",
    ]


def _format_work(work: Work) -> str:
    """Return the line of the report about one process."""
    rate = f"{work.points} terms in {work.seconds:.3f} s, {work.points_per_s:.3e} terms/s"
    return f"rank {work.rank} on {work.host}: {rate}"


def partial_sum(first: int, end: int, intervals: int, ranks: Ranks) -> float:
    """Return the sum of 4/(1+x^2) over the points x = i/intervals with i in ``range(first, end)``.

    The points x = 0 and x = 1 have half the weight of the others, as the trapezoid rule requires.
    """
    import torch

    largest_block = BLOCK_CUDA if ranks.device.type == "cuda" else BLOCK
    block = max(1, min(largest_block, end - first))
    # With n intervals, 4/(1+(i/n)^2) is computed as 4 n^2 * 1/(n^2+i^2). In this form, all values are
    # integers until the division, and one pass over the block is saved.
    n_squared = float(intervals) ** 2
    n_squared_tensor = torch.full((), n_squared, dtype=torch.float64, device=ranks.device)
    indices = torch.arange(first, first + block, dtype=torch.float64, device=ranks.device)
    values = torch.empty_like(indices)  # these two tensors are used again for each block
    sums = []
    for start in range(first, end, block):
        torch.addcmul(n_squared_tensor, indices, indices, out=values)  # n^2 + i * i
        values.reciprocal_()
        # The last block may be shorter. For all others, the slice is the whole block.
        sums.append(values[: end - start].sum().item())
        indices += block
    # math.fsum adds the sums of the blocks without accumulating rounding errors.
    return 4.0 * n_squared * math.fsum(sums) - excess_of_ends(first, end, intervals)


def timed_sum(first: int, end: int, intervals: int, ranks: Ranks) -> tuple[float, Work]:
    """Compute a `partial_sum`, and return it with the number of its points and the time in seconds."""
    start_s = time.perf_counter()
    value = partial_sum(first, end, intervals, ranks)
    seconds = time.perf_counter() - start_s
    work = Work(rank=ranks.rank, host=platform.node(), points=end - first, seconds=seconds)
    return value, work


def compute_pi(intervals: int, ranks: Ranks) -> float:
    """Time rank 0 alone, then compute pi on all ranks, and return it. Rank 0 prints the report."""
    import torch
    import torch.distributed as dist

    first, end = share(intervals + 1, ranks.rank, ranks.world_size)
    # The first call is slower, because torch sets itself up. It must not count below.
    partial_sum(first, min(end, first + 2 * BLOCK), intervals, ranks)
    dist.barrier()
    # Between the two barriers, only rank 0 computes. All others have no points, and wait.
    alone_end = first
    if ranks.rank == 0:
        alone_end = min(end, first + ALONE)
    _, alone = timed_sum(first, alone_end, intervals, ranks)
    dist.barrier()
    start_s = time.perf_counter()
    sum_of_rank, work = timed_sum(first, end, intervals, ranks)
    total = torch.tensor(sum_of_rank, dtype=torch.float64).to(ranks.device)
    dist.all_reduce(total)
    pi_estimate: float = total.item() / intervals
    # `gather` is a collective, so all ranks must call it, although only rank 0 prints the result.
    seconds = max(ranks.gather(time.perf_counter() - start_s))
    results = ranks.gather(work)
    if ranks.rank == 0:
        terminal.print_results(*format_report(pi_estimate, intervals, results, seconds, alone))
    return pi_estimate


def main() -> None:
    """Run one worker: compute pi together with the other ranks, and refuse a result with a large error."""
    from imgkit_entrypoints.apps import ranks as workers

    parser = argparse.ArgumentParser()
    add_options(parser, OPTIONS)
    intervals: int = parser.parse_args().intervals
    with workers.join_group() as ranks:
        pi_estimate = compute_pi(intervals, ranks)
    if abs(pi_estimate - math.pi) > tolerance(intervals):
        error = (
            f"the error of pi is above {tolerance(intervals):.1e}: a node or the network gave wrong values"
        )
        workers.refuse(f"dist-pi: {error}. To find it: dist-doctor", EXIT_NO)


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
