"""dist-train against hand-written DDP loops, on CPU ranks; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/train/bench.py [--repeat N] [PART ...]

PYTHON has torch and imgkit. Parts: linear resnet18 save. Each side is a whole run under torchrun in
alternation with the others; rates leave out the first fifth of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import ratio, spread

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
LOOP = Path(__file__).with_name("loops.py")
STEPS = {"linear": 6000, "resnet18": 20}
WORDS = {"linear": ("--samples", "65536", "--batch-size", "32"), "resnet18": ("--batch-size", "8")}


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("parts", nargs="*", metavar="PART", help="linear resnet18 save")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} processors, Linux {platform.release()}, {options.nproc} ranks")
    for part in options.parts or ("linear", "resnet18", "save"):
        print(f"\n### {part}\n", flush=True)
        if part == "save":
            save(options.repeat, options.nproc)
        else:
            rates(part, options.repeat, options.nproc)


def rates(model: str, repeat: int, nproc: int) -> None:
    """Samples a second of our loop, the minimal one and, for `linear`, the tutorial's."""
    steps = STEPS[model]
    sides = {
        "dist-train": ("-m", "imgkit_entrypoints.apps.train", "--model", model, "--steps", str(steps),
                       *WORDS[model], "--log-every", str(steps // 5)),
        "minimal": (str(LOOP), "minimal", model, str(steps)),
    }  # fmt: skip
    if model == "linear":
        sides["tutorial"] = (str(LOOP), "tutorial", model, str(steps))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeat + 1):
        for name, words in sides.items():
            output = run(nproc, words)
            rate = ours(output) if name == "dist-train" else float(output.split()[-1])
            if turn:  # the first one warms the machine up
                found[name].append(rate)
            print(f"  {name}: {rate:.0f}", file=sys.stderr, flush=True)
    for name, values in found.items():
        print(f"* {name}: {spread(values, 0)} samples/s")
    for name in list(found)[1:]:
        print(f"* dist-train against {name}: {ratio(found['dist-train'], found[name])}")


def ours(output: str) -> float:
    """Of the lines after the first fifth: whole fifths, so their mean rate is the harmonic one."""
    found = [
        float(line.split(" samples/s")[0].split()[-1]) for line in output.splitlines() if line[:4] == "step"
    ]
    return len(found[2:]) / sum(1 / rate for rate in found[2:])


def run(nproc: int, words: tuple[str, ...]) -> str:
    """What rank 0 printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("IMGKIT_RUN_DIR", None)
    argv = (
        sys.executable,
        *TORCHRUN,
        str(nproc),
        *(("--no-python", sys.executable) if words[0] == "-m" else ()),
        *words,
    )
    return subprocess.run(
        argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ).stdout


def save(repeat: int, nproc: int) -> None:
    """What a snapshot every 100 steps adds to the training time of `mlp`, and the longest stall."""
    plain, saving, stalls = [], [], []
    for turn in range(repeat + 1):
        for every, into in ((0, plain), (100, saving)):
            with tempfile.TemporaryDirectory() as folder:
                words = ("--model", "mlp", "--steps", "2000", "--save-every", str(every), "--run-dir", folder)
                run(nproc, ("-m", "imgkit_entrypoints.apps.train", *words, "--log-every", "400"))
                summary = json.loads(Path(folder, "summary.json").read_text())
            if turn:
                into.append(summary["seconds"])
                stalls += [summary["longest_save_stall_s"]] if every else []
    print(f"* mlp, 2000 steps: {spread(plain)} s; with a snapshot every 100 steps {spread(saving)} s")
    print(f"* with against without: {ratio(saving, plain)}")
    print(f"* longest stall of a run: {spread([stall * 1000 for stall in stalls], 0)} ms")


if __name__ == "__main__":
    main()
