"""Pi as the integral of 4/(1+x^2) over [0, 1] by the midpoint rule, the intervals shared by all ranks."""

from __future__ import annotations

import argparse
import math
import time

from imgkit_entrypoints.arguments import positive

# Large enough to keep the vector units busy, small enough to stay in cache.
BLOCK = 32_768


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Options of dist-pi."""
    parser.add_argument(
        "--intervals", type=positive, default=100_000_000, metavar="N", help="default 100000000"
    )


def share(intervals: int, rank: int, world_size: int) -> tuple[int, int]:
    """First interval and end of `rank`'s share; the shares are exact: none lost, none twice."""
    return intervals * rank // world_size, intervals * (rank + 1) // world_size


def main() -> None:
    """Run as one worker."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps import ranks

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    intervals: int = parser.parse_args().intervals
    with ranks.opened() as here:
        began = time.perf_counter()
        first, end = share(intervals, here.rank, here.world_size)
        total = torch.zeros((), dtype=torch.float64, device=here.device)
        for start in range(first, end, BLOCK):
            points = torch.arange(start, min(start + BLOCK, end), dtype=torch.float64, device=here.device)
            total += (4.0 / (1.0 + ((points + 0.5) / intervals) ** 2)).sum()
        dist.all_reduce(total)
        value = total.item() / intervals
        if here.rank == 0:
            seconds = time.perf_counter() - began
            print(f"pi = {value:.15f}, error {abs(value - math.pi):.1e}, {intervals} intervals, ", end="")
            print(f"{here.world_size} ranks, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
