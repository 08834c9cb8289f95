"""The whole decision about a launch: what a command line requests, and the plan that `make` derives from it.

This module reads nothing from the machine. The plan's argv has markers for values that are known later,
when the nodes have met; `fill` replaces them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from imgkit_entrypoints import fabric
from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.fabric import Decision
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.facts.compute import ONLY_NVIDIA
from imgkit_entrypoints.launch import cores, per_node
from imgkit_entrypoints.launch.compile_cache import CompileCache
from imgkit_entrypoints.launch.host_leaks import CleanEnvironment
from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.schedulers.placement import Placement, PlacementRequest, Size
from imgkit_entrypoints.system import SYSTEM_JSON, SystemFacts

DEFAULT_FAILURES = 3
"""Failures that a run with a range or spares survives where the user gives no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The processes that the user wants on this node; ``auto`` leaves a value to the plan."""

    nproc: str = "auto"
    device: str = "auto"
    max_failures: int | None = None
    """Failures that the run survives by a new attempt; None: `DEFAULT_FAILURES` with spares, else 0."""
    start: str = "auto"
    """Whether the workers are forks of torchrun (fork) or interpreters of their own (exec)."""
    log_dir: str | None = None
    prefix: bool = True
    """Each line of output bears ``[host:rank]``."""
    binds_cpus: bool = True
    """Each worker runs on the processors beside its GPU (cores.py)."""
    is_per_node: bool = False
    """The command runs once on each node, without torchrun (per_node.py)."""
    worker_args: tuple[str, ...] = ()
    """Further arguments of that command on every node but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that the node agent waits."""

    grace_s: float = 60.0
    """Time from a stop request to the end by force."""
    rollcall_s: float = 120.0
    """Time in which all nodes must call, and longest time of torchrun's rendezvous."""
    hang_after_s: float = 60.0
    """Time after which a worker that does not move is reported; 0: never."""
    lost_after_s: float = 30.0
    """Silence after which a node counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The launch's part of a command line."""

    placement: PlacementRequest
    request: Request
    timeouts: Timeouts
    dry_run: bool
    """Show every resolved value and its source, then exit."""
    json: bool = False
    """A dry run prints one JSON object."""
    verbose: bool = False
    """Print the reasons for all settings at the start."""
    network_test: bool = True
    """The nodes test the network between them before torchrun starts."""
    secret_file: str | None = None
    """The file that the user or the job script names; ``-`` is standard input."""
    require_secret: bool = False
    """Several nodes do not start without a secret."""
    preflight: bool = False
    """Measure the nodes before the start."""
    compile_cache: str | None = None
    """The file from which compiled code is unpacked, and into which it is packed."""
    keep_env: tuple[str, ...] = ()
    """Variables of the host that the workers keep."""


SCHEMA = 1
Mode = Literal["torchrun", "direct", "per-node"]

_SHUTDOWN_SINCE = (2, 12)
"""Version of torch whose torchrun has a flag for its wait between the signal that it passes on and KILL. By
default it is 30 s, longer than we wait. All other flags are in 2.3 as well."""
ENDED_TOGETHER = ("pbs", "pals", "openmpi", "hydra")
"""Launchers that end all processes of a job when one of its nodes is gone."""

