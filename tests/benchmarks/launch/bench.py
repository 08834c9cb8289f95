"""What the launcher costs over bare torchrun; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/launch/bench.py [--repeat N] [PART ...]

PYTHON has torch and imgkit. Parts: start plan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Side, alternate, command_line, spread

DIST = (sys.executable, "-I", "-m", "imgkit_entrypoints")


def main() -> None:
    """Measure the chosen parts."""
    parts = {"start": start, "plan": plan}
    parser = command_line(__doc__, repeat=7)
    parser.add_argument("parts", nargs="*", metavar="PART", default=parts, help=" ".join(parts))
    options = parser.parse_args()
    for part in options.parts:
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


if __name__ == "__main__":
    main()
