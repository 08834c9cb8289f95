"""Bandwidth of all_reduce over all ranks, every element of every result checked."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.arguments import natural, positive

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.apps.ranks import Ranks

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DEFAULT_SIZES = "4K,64K,1M,16M"
ELEMENT_BYTES = 4
PATTERN = 8
"""Values are (rank % 8 + 1) * (position % 8 + 1): sums are whole and below 2^24, exact in float32."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Options of dist-bench."""
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=DEFAULT_SIZES,
        metavar="SIZE,...",
        help=f"bytes per rank, K M G are powers of 1024 (default {DEFAULT_SIZES})",
    )
    parser.add_argument("--iterations", type=positive, default=20, metavar="N", help="timed (default 20)")
    parser.add_argument("--warmup", type=natural, default=5, metavar="N", help="not timed (default 5)")


def sizes(text: str) -> tuple[int, ...]:
    """``4K,1M`` in bytes; multiples of 4, since the elements are float32."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]+)([KMG]?)", word.strip().upper())
        size = int(match[1]) * UNITS[match[2]] if match else 0
        if size <= 0 or size % ELEMENT_BYTES:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no size: a multiple of {ELEMENT_BYTES} bytes such as 64K"
            )
        found.append(size)
    return tuple(found)


def bus_factor(world_size: int) -> float:
    """What a ring sends per rank and byte of an all_reduce: 2(n-1)/n (nccl-tests, PERFORMANCE.md)."""
    return 2.0 * (world_size - 1) / world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size."""

    size_bytes: int
    seconds: float
    """Median over the iterations of the slowest rank's time."""
    world_size: int
    wrong: int
    """Elements that differ from the exact sum, over all ranks and iterations."""

    @property
    def algbw_GBps(self) -> float:
        """Bytes of one rank by the time, in 1e9 B/s."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def busbw_GBps(self) -> float:
        """What the links had to carry, in 1e9 B/s: comparable between numbers of ranks."""
        return self.algbw_GBps * bus_factor(self.world_size)


HEADER = (
    f"{'size (B)':>12}  {'time (us)':>10}  {'algbw GBps':>10}  {'busbw GBps':>10}  {'algbw Gbps':>10}  "
    f"{'busbw Gbps':>10}  {'wrong':>6}"
)


def line(row: Row) -> str:
    """`row` under `HEADER`."""
    return (
        f"{row.size_bytes:12}  {row.seconds * 1e6:10.1f}  {row.algbw_GBps:10.3f}  {row.busbw_GBps:10.3f}  "
        f"{8 * row.algbw_GBps:10.2f}  {8 * row.busbw_GBps:10.2f}  {row.wrong:6}"
    )


def main() -> None:
    """Run as one worker."""
    import torch.distributed as dist

    from imgkit_entrypoints.apps import ranks

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args()
    wrong = 0
    with ranks.opened() as here:
        if here.rank == 0:
            print(f"all_reduce float32 sum, {here.world_size} ranks, {dist.get_backend()}; 1 GBps = 1e9 B/s")
            print(HEADER, flush=True)
        for size in options.sizes:
            row = measure(size, options.iterations, options.warmup, here)
            wrong += row.wrong
            if here.rank == 0:
                print(line(row), flush=True)
    if wrong:
        sys.exit(f"{wrong} elements were wrong: see dist-doctor before training" if here.rank == 0 else 1)


def measure(size_bytes: int, iterations: int, warmup: int, here: Ranks) -> Row:
    """Time and check one size; every rank returns the same row."""
    import torch
    import torch.distributed as dist

    count = size_bytes // ELEMENT_BYTES
    pattern = torch.arange(count, device=here.device).remainder_(PATTERN).add_(1).to(torch.float32)
    mine = pattern * (here.rank % PATTERN + 1)
    expected = pattern.mul_(sum(rank % PATTERN + 1 for rank in range(here.world_size)))
    buffer: torch.Tensor = torch.empty_like(mine)
    times = torch.zeros(iterations, dtype=torch.float64)
    wrong = torch.zeros((), dtype=torch.int64, device=here.device)
    for turn in range(-warmup, iterations):
        buffer.copy_(mine)
        dist.barrier()
        here.synchronize()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        here.synchronize()
        if turn >= 0:
            times[turn] = time.perf_counter() - began
        wrong += (buffer != expected).sum()
    times = times.to(here.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    return Row(
        size_bytes=size_bytes,
        seconds=statistics.median(times.tolist()),
        world_size=here.world_size,
        wrong=int(wrong.item()),
    )


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
