"""What the launcher costs over bare torchrun, and dist-pi against numba; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/launch/bench.py [--repeat N] [PART ...]

PYTHON has torch and imgkit, for the part `pi` numba too. Parts: start plan pi.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Side, alternate, ratio, spread

DIST = (sys.executable, "-I", "-m", "imgkit_entrypoints")
TERMS = 200_000_000

NUMBA = """
import json, sys, time
from numba import njit

def loop(n):
    total = 0.0
    for i in range(n):
        x = (i + 0.5) / n
        total += 4.0 / (1.0 + x * x)
    return total / n

for name, jit in (("numba", njit(loop)), ("numba, fastmath", njit(fastmath=True)(loop))):
    jit(10)
    began = time.process_time()
    jit(int(sys.argv[1]))
    print(json.dumps([name, int(sys.argv[1]) / (time.process_time() - began)]))
"""
TORCH = """
import json, sys, time, torch
from imgkit_entrypoints.apps import pi
from imgkit_entrypoints.run.ranks import Ranks

torch.set_num_threads(1)
n = int(sys.argv[1])
here = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
pi.partial_sum(0, 10_000, n, here)
began = time.process_time()
pi.partial_sum(0, n, n, here)
print(json.dumps(["dist-pi", n / (time.process_time() - began)]))
"""


def main() -> None:
    """Measure the chosen parts."""
    parts = {"start": start, "plan": plan, "pi": pi}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(parts))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} processors, Linux {platform.release()}, Python {platform.python_version()}")
    for part in options.parts or parts:
        print(f"\n### {part}\n", flush=True)
        parts[part](options.repeat)


def start(repeat: int) -> None:
    """An empty module under torchrun, with and without the launcher around it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "noop.py").write_text("")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        env = {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        bare = Side(name="torchrun", commands=((*torchrun, "-m", "noop"),), env=env)
        ours = Side(name="dist-run", commands=((*DIST, "dist-run", "-m", "noop"),), env=env)
        runs = alternate((bare, ours), repeat)
    walls = {name: [run.wall_s for run in side_runs] for name, side_runs in runs.items()}
    for name, wall in walls.items():
        print(f"* `{name} -m noop`: {spread(wall)} s")
    for label, value in (("wall", "wall_s"), ("CPU", "cpu_s")):
        pairs = zip(runs["torchrun"], runs["dist-run"], strict=True)
        differences = [(getattr(ours, value) - getattr(bare, value)) * 1000 for bare, ours in pairs]
        print(f"* difference in {label} time, pair by pair: {spread(differences, 0)} ms")


def plan(repeat: int) -> None:
    """The decision alone."""
    runs = alternate((Side(name="dry-run", commands=((*DIST, "dist-train", "--dry-run"),)),), repeat)
    print(f"* `dist-train --dry-run`: {spread([run.wall_s * 1000 for run in runs['dry-run']], 0)} ms")


def pi(repeat: int) -> None:
    """Terms per CPU second; each side in a process of its own, in turn."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeat):
        for source in (NUMBA, TORCH):
            process = subprocess.run(
                [sys.executable, "-c", source, str(TERMS)], check=True, stdout=subprocess.PIPE, text=True
            )
            for line in process.stdout.splitlines():
                name, rate = json.loads(line)
                rates.setdefault(name, []).append(rate)
    for name, values in rates.items():
        print(f"* {name}: {spread([value / 1e9 for value in values])}e9 terms/s")
    for name in sorted(rates.keys() - {"dist-pi"}):
        print(f"* dist-pi against {name}: {ratio(rates['dist-pi'], rates[name])}")
    print(
        f"* medians of {len(next(iter(rates.values())))}: {statistics.median(rates['dist-pi']):.3e} terms/s"
    )


if __name__ == "__main__":
    main()