_GPU_VARIABLES = ("IMGKIT_GPUS", "SLURM_GPUS_ON_NODE")
"""Variables with the GPUs that a job has on each node, of imgkit's job script and of Slurm."""
MAX_WARNINGS = 2
"""Most lines about warnings at the start."""
_WIDEST = 24
"""Longest value after which the sources of a dry run are still aligned."""
_PET_NPROC = "PET_NPROC_PER_NODE"
"""Variable in which Kubeflow's operators give the number of processes; torchrun is kept from reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command, its variables and the reasons for them on this node."""

    placement: Placement
    max_failures: int
    """Lost nodes and failed workers that the run survives by a new attempt."""
    mode: Mode
    nproc: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables set on top of the process' own."""
    unset: tuple[str, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Libraries of the host that workers load: the file in the container by the name that programs open."""
    image: str = ""
    """Why a value that the image set counts as the user's; empty: the image's variables are known."""
    secret: str = ""
    """The place that the secret of the roll call comes from; empty: the start is open, or on one node."""
    environment: CleanEnvironment = dataclasses.field(default_factory=CleanEnvironment)
    """What the workers do not get of the host."""
    cache: CompileCache | None = None
    """The folder of compiled code on this node; None: the workers' programs choose their own."""
    notes: tuple[str, ...] = ()
    """What is different for the workers on this node, a line each."""
    hidden: frozenset[str] = frozenset()
    """Notes and warnings that do not matter here, as about an unused network: ``-v`` prints them."""

    def announcements(self, *, verbose: bool) -> Iterator[str]:
        """Yield what the head prints at the start: few lines, or all values with their reasons."""
        nnodes, device = self.placement.nnodes, self.env.get("IMGKIT_DEVICE", "")
        nodes = "1 node" if nnodes == 1 else f"{nnodes} nodes"
        processes = "1 process" if self.nproc == 1 else f"{self.nproc} processes"
        if self.mode == "per-node":
            processes = "1 command"
        each = " on each" if nnodes > 1 else ""
        yield f"{nodes}, {processes}{each}, {device}" + ("" if verbose else " (to see why: -v)")
        yield from (text for text in self.notes if verbose or text not in self.hidden)
        if verbose:
            yield from (str(decision) for decision in self.decisions if decision.used)
            yield from self.warnings
            return
        warnings = [text for text in self.warnings if text not in self.hidden]
        visible = warnings if len(warnings) <= MAX_WARNINGS else warnings[: MAX_WARNINGS - 1]
        yield from (f"warning: {text}" for text in visible)
        if len(visible) < len(warnings):
            yield f"{len(warnings) - len(visible)} more warnings (to see them: -v)"

    def lines(self) -> Iterator[str]:
        """Yield the text of ``--dry-run``: each value with its source, the warnings, and the command."""
        rows = [*self._values()]
        names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
        for name, value, source in rows:
            yield f"{name:{names}}  {value:{min(values, _WIDEST)}}  {source}".rstrip()
        yield from (f"note: {text}" for text in self.notes)
        yield from (f"warning: {text}" for text in self.warnings)
        yield f"command: {shlex.join(self.argv)}"

    def _values(self) -> Iterator[tuple[str, str, str]]:
        """Names and values, each with its source."""
        placement, source = self.to_dict()["placement"], self.placement.source
        default = {"nnodes": "this machine alone", "node_rank": "the only node", "port": "from the job id"}
        yield "scheduler", self.placement.scheduler, ""
        for name in ("nnodes", "node_rank", "hosts", "head", "port", "job_id"):
            value = placement[name]
            text = ",".join(value) if name == "hosts" else str(value)
            yield name, text or "-", source.get(name, "") or default.get(name, "")
        yield "max_failures", str(self.max_failures), "failures that the run survives"
        starters = {"torchrun": "torchrun", "direct": self.placement.scheduler, "per-node": "the command"}
        yield "mode", self.mode, f"{starters[self.mode]} starts the workers"
        yield "secret", self.secret or "-", "" if self.secret else "not needed, or none is set"
        if self.image and any(decision.origin == "user" for decision in self.decisions):
            yield "image", "unknown", self.image
        decided = {decision.variable for decision in self.decisions}
        for decision in self.decisions:
            reason = decision.reason if decision.used else f"not set: {decision.reason}"
            yield decision.variable, decision.value or "-", reason
        for name, value in self.env.items():
            if name not in decided:
                yield name, value, "set by imgkit for the workers"
        for name in self.unset:
            yield name, "-", "removed from the workers' environment"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, of ``--dry-run --json``."""
        placement = self.placement
        return {
            "schema": SCHEMA,
            "scheduler": placement.scheduler,
            "source": dict(placement.source),
            "placement": {
                "nnodes": placement.nnodes,
                "size": dataclasses.asdict(placement.size or Size(training=placement.nnodes)),
                "node_rank": placement.node_rank,
                "hosts": list(placement.hosts),
                "head": placement.head,
                # The nodes meet on this port, and agree on torchrun's own port there.
                "port": ports.rollcall_port(placement.job_id, placement.port),
                "job_id": placement.job_id,
            },
            "max_failures": self.max_failures,
            "nproc": self.nproc,
            "mode": self.mode,
            "secret": self.secret,
            "image": self.image,
            "argv": list(self.argv),
            "env": dict(self.env),
            "unset": list(self.unset),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def make(
    request: Request,
    worker: Sequence[str],
    *,
    torchrun: str,
    placement: Placement,
    host: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    is_imgkits: bool = False,
) -> LaunchPlan:
    """Decide how to start `worker` (its argv) on the node `placement`.

    Parameters
    ----------
    torchrun : the module that runs torchrun.
    is_imgkits : whether `worker` is a program of this package.

    Raises
    ------
    NoPlan : no launch can be right: the recipe's GPUs are not visible, or the nodes could not connect.
    """
    device = _device(request, host, system, env)
    network = fabric.choose_fabric(host, system, env, nnodes=placement.nnodes, head=placement.head)
    blockers = (*network.refusals, *(network.blockers if placement.nnodes > 1 else ()))
    if blockers and device.value == "cuda":
        raise NoPlan(
            blockers[0].what,
            where=f"fabric {network.kind}",
            hint=f"{blockers[0].fix}; --device cpu runs over gloo",
        )
    nproc = _nproc(request, device.value, host, placement, env)
    binding = cores.CpuBinding()
    if not request.binds_cpus:
        binding = cores.CpuBinding(reason="--no-cpu-binding")
    elif device.value == "cuda" and not request.is_per_node and not placement.direct:
        binding = cores.choose_binding(host, int(nproc.value), env)
    threads = _threads(host, int(nproc.value), binding, system, env)
    decided = dict(network.env)
    if threads and threads.origin != "user":
        decided[threads.variable] = threads.value
    if binding.value:
        decided[cores.VARIABLE] = binding.value
    # The names tell the program which values are the node agent's choices and not the user's.
    variables = {"IMGKIT_DEVICE": device.value, "IMGKIT_DECIDED": ",".join(sorted(decided)), **decided}
    command = tuple(worker)
    mode: Mode = "torchrun"
    if placement.direct is not None:
        mode = "direct"
        variables |= _ranks(placement)
    elif request.is_per_node:
        mode = "per-node"
        command += request.worker_args if placement.node_rank else ()
    else:
        command = (*_torchrun(torchrun, request, placement, host, nproc.value), *command)
        # Read by apps/torchrun.py. A fork has not been tried with CUDA, and another program may not bear it.
        forks = request.start == "fork" or (request.start == "auto" and is_imgkits and device.value == "cpu")
        variables["IMGKIT_START"] = "fork" if forks else "exec"
    network_warnings = tuple(map(str, network.warnings))
    # Gloo on one node takes lo: what the recipe expects of the cluster's network says nothing about this run.
    uses_network = device.value == "cuda" or placement.nnodes > 1
    cpus = Decision(cores.VARIABLE, binding.value, binding.reason, used=bool(binding.value))
    own_decisions = (decision for decision in (device, nproc, cpus, threads) if decision and decision.reason)
    return LaunchPlan(
        placement=placement,
        max_failures=_max_failures(request, placement),
        mode=mode,
        nproc=int(nproc.value),
        argv=command,
        env=variables,
        # torchrun reads PET_* as defaults of its flags and dies of some that operators send, as of
        # PET_STANDALONE="".
        unset=(
            *sorted(name for name in env if name.startswith("PET_")),
            *(name for name in per_node.RANK_VARIABLES if mode == "per-node" and name in env),
            *network.unset,
        ),
        decisions=(*own_decisions, *network.decisions),
        links=network.links,
        image=network.image,
        warnings=(
            *_unused_nproc(request, placement, nproc.value, env),
            *_useless_spares(placement),
            *network_warnings,
        ),
        hidden=frozenset(() if uses_network else network_warnings),
    )


def _max_failures(request: Request, placement: Placement) -> int:
    if placement.direct is not None:
        return 0
    if request.max_failures is not None:
        return request.max_failures
    return DEFAULT_FAILURES if placement.size else 0


def _useless_spares(placement: Placement) -> tuple[str, ...]:
    """Return a warning where the launcher of the processes ends the job together with one node."""
    if placement.size is None or not placement.size.spares:
        return ()
    if placement.direct is not None:
        return ("spares have no effect without torchrun: all processes that are started take part",)
    if placement.scheduler not in ENDED_TOGETHER:
        return ()
    return (
        f"{placement.scheduler} ends all processes when one node is lost, so a spare can only replace a node "
        "that the preflight leaves out",
    )


def _device(
    request: Request, host: HostFacts, system: SystemFacts | None, env: Mapping[str, str]
) -> Decision:
    if request.device == "cpu":
        return Decision(variable="device", value="cpu", reason="")
    _refuse_amd(host)
    if host.gpus:
        return Decision(variable="device", value="cuda", reason=f"{host.gpus} GPUs: {host.gpus_source}")
    expected, source = _expected_gpus(system, env)
    # Else a forgotten --nv would silently start ranks on the CPU, with --nproc as many as there are GPUs.
    if request.device == "cuda" or expected:
        reason = f"{source} says {expected} per node" if expected else "--device cuda asks for one"
        ask = f"request GPUs from the scheduler (Slurm: --gres=gpu:{expected or 'N'})"
        remedy = f"start the container with --nv (docker: --gpus=all), and {ask}"
        if ONLY_NVIDIA in host.gpus_source:
            remedy = f"{ask} on nodes with NVIDIA GPUs; a container with --rocm does not help"
        raise NoPlan(
            f"no GPU is visible here, but {reason} ({host.gpus_source})",
            hint=f"{remedy}; to run on the CPU anyway: --device cpu",
        )
    return Decision(variable="device", value="cpu", reason="no GPU is visible, and none is expected")


def _refuse_amd(host: HostFacts) -> None:
    """Raise NoPlan for AMD's GPUs or software, where the plan would be one process on the CPU."""
    if host.rocm:
        problem, remedy = "the image is made for AMD GPUs", "an image for NVIDIA GPUs"
    elif host.amd_gpus and not host.gpus:
        problem = "this node has AMD GPUs"
        remedy = "a node with NVIDIA GPUs; a container with --rocm does not help"
    else:
        return
    raise NoPlan(
        f"{problem}, and imgkit supports only work on CPUs with them",
        where=host.rocm or host.amd_gpus,
        hint=f"to run on CPUs: --device cpu (imgkit run --gpus 0); for GPUs, use {remedy}",
    )


def _expected_gpus(system: SystemFacts | None, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the GPUs that this node must have, and who says so: the image, else the job."""
    if system is not None and system.node.gpus:
        model = f" ({system.node.gpu_model})" if system.node.gpu_model else ""
        return system.node.gpus, f"{SYSTEM_JSON}{model}"
    name = next((name for name in _GPU_VARIABLES if env.get(name)), "")
    return parse_digits(env.get(name, "")) or 0, name


def _nproc(
    request: Request, device: str, host: HostFacts, placement: Placement, env: Mapping[str, str]
) -> Decision:
    if placement.direct is not None:
        number, reason = placement.direct.local_world_size, f"{placement.scheduler} started them"
    elif request.nproc != "auto":
        number, reason = int(request.nproc), "--nproc"
    elif env.get(_PET_NPROC):
        number, reason = _operators_nproc(env[_PET_NPROC], host)
    elif device == "cuda":
        number, reason = host.gpus, "one per GPU"
    else:
        number, reason = 1, "no GPU: one; --nproc N starts more"
    if device == "cuda" and number > host.gpus:
        raise NoPlan(
            f"{number} processes with {host.gpus} visible GPUs would put several ranks on one GPU",
            where=host.gpus_source,
            hint=f"give --nproc {host.gpus} or less, or --device cpu",
        )
    return Decision(variable="nproc", value=str(number), reason=reason)


def _operators_nproc(text: str, host: HostFacts) -> tuple[int, str]:
    """Return the processes that `_PET_NPROC` means, as torchrun reads its ``--nproc-per-node``."""
    counts = {"auto": host.gpus or host.cpus, "gpu": host.gpus, "cpu": host.cpus}
    number = counts.get(text) or parse_digits(text)
    if not number or number >= 10**6:
        reason = f" ({host.gpus_source})" if text == "gpu" else ""
        raise NoPlan(
            f"{text[:200]!r} is not a number of processes on this node{reason}",
            where=_PET_NPROC,
            hint="a number from 1, auto, cpu, or gpu where GPUs are visible; or give --nproc N",
        )
    if text not in counts:
        return number, _PET_NPROC
    unit = "GPU" if text != "cpu" and host.gpus else "processor allowed"
    return number, f"{_PET_NPROC}={text}: one per {unit}"


def _unused_nproc(
    request: Request, placement: Placement, nproc: str, env: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a warning if the number that an operator gives is not the one of the run."""
    value = env.get(_PET_NPROC, "")
    if (placement.direct is None and request.nproc == "auto") or value in ("", "auto", nproc):
        return ()
    reason = "--nproc takes precedence" if placement.direct is None else f"{placement.scheduler} started them"
    return (f"{_PET_NPROC}={value[:200]} is not used: {reason}, {nproc} on this node",)


def _threads(
    host: HostFacts,
    nproc: int,
    binding: cores.CpuBinding,
    system: SystemFacts | None,
    env: Mapping[str, str],
) -> Decision | None:
    name = "OMP_NUM_THREADS"
    value, images_value = env.get(name), (host.image_env or {}).get(name)
    if system is not None and name in system.env and value in (None, images_value, system.env[name]):
        return None  # the network's plan has the recipe's variables
    replaced = f"; replaces the image's {images_value!r}" if value and value == images_value else ""
    # PBS sets it to the chunk's processors, and mpiexec hands it on. That is no wish of the user's, and nproc
    # times too many.
    by_pbs = bool(env.get("PBS_JOBID")) and value in (env.get("NCPUS"), str(host.cpus))
    if value and not by_pbs and not replaced:
        return Decision(variable=name, value=value, reason="set by the user", origin="user")
    cpus = host.cpus // nproc
    reason = f"{host.cpus} processors allowed / {nproc} processes"
    if binding.value and binding.cpus_per_worker < cpus:
        cpus = binding.cpus_per_worker
        reason = f"a worker has {cpus} processors beside its GPU"
    return Decision(variable=name, value=str(max(1, cpus)), reason=f"{reason}{replaced}")


def _ranks(placement: Placement) -> dict[str, str]:
    """Return the variables that torchrun would have set for this worker."""
    assert placement.direct is not None  # noqa: S101 - the caller branches on it
    return {
        "RANK": str(placement.direct.rank),
        "LOCAL_RANK": str(placement.direct.local_rank),
        "WORLD_SIZE": str(placement.direct.world_size),
        "LOCAL_WORLD_SIZE": str(placement.direct.local_world_size),
        "MASTER_ADDR": placement.head or "127.0.0.1",
        "MASTER_PORT": str(placement.base_port),
    }


def _torchrun(
    module: str, request: Request, placement: Placement, host: HostFacts, nproc: str
) -> tuple[str, ...]:
    # Each node has its own folder: torchrun's paths name no host, and nodes may share a file system.
    logs = str(PurePath(request.log_dir, host_label(host.hostname))) if request.log_dir else LOGS_PENDING
    if request.log_dir and _max_failures(request, placement):
        logs = str(PurePath(logs, ATTEMPT_PENDING))
    # A container without a network cannot resolve the host's name: the run would hang for ten minutes.
    head = placement.head if placement.nnodes > 1 else "127.0.0.1"
    nnodes, node_rank = str(placement.nnodes), str(placement.node_rank)
    if placement.size and placement.nnodes > 1:
        nnodes, node_rank = NNODES_PENDING, NODE_RANK_PENDING
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", host.torch_version)
    version = tuple(map(int, match.groups())) if match else ()
    return (
        # -I and --no-python: neither torchrun nor our workers look into the current folder or a PYTHONPATH.
        # -u: torchrun copies the workers' lines, and would buffer them until its end if stdout is a file.
        *(sys.executable or "python3", "-I", "-u", "-m", module),
        # Always the static rendezvous. torchrun's other one, c10d, is also that of --standalone. It ignores
        # the node rank, and it unpickles a value of a store that listens on all addresses and lists its keys:
        # the value of a stranger in the network would run as this user.
        *("--rdzv-backend", "static", "--nnodes", nnodes, "--node-rank", node_rank),
        *("--master-addr", head, "--master-port", PORT_PENDING),
        *("--nproc-per-node", nproc, "--max-restarts", "0"),
        *("--monitor-interval", "0.1"),  # torch 2.3 checks its workers every 5 s only
        *(("--shutdown-timeout", "3") if version >= _SHUTDOWN_SINCE else ()),
        *("--tee", "3" if request.prefix else "0", "--log-dir", logs, "--no-python"),
        "--",  # torchrun's parser would read the program's --max as a short --max-restarts, and refuse it
    )


def host_label(host: str) -> str:
    """Return a host name as a part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "node"


PORT_PENDING = "<port from the roll call>"
"""Stands for torchrun's port: the head chooses a free one during the roll call."""
NNODES_PENDING = "<number of nodes of this attempt>"
"""Stands for the nodes that train, where the run has spares."""
NODE_RANK_PENDING = "<node rank of this attempt>"
"""Stands for this node's number among them."""
ATTEMPT_PENDING = "<attempt>"
"""Stands for the attempt's number, also within a path."""
LOGS_PENDING = "<log folder of this run>"
"""Stands for a folder that the node agent removes after the run. torchrun would leave its own behind."""


def fill(
    argv: Sequence[str], *, attempt: int, port: int, nnodes: int, node_rank: int, logs: Path
) -> list[str]:
    """Return `argv` with the values in place of the markers."""
    values = {
        PORT_PENDING: str(port),
        NNODES_PENDING: str(nnodes),
        NODE_RANK_PENDING: str(node_rank),
        LOGS_PENDING: str(logs),
    }
    return [values.get(arg, arg).replace(ATTEMPT_PENDING, f"attempt{attempt}") for arg in argv]
