"""What the launcher costs over bare torchrun, and dist-pi against numba; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/launch/bench.py [--repeat N] [--nproc N] [PART ...]

PYTHON has torch and imgkit, for the part `pi` numba too. Parts: start workers plan pi. `workers` compares the
two ways to start them (--start) with a DDP script under bare torchrun that trains the same.
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

PARTS = ("start", "workers", "plan", "pi")
DIST = (sys.executable, "-I", "-m", "imgkit_entrypoints")
TERMS = 200_000_000

DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    inputs = torch.randn(32, 20)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
dist.destroy_process_group()
"""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--nproc", type=int, default=4, help="workers of the part `workers`")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} processors, Linux {platform.release()}, Python {platform.python_version()}")
    for part in options.parts or PARTS:
        print(f"\n### {part}\n", flush=True)
        if part == "workers":
            workers(options.repeat, options.nproc)
        else:
            {"start": start, "plan": plan, "pi": pi}[part](options.repeat)


def start(repeat: int) -> None:
    """An empty module under torchrun, with and without the launcher around it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "noop.py").write_text("")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        env = {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        bare = Side(name="torchrun", commands=((*torchrun, "-m", "noop"),), env=env)
        ours = Side(name="dist-run", commands=((*DIST, "dist-run", "-m", "noop"),), env=env)
        runs = alternate((bare, ours), repeat)
    walls = {name: [run.wall_s for run in done] for name, done in runs.items()}
    for name, wall in walls.items():
        print(f"* `{name} -m noop`: {spread(wall)} s")
    for label, value in (("wall", "wall_s"), ("CPU", "cpu_s")):
        pairs = zip(runs["torchrun"], runs["dist-run"], strict=True)
        more = [(getattr(ours, value) - getattr(bare, value)) * 1000 for bare, ours in pairs]
        print(f"* difference in {label} time, pair by pair: {spread(more, 0)} ms")


def workers(repeat: int, nproc: int) -> None:
    """Time whole commands that take 20 small steps on `nproc` workers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ddp.py").write_text(DDP)
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
        )
        env = {"OMP_NUM_THREADS": "1"}
        script = (*torchrun, "--nproc-per-node", str(nproc), f"{folder}/ddp.py")
        train = (*DIST, "dist-train", "--device", "cpu", "--nproc", str(nproc), "--steps", "20", "--start")
        sides = [Side(name="torchrun ddp.py", commands=(script,), env=env)]
        sides += [Side(name=f"--start {how}", commands=((*train, how),), env=env) for how in ("exec", "fork")]
        runs = alternate(sides, repeat)
    bare = runs["torchrun ddp.py"]
    for name, done in runs.items():
        walls, cpus = ([getattr(run, key) for run in done] for key in ("wall_s", "cpu_s"))
        times = ratio(walls, [run.wall_s for run in bare])
        print(f"* {name}: {spread(walls)} s, {spread(cpus)} CPU s, {times} times the script's wall time")


def plan(repeat: int) -> None:
    """The decision alone."""
    runs = alternate((Side(name="plan", commands=((*DIST, "dist-train", "--plan"),)),), repeat)
    print(f"* `dist-train --plan`: {spread([run.wall_s * 1000 for run in runs['plan']], 0)} ms")


def pi(repeat: int) -> None:
    """Terms per CPU second; each side in a process of its own, in turn."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeat):
        for source in (NUMBA, TORCH):
            done = subprocess.run(
                [sys.executable, "-c", source, str(TERMS)], check=True, stdout=subprocess.PIPE, text=True
            )
            for line in done.stdout.splitlines():
                name, rate = json.loads(line)
                rates.setdefault(name, []).append(rate)
    for name, values in rates.items():
        print(f"* {name}: {spread([value / 1e9 for value in values])}e9 terms/s")
    for name in [other for other in rates if other != "dist-pi"]:
        print(f"* dist-pi against {name}: {ratio(rates['dist-pi'], rates[name])}")
    print(
        f"* medians of {len(next(iter(rates.values())))}: {statistics.median(rates['dist-pi']):.3e} terms/s"
    )


if __name__ == "__main__":
    main()
