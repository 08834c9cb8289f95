"""What a start takes beside a DDP script under bare torchrun; tables for docs/benchmarks.md.

    PYTHON tests/benchmarks/launch/workers.py [--repeat N] [--nproc N] [PART ...]

PYTHON has torch and imgkit. Parts: one two files. `two` has two launchers on this machine, each with half
of the workers; `files` counts file calls, and needs strace.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Run, Side, alternate, once, ratio, spread

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
BOTH_NODES = 'name=$1; shift; env "$name=0" "$@" & head=$!; env "$name=1" "$@" && wait $head'
"""Shell text that runs a command as node 0 and as node 1, whose rank is in the variable `$1`."""


def main() -> None:
    """Measure the chosen parts."""
    parts = {"one": one_node, "two": two_nodes, "files": files}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=4, help="workers on all nodes together")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(parts))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} processors, Linux {platform.release()}, Python {platform.python_version()}")
    for part in options.parts or parts:
        print(f"\n### {part}, {options.nproc} workers\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            parts[part](Path(folder), options)


def one_node(folder: Path, options: argparse.Namespace) -> None:
    """Compare whole commands on one node."""
    report(folder, alternate(sides(folder, options.nproc, 1), options.repeat))


def two_nodes(folder: Path, options: argparse.Namespace) -> None:
    """Compare whole commands on two nodes."""
    report(folder, alternate(sides(folder, options.nproc // 2, 2), options.repeat))


def files(folder: Path, options: argparse.Namespace) -> None:
    """Count the file calls of each command on one node."""
    if shutil.which("strace") is None:
        sys.exit("there is no strace: apt-get install strace")
    print("| way | file calls | of them stat and open |\n|---|---|---|")
    counts = folder / "counts"
    trace = ("strace", "-f", "-qq", "-c", "-e", "trace=%file", "-o", str(counts))
    for side in sides(folder, options.nproc, 1):
        once(side)  # Python writes its byte code
        once(Side(name=side.name, commands=((*trace, *side.commands[0]),), env=side.env, before=side.before))
        rows = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) .*?(\w+)$", counts.read_text(), re.MULTILINE)
        calls = {name: int(count) for count, name in rows if name != "total"}
        looks = sum(count for name, count in calls.items() if "stat" in name or "open" in name)
        print(f"| `{side.name}` | {sum(calls.values()):,} | {looks:,} |", flush=True)


def sides(folder: Path, nproc: int, nodes: int) -> list[Side]:
    """The ways to start workers that take 20 small steps and save their state; the script comes first."""
    (folder / "ddp.py").write_text(DDP)
    program = (f"{folder}/ddp.py", f"{folder}/state.pt")
    torchrun: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}")
    launch: tuple[str, ...] = ("--device", "cpu", "--nproc", f"{nproc}")
    if nodes == 1:
        torchrun += ("--standalone", "--local-addr", "127.0.0.1")
    else:
        torchrun += ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29400")
        launch += ("--nnodes", "2", "--head", "127.0.0.1", "--port", "29500")
    env = {"OMP_NUM_THREADS": "1"}

    def side(name: str, variable: str, command: Sequence[str], before: Callable[[], None]) -> Side:
        argv = tuple(command) if nodes == 1 else ("sh", "-c", BOTH_NODES, "sh", variable, *command)
        return Side(name=name, commands=(argv,), env=env, before=before)

    ways = [side("torchrun ddp.py", "PET_NODE_RANK", (*torchrun, *program), lambda: None)]
    for name, how in itertools.product(("dist-run", "dist-train"), STARTS):
        start = (sys.executable, "-I", "-m", "imgkit_entrypoints", name, *launch, "--start", how)
        train = ("--steps", "20", "--run-dir", f"{folder}/{how}")
        args, suffix = (program, " ddp.py") if name == "dist-run" else (train, "")
        new = functools.partial(new_run, folder / how)
        ways.append(side(f"{name} --start {how}{suffix}", "IMGKIT_NODE_RANK", (*start, *args), new))
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
