"""From what is known to what is run: the whole decision about a launch, as one value."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1
DEFAULT_PORT = 29500

# Variables by which a launcher says that this process is one of several:
# a plan made in spite of them would start as many separate runs.
MULTI_NODE: tuple[str, ...] = (
    "SLURM_STEP_NUM_NODES",
    "SLURM_JOB_NUM_NODES",
    "PET_NNODES",
    "OMPI_COMM_WORLD_SIZE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, by flag or IMGKIT_* variable; None and ``auto`` leave it to the plan."""

    nproc: str = "auto"
    device: str = "auto"
    nnodes: int | None = None
    node_rank: int | None = None
    head: str | None = None
    port: int | None = None
    max_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What will be executed."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables set on top of the process' own."""
    unset: tuple[str, ...]
    notes: tuple[str, ...]
    """One sentence per decision, with its reason."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of ``--plan``."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def make(
    request: Request,
    worker: Sequence[str],
    *,
    host: HostFacts,
    facts: SystemFacts | None,
    env: Mapping[str, str],
) -> LaunchPlan:
    """Decide how `worker` (its argv) is started on this node.

    Raises
    ------
    NoPlan : no launch can be right: the job has nodes that nothing here places, or its GPUs are not visible.
    """
    notes: list[str] = []
    device = _device(request, host, facts, notes)
    nproc = _nproc(request, device, host, notes)
    rendezvous = _rendezvous(request, env, notes)
    variables = {"IMGKIT_DEVICE": device}
    for name, value in (facts.env if facts else {}).items():
        if name in env:
            notes.append(f"{name}={env[name]}: yours, the recipe's {value!r} is not used")
        else:
            variables[name] = value
            notes.append(f"{name}={value}: from the recipe")
    if "OMP_NUM_THREADS" not in env:
        variables["OMP_NUM_THREADS"] = str(max(1, host.cpus // nproc))
        notes.append(
            f"OMP_NUM_THREADS={variables['OMP_NUM_THREADS']}: {host.cpus} processors / {nproc} workers"
        )
    # -I and --no-python: neither torchrun nor the workers look into the current folder or a host PYTHONPATH.
    argv = (
        *(sys.executable or "python3", "-I", "-m", "torch.distributed.run"),
        *rendezvous,
        *("--nproc-per-node", str(nproc), "--max-restarts", str(request.max_restarts), "--no-python"),
        *worker,
    )
    # torchrun takes PET_* as defaults of its flags, and dies on some that operators send: PET_STANDALONE="".
    unset = tuple(sorted(name for name in env if name.startswith("PET_")))
    return LaunchPlan(argv=argv, env=variables, unset=unset, notes=tuple(notes))


def _device(request: Request, host: HostFacts, facts: SystemFacts | None, notes: list[str]) -> str:
    expected = facts.node.gpus if facts else 0
    if request.device == "cpu":
        return "cpu"
    if host.gpus:
        notes.append(f"device cuda: {host.gpus} GPUs visible ({host.gpus_source})")
        return "cuda"
    if expected or request.device == "cuda":
        reason = f"the recipe says {expected} a node" if expected else "--device cuda asks for them"
        raise NoPlan(
            f"no GPU is visible here, but {reason} ({host.gpus_source})",
            hint="start the container with --nv, ask the scheduler for GPUs (Slurm: --gres=gpu:N), "
            "or give --device cpu",
        )
    notes.append("device cpu: no GPU is visible and the recipe expects none")
    return "cpu"


def _nproc(request: Request, device: str, host: HostFacts, notes: list[str]) -> int:
    if request.nproc != "auto":
        wanted = int(request.nproc)
        if device == "cuda" and wanted > host.gpus:
            raise NoPlan(
                f"--nproc {wanted} with {host.gpus} visible GPUs would put several ranks on one GPU",
                hint=f"give --nproc {host.gpus} or less, or --device cpu",
            )
        return wanted
    if device == "cuda":
        return host.gpus
    notes.append("1 worker: without GPUs give --nproc N for more")
    return 1


def _rendezvous(request: Request, env: Mapping[str, str], notes: list[str]) -> tuple[str, ...]:
    if request.nnodes is None or request.nnodes == 1:
        several = next((name for name in MULTI_NODE if _number(env.get(name)) > 1), None)
        if request.nnodes is None and several and env.get("SLURM_STEP_NUM_NODES") != "1":
            raise NoPlan(
                f"this job has several nodes ({several}={env[several]}) and nothing says which one this is",
                where=several,
                hint="start this command once per node with --nnodes N --node-rank RANK --head HOST "
                "(Slurm: srun --ntasks-per-node=1, RANK is SLURM_NODEID); for this node alone: --nnodes 1",
            )
        notes.append("one node: rendezvous on this machine")
        # Workers dial the agent by this address. The default is the host's name, which a container without a
        # network cannot resolve: the run then hangs for ten minutes.
        return ("--standalone", "--local-addr", "127.0.0.1")
    if request.node_rank is None or request.head is None:
        missing = "--node-rank" if request.node_rank is None else "--head"
        raise NoPlan(
            f"--nnodes {request.nnodes} needs {missing} too", hint="give --nnodes, --node-rank and --head"
        )
    if not 0 <= request.node_rank < request.nnodes:
        raise NoPlan(
            f"--node-rank {request.node_rank} is not below --nnodes {request.nnodes}",
            where="--node-rank",
            hint=f"0 to {request.nnodes - 1}; the head has 0",
        )
    port = request.port or DEFAULT_PORT
    notes.append(f"node {request.node_rank} of {request.nnodes}, head {request.head}:{port}")
    # static: the node rank given here is the rank that counts; with c10d torchrun ignores it.
    return (
        *("--rdzv-backend", "static", "--nnodes", str(request.nnodes), "--node-rank", str(request.node_rank)),
        *("--master-addr", request.head, "--master-port", str(port)),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
