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


def spent(what: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = cpu_s(), time.perf_counter()
    what()
    return cpu_s() - cpu, time.perf_counter() - wall


def peak(what: Callable[[], object]) -> int:
    """Peak growth of the process, in bytes."""
    gc.collect()
    time.sleep(0.5)  # gloo's threads release their last operations late
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    what()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def processor_time(here: Ranks, rounds: int, size_bytes: int) -> None:
    """`measurement.time_batch` against a bare loop, in pairs, the order changing."""
    op = collectives.named("all_reduce")
    count = size_bytes // DTYPE.item_bytes
    (buffers,) = allocate(op, count, getattr(torch, DTYPE.torch), here)
    run, tensor = bind(op, buffers, here), buffers.input

    def bare() -> None:
        measurement.meet(here)
        for _ in range(LAUNCHES):
            torch.distributed.all_reduce(tensor)

    sides = {"bare": bare, "dist-bench": lambda: measurement.time_batch(run, LAUNCHES, here)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(-2, rounds):
        for name in sides if turn % 2 else reversed(sides):
            both = spent(sides[name])
            if turn >= 0:
                found[name].append(both)
    for column, what in enumerate(("CPU", "wall")):
        pairs = zip(found["dist-bench"], found["bare"], strict=True)
        low, middle, high = interval([one[column] / other[column] for one, other in pairs])
        each = statistics.median(item[column] for item in found["bare"]) / LAUNCHES
        if here.rank == 0:
            print(
                f"| {what} of an all_reduce of {sizes.binary(size_bytes)}, bare {1e3 * each:.1f} ms "
                f"| {100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}) |",
                flush=True,
            )


def memory(here: Ranks, size_bytes: int) -> None:
    """Memory growth of each collective on the rank that grows most: bare, and with dist-bench."""
    asked = options.read(["--size", str(size_bytes), "--iters", "3", "--warmup-iters", "1"])
    for op in collectives.COLLECTIVES:

        def bare(op: Collective = op) -> None:
            count = op.elements(size_bytes, DTYPE.item_bytes, here.world_size)
            (buffers,) = allocate(op, count, getattr(torch, DTYPE.torch), here)
            bind(op, buffers, here)()

        def measured(op: Collective = op) -> None:
            Measurer(
                options=asked,
                ranks=here,
                dtype=DTYPE,
                expected=ExpectedValues(DTYPE, here.world_size, here.device),
                noise=Noise(DTYPE, here.device),
                rotated_bytes=ROTATED_BYTES["cpu"],
            ).measure(op, size_bytes)

        grown = torch.tensor([peak(bare), peak(measured)], dtype=torch.float64)
        torch.distributed.all_reduce(grown, op=torch.distributed.ReduceOp.MAX)
        if here.rank == 0:
            needed = op.buffer_bytes(size_bytes, here.world_size) / size_bytes
            alone, ours = (grown / size_bytes).tolist()
            print(f"| {op.name} | {needed:.2f} | {alone:.2f} | {ours:.2f} |", flush=True)


def worker(rounds: int, size_bytes: int) -> None:
    """One rank; rank 0 prints."""
    with ranks.opened() as here:
        processor_time(here, rounds, size_bytes)
        memory(here, size_bytes)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=sizes.size, default="64M")
    given = parser.parse_args()
    if "RANK" in os.environ:
        worker(given.rounds, given.size)
        return
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    words = ("--nproc-per-node", str(given.ranks), "--", __file__, "--rounds", str(given.rounds))
    sys.exit(
        subprocess.run(
            [sys.executable, *launcher, *words, "--size", str(given.size)],
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
