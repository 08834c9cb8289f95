"""dist-train against hand-written DDP loops, on CPU ranks; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/train/bench.py [--nproc N] [--turns N]

PYTHON has torch and imgkit. Every rank trains a few steps of each side in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import interval

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
PAIRED = Path(__file__).with_name("paired.py")
SIDES = ("minimal", "tutorial")
STEPS_PER_TURN = 100


def main() -> None:
    """Print the speed of dist-train relative to each hand-written loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60, help="of each side")
    options = parser.parse_args()
    machine = f"{len(os.sched_getaffinity(0))} processors, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, {options.nproc} ranks, load {os.getloadavg()[0]:.1f}")
    args = (str(PAIRED), ",".join(SIDES), str(STEPS_PER_TURN), str(options.turns))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("IMGKIT_RUN_DIR", None)
    argv = (sys.executable, *TORCHRUN, str(options.nproc), *args)
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    spent = json.loads(output.splitlines()[-1])
    for name, each in spent.items():
        cpu, wall = (statistics.median(values) / STEPS_PER_TURN * 1e6 for values in zip(*each, strict=True))
        print(f"* {name}: a step takes {wall:.0f} us, {cpu:.0f} us of CPU a rank")
    for name in SIDES:
        pairs = list(zip(spent[name], spent["dist-train"], strict=True))
        for column, quantity in ((1, "wall time"), (0, "CPU time")):
            low, middle, high = interval([theirs[column] / ours[column] for theirs, ours in pairs])
            print(
                f"* dist-train against {name}, {quantity}: {middle:.2f} times as fast ({low:.2f}-{high:.2f})"
            )


if __name__ == "__main__":
    main()
