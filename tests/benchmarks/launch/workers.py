"""What a start takes beside a DDP script under bare torchrun; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/launch/workers.py [--repeat N] [--nproc N]

PYTHON has torch and imgkit.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Run, Side, alternate, command_line, ratio, spread

DDP = """
import os, sys
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
if dist.get_rank() == 0:
    print(loss.item())
    torch.save([model.module.state_dict(), optimizer.state_dict()], sys.argv[1])
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may outlive the interpreter, and end it by SIGABRT: in 3 of 5 runs of torchrun
"""
STARTS = ("exec", "fork")


def main() -> None:
    """Measure the chosen parts."""
    parser = command_line(__doc__, repeat=20)
    parser.add_argument("--nproc", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report(folder, alternate(sides(folder, options.nproc), options.repeat))


def sides(folder: Path, nproc: int) -> list[Side]:
    """The ways to start workers that take 20 small steps and save their state; the script comes first."""
    (folder / "ddp.py").write_text(DDP)
    program = (f"{folder}/ddp.py", f"{folder}/state.pt")
    options = ("--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={nproc}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
    launch = ("--device", "cpu", "--nproc", f"{nproc}")
    env = {"OMP_NUM_THREADS": "1"}
    ways = [Side(name="torchrun ddp.py", commands=((*torchrun, *program),), env=env)]
    for name, how in itertools.product(("dist-run", "dist-train"), STARTS):
        start = (sys.executable, "-I", "-m", "imgkit_entrypoints", name, *launch, "--start", how)
        train = ("--steps", "20", "--run-dir", f"{folder}/{how}")
        args, suffix = (program, " ddp.py") if name == "dist-run" else (train, "")
        new = functools.partial(new_run, folder / how)
        title = f"{name} --start {how}{suffix}"
        ways.append(Side(name=title, commands=((*start, *args),), env=env, before=new))
    return ways


def new_run(folder: Path) -> None:
    """Keep the last summary, and remove the run folder: dist-train would go on from its checkpoint."""
    if folder.exists():
        before = len(list(folder.parent.glob(f"{folder.name}-*.json")))
        (folder / "summary.json").rename(folder.parent / f"{folder.name}-{before}.json")
        shutil.rmtree(folder)


def report(folder: Path, runs: dict[str, list[Run]]) -> None:
    """Print a table of all ways, and one of the parts of dist-train's starts."""
    bare = [run.wall_s for run in next(iter(runs.values()))]
    print("| way | wall s | CPU s | of the script's wall time |\n|---|---|---|---|")
    for name, way_runs in runs.items():
        walls, cpus = ([getattr(run, key) for run in way_runs] for key in ("wall_s", "cpu_s"))
        print(f"| `{name}` | {spread(walls)} | {spread(cpus)} | {ratio(walls, bare)} |")
    parts: dict[str, list[dict[str, float]]] = {}
    for how in STARTS:
        new_run(folder / how)
        parts[how] = [json.loads(path.read_text())["start_s"] for path in folder.glob(f"{how}-*.json")]
    print("\n| part of dist-train's start, s | `--start exec` | `--start fork` |\n|---|---|---|")
    for name in parts["exec"][0]:
        print(f"| `{name}` | {' | '.join(spread([row[name] for row in parts[how]]) for how in STARTS)} |")


if __name__ == "__main__":
    main()
