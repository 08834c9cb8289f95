"""dist-train against hand-written DDP loops, on CPU ranks; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/train/bench.py [--nproc N] [--turns N] [PART ...]

PYTHON has torch and imgkit. Parts: linear resnet18 save. In the first two, every rank trains a few steps of
each side in turn; in the third, every second hundred of steps has a checkpoint. A checkout of an older
imgkit, --old FOLDER, adds a fourth part, old: the trainers of both versions take turns.
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

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import interval

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
PAIRED = Path(__file__).with_name("paired.py")
SIDES = {"linear": ("minimal", "tutorial"), "resnet18": ("minimal",)}
STEPS = {"linear": 100, "resnet18": 2}
"""Steps per turn."""
SAVED = {"gpt": 4, "mlp": 32}
"""Models that are saved, and their batch size: one with long steps, and one with very short steps."""
EVERY = 100
OLD = (("mlp", 512, 20), ("mlp", 32, 100), ("linear", 32, 100))
"""Models that both versions train, batch size and steps per turn: steps of about 10 ms, 1 ms and less."""


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60, help="of each side; a third of it in the last part")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="a checkout of an older imgkit")
    parser.add_argument("parts", nargs="*", metavar="PART", help="linear resnet18 save old")
    options = parser.parse_args()
    machine = f"{len(os.sched_getaffinity(0))} processors, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, {options.nproc} ranks, load {os.getloadavg()[0]:.1f}")
    for part in options.parts or ("linear", "resnet18", "save", *(["old"] if options.old else [])):
        print(f"\n### {part}\n", flush=True)
        if part == "old":
            versions(options.old, options.turns, options.nproc)
        elif part == "save":
            save(options.turns // 3, options.nproc)
        else:
            rates(part, options.turns, options.nproc)


def rates(model: str, turns: int, nproc: int) -> None:
    """Speed of dist-train relative to each hand-written loop."""
    sides, steps = SIDES[model], STEPS[model]
    output = run(nproc, (str(PAIRED), "against", model, ",".join(sides), str(steps), str(turns)))
    spent = json.loads(output.splitlines()[-1])
    for name, each in spent.items():
        cpu, wall = (statistics.median(values) / steps * 1e6 for values in zip(*each, strict=True))
        print(f"* {name}: a step takes {wall:.0f} us, {cpu:.0f} us of CPU a rank")
    for name in sides:
        pairs = list(zip(spent[name], spent["dist-train"], strict=True))
        for column, quantity in ((1, "wall time"), (0, "CPU time")):
            low, middle, high = interval([theirs[column] / ours[column] for theirs, ours in pairs])
            print(
                f"* dist-train against {name}, {quantity}: {middle:.2f} times as fast ({low:.2f}-{high:.2f})"
            )


def save(turns: int, nproc: int) -> None:
    """Time that a checkpoint every 100 steps adds, and the longest delay of a single one."""
    for model, size in SAVED.items():
        with tempfile.TemporaryDirectory() as folder:
            args = ("saving", model, str(size), str(EVERY), str(turns), folder)
            spent = json.loads(run(nproc, (str(PAIRED), *args)).splitlines()[-1])
        plain = statistics.median(wall for _, wall in spent["plain"])
        print(f"* {model}: {EVERY} steps take {1e3 * plain:.0f} ms")
        pairs = list(zip(spent["saving"], spent["plain"], strict=True))
        for column, quantity in ((1, "wall time"), (0, "CPU time of rank 0")):
            low, middle, high = interval([100 * (new[column] / old[column] - 1) for new, old in pairs])
            print(f"* a checkpoint adds {middle:+.1f} % of {quantity} ({low:+.1f} to {high:+.1f})")
        print(f"* longest stall: {1e3 * spent['stall'][0][1]:.0f} ms", flush=True)


def versions(old: Path, turns: int, nproc: int) -> None:
    """Time of the steps of this version relative to those of the checkout `old`."""
    roots = {"old": old, "new": Path(__file__).parents[3]}
    for model, size, count in OLD:
        with tempfile.TemporaryDirectory() as folder:
            fifos = {side: f"{folder}/{side}" for side in roots}
            for fifo in fifos.values():
                os.mkfifo(fifo)
            running = []
            for side, root in roots.items():
                next_fifo = fifos["new" if side == "old" else "old"]
                args = (
                    str(PAIRED),
                    "in-turn",
                    model,
                    str(size),
                    str(count),
                    str(turns),
                    fifos[side],
                    next_fifo,
                )
                running.append(started(nproc, args, {"PYTHONPATH": str(root / "entrypoints")}))
            first = os.open(fifos["old"], os.O_RDWR)
            os.write(first, b".")
            outputs = [process.communicate()[0] for process in running]
        before, after = (json.loads(text.splitlines()[-1])["spent"] for text in outputs)
        wall = statistics.median(pair[1] for pair in before) / count
        print(f"* {model}, batch {size}: a step of the old version takes {1e3 * wall:.3f} ms")
        for column, quantity in ((1, "wall time"), (0, "CPU time of rank 0")):
            changes = [100 * (new[column] / old[column] - 1) for new, old in zip(after, before, strict=True)]
            low, middle, high = interval(changes)
            print(
                f"* the new version takes {middle:+.1f} % of {quantity} ({low:+.1f} to {high:+.1f})",
                flush=True,
            )


def run(nproc: int, args: tuple[str, ...]) -> str:
    """Start the ranks and return the output of rank 0."""
    with started(nproc, args, {}) as process:
        output = process.communicate()[0]
    if process.returncode != 0:
        sys.exit(process.returncode)
    return output


def started(nproc: int, args: tuple[str, ...], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start the ranks, with `more` in their environment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    env.pop("IMGKIT_RUN_DIR", None)
    argv = (sys.executable, *TORCHRUN, str(nproc), *args)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)


if __name__ == "__main__":
    main()
