"""The overhead of dist-bench over the collectives it times: processor time and memory (docs/benchmarks.md).

    PYTHON tests/benchmarks/bench/bench.py [--ranks N] [--rounds N] [--size 64M]

PYTHON must have torch and this imgkit. One process a rank measures both sides in turn, so that a drift of the
machine meets both alike.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import collectives, measurement, options, sizes, verify
from imgkit_entrypoints.apps.bench.collectives import Collective, allocate, bind
from imgkit_entrypoints.apps.bench.measurement import ROTATED_BYTES, Measurer
from imgkit_entrypoints.apps.bench.verify import ExpectedValues, Noise
from imgkit_entrypoints.run.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import interval

LAUNCHES = 8
DTYPE = verify.dtype_named("fp32")


def cpu_s() -> float:
    """User and system time of this process, with all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def spent(function: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = cpu_s(), time.perf_counter()
    function()
    return cpu_s() - cpu, time.perf_counter() - wall


def peak(function: Callable[[], object]) -> int:
    """Peak growth of the process, in bytes."""
    gc.collect()
    time.sleep(0.5)  # gloo's threads release their last operations late
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def processor_time(own_ranks: Ranks, rounds: int, size_bytes: int) -> None:
    """`measurement.time_batch` against a bare loop, in pairs, the order changing."""
    op = collectives.find_collective("all_reduce")
    count = size_bytes // DTYPE.item_bytes
    (buffers,) = allocate(op, count, getattr(torch, DTYPE.torch), own_ranks)
    run, tensor = bind(op, buffers, own_ranks), buffers.input

    def bare() -> None:
        measurement.wait_for_ranks(own_ranks)
        for _ in range(LAUNCHES):
            torch.distributed.all_reduce(tensor)

    sides = {"bare": bare, "dist-bench": lambda: measurement.time_batch(run, LAUNCHES, own_ranks)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(-2, rounds):
        for name in sides if turn % 2 else reversed(sides):
            both = spent(sides[name])
            if turn >= 0:
                seconds[name].append(both)
    for column, kind in enumerate(("CPU", "wall")):
        pairs = zip(seconds["dist-bench"], seconds["bare"], strict=True)
        low, middle, high = interval([ours[column] / bare_times[column] for ours, bare_times in pairs])
        each = statistics.median(item[column] for item in seconds["bare"]) / LAUNCHES
        if own_ranks.rank == 0:
            print(
                f"| {kind} of an all_reduce of {sizes.format_binary(size_bytes)}, bare {1e3 * each:.1f} ms "
                f"| {100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}) |",
                flush=True,
            )


def memory(own_ranks: Ranks, size_bytes: int) -> None:
    """Memory growth of each collective on the rank that grows most: bare, and with dist-bench."""
    measured_options = options.read_options(
        ["--size", str(size_bytes), "--iters", "3", "--warmup-iters", "1"]
    )
    for op in collectives.COLLECTIVES:

        def bare(op: Collective = op) -> None:
            count = op.elements(size_bytes, DTYPE.item_bytes, own_ranks.world_size)
            (buffers,) = allocate(op, count, getattr(torch, DTYPE.torch), own_ranks)
            bind(op, buffers, own_ranks)()

        def measured(op: Collective = op) -> None:
            Measurer(
                options=measured_options,
                ranks=own_ranks,
                dtype=DTYPE,
                expected=ExpectedValues(DTYPE, own_ranks.world_size, own_ranks.device),
                noise=Noise(DTYPE, own_ranks.device),
                rotated_bytes=ROTATED_BYTES["cpu"],
            ).measure(op, size_bytes)

        grown = torch.tensor([peak(bare), peak(measured)], dtype=torch.float64)
        torch.distributed.all_reduce(grown, op=torch.distributed.ReduceOp.MAX)
        if own_ranks.rank == 0:
            needed = op.buffer_bytes(size_bytes, own_ranks.world_size) / size_bytes
            alone, ours = (grown / size_bytes).tolist()
            print(f"| {op.name} | {needed:.2f} | {alone:.2f} | {ours:.2f} |", flush=True)


def worker(rounds: int, size_bytes: int) -> None:
    """One rank; rank 0 prints."""
    with ranks.join_group() as own_ranks:
        processor_time(own_ranks, rounds, size_bytes)
        memory(own_ranks, size_bytes)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=sizes.parse_size, default="64M")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments.rounds, arguments.size)
        return
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    program = ("--nproc-per-node", str(arguments.ranks), "--", __file__, "--rounds", str(arguments.rounds))
    sys.exit(
        subprocess.run(
            [sys.executable, *launcher, *program, "--size", str(arguments.size)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "MALLOC_MMAP_THRESHOLD_": str(
                    1 << 20
                ),  # else glibc keeps freed buffers, and none seem needed
            },
            check=False,
        ).returncode
    )


if __name__ == "__main__":
    main()
