"""Decide how to launch a run: `decide_launch` turns a request and facts into a plan.

This module reads nothing from the machine. The facts about the machine are arguments of `decide_launch`. Some
values, such as torchrun's port, are known only after all nodes have met. The plan's argv contains markers for
them, which `fill_markers` replaces.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.messages import AttemptStart

DEFAULT_FAILURES = 3
"""Number of failures that a run with spares survives if the user gives no ``--max-failures``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The processes that the user requests on this node. ``auto`` leaves the choice to `decide_launch`."""

    nproc: str = "auto"
    """Number of processes on this node, in digits."""
    device: str = "auto"
    """``cuda`` or ``cpu``."""
    max_failures: int | None = None
    """Failures after which the run starts a new attempt.

    None means `DEFAULT_FAILURES` with spares, else 0.
    """
    start: str = "auto"
    """How torchrun starts the workers: ``fork`` to fork itself, ``exec`` to start new interpreters."""
    log_dir: str | None = None
    """Folder for the output of each process, or None to save no output."""
    prefix: bool = True
    """True if each line of output begins with ``[host:rank]``."""
    binds_cpus: bool = True
    """True if each worker may run only on the processors that are close to its GPU (cores.py)."""
    is_per_node: bool = False
    """True if the command runs once on each node, without torchrun (per_node.py)."""
    worker_args: tuple[str, ...] = ()
    """With `is_per_node`, further arguments of the command on every node except the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The node agent's time limits in seconds. Each is an option of the command line."""

    grace_s: float = 60.0
    """Time from a stop request until the program is ended by force."""
    rollcall_s: float = 120.0
    """Time in which all nodes must join the roll call, and longest time of torchrun's rendezvous."""
    hang_after_s: float = 60.0
    """Time without progress after which a worker is reported as stuck. 0 switches the reports off."""
    lost_after_s: float = 30.0
    """Time without a message from a node after which the node counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The part of a command line that concerns the launch, and not the program."""

    placement: PlacementRequest
    request: Request
    timeouts: Timeouts
    dry_run: bool
    """True to show every resolved value and its source, and then exit."""
    json: bool = False
    """True if a dry run prints one JSON object."""
    verbose: bool = False
    """True to print the reasons for all settings at the start."""
    network_test: bool = True
    """True if the nodes test the network between them before torchrun starts."""
    secret_file: str | None = None
    """Path of the secret that the user or the job script names, or ``-`` for standard input."""
    require_secret: bool = False
    """True if a run on several nodes must not start without a secret."""
    preflight: bool = False
    """True to measure the nodes before the start."""
    compile_cache: str | None = None
    """The file from which compiled code is unpacked at the start, and into which it is packed at the end."""
    keep_env: tuple[str, ...] = ()
    """Variables of the host that the workers keep, such as ``PMIX_*`` (host_leaks.py)."""


# Version of the JSON document of --dry-run.
SCHEMA = 1
Mode = Literal["torchrun", "direct", "per-node"]
"""What starts the workers: torchrun, the launcher (which starts each rank), or the user's own command."""

# First version of torch whose torchrun has --shutdown-timeout. That is the time between the signal that
# torchrun passes on to its workers and KILL. Its default of 30 s is longer than the node agent waits. All
# other flags that we use exist since torch 2.3.
_SHUTDOWN_SINCE = (2, 12)
ENDED_TOGETHER = ("pbs", "pals", "openmpi", "hydra")
"""Launchers that end all processes of a job when one of its nodes is gone."""

# Variables with the number of GPUs that the job has on each node. imgkit's job script sets the first, and
# Slurm the second.
_GPU_VARIABLES = ("IMGKIT_GPUS", "SLURM_GPUS_ON_NODE")
MAX_WARNINGS = 2
"""Largest number of lines about warnings at the start."""
# Largest width of the column of values in a dry run. A longer value pushes its source to the right.
_MAX_VALUE_WIDTH = 24
# Kubeflow's operators pass the number of processes in this variable. The plan uses its value, and removes the
# variable from the workers' environment, since torchrun would read it as well.
_PET_NPROC = "PET_NPROC_PER_NODE"
# A larger number of processes on one node can only be a typing error.
_MAX_NPROC = 999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessages:
    """What a start prints besides the plan's values."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines about changes that the workers on this node may notice, such as removed variables."""
    hidden: frozenset[str] = frozenset()
    """Notes and warnings that do not matter here, such as about an unused network. ``-v`` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What must be prepared on this node before the workers start."""

    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Libraries of the host that the workers load: path in the container by the name that programs open."""
    environment: CleanEnvironment = dataclasses.field(default_factory=CleanEnvironment)
    """The harmful settings of the host that are kept away from the workers."""
    cache: CompileCache | None = None
    """The folder of compiled code on this node. With None, the programs choose their own folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command, its variables and the reasons for them on this node."""

    placement: Placement
    max_failures: int
    """Lost nodes and failed workers after which the run still starts a new attempt."""
    mode: Mode
    nproc: int
    """Number of workers on this node."""
    argv: tuple[str, ...]
    """The command, with markers such as `PORT_PENDING`."""
    env: Mapping[str, str]
    """Variables that the workers get on top of those of this process."""
    unset: tuple[str, ...]
    """Variables that are removed from the workers' environment."""
    decisions: tuple[Decision, ...]
    """The values that imgkit or the user has chosen, each with its reason."""
    messages: StartMessages = StartMessages()
    setup: NodeSetup = NodeSetup()
    image_problem: str = ""
    """Why values from the image are taken for the user's. Empty if the image's variables are known."""
    secret: str = ""
    """The source of the roll call's secret, for a dry run. Empty without a secret, and on one node."""

    def announcements(self, *, verbose: bool) -> Iterator[str]:
        """Yield the lines that the head (the node with rank 0) prints at the start.

        With `verbose`, these are all values, notes and warnings. Otherwise, they are the size of the run, the
        notes, and at most `MAX_WARNINGS` lines about warnings.
        """
        messages = self.messages
        if verbose:
            yield self._title()
            yield from messages.notes
            yield from (str(decision) for decision in self.decisions if decision.used)
            yield from messages.warnings
            return
        # `hidden` contains the notes and warnings that only -v shows.
        yield f"{self._title()} (to see why: -v)"
        yield from (text for text in messages.notes if text not in messages.hidden)
        warnings = [text for text in messages.warnings if text not in messages.hidden]
        shown = warnings
        if len(warnings) > MAX_WARNINGS:
            shown = warnings[: MAX_WARNINGS - 1]  # one of the `MAX_WARNINGS` lines counts the other warnings
        yield from (f"warning: {text}" for text in shown)
        if shown != warnings:
            yield f"{len(warnings) - len(shown)} more warnings (to see them: -v)"

    def _title(self) -> str:
        """Return the size of the run, such as ``2 nodes, 4 processes on each, cuda``."""
        processes = "1 process" if self.nproc == 1 else f"{self.nproc} processes"
        if self.mode == "per-node":
            processes = "1 command"
        device = self.env.get("IMGKIT_DEVICE", "")
        if self.placement.nnodes == 1:
            return f"1 node, {processes}, {device}"
        return f"{self.placement.nnodes} nodes, {processes} on each, {device}"

    def lines(self) -> Iterator[str]:
        """Yield the lines of ``--dry-run``: each value with its source, the warnings, and the command."""
        rows = [*self._placement_rows(), *self._decision_rows(), *self._variable_rows()]
        name_width = max(len(row.name) for row in rows)
        # One very long value must not move the sources of all rows to the right.
        value_width = min(_MAX_VALUE_WIDTH, max(len(row.value) for row in rows))
        for row in rows:
            yield f"{row.name:{name_width}}  {row.value:{value_width}}  {row.source}".rstrip()
        yield from (f"note: {text}" for text in self.messages.notes)
        yield from (f"warning: {text}" for text in self.messages.warnings)
        yield f"command: {shlex.join(self.argv)}"

    def _placement_rows(self) -> Iterator[_DryRunRow]:
        """Yield the rows of a dry run about the nodes, and about how the workers start on them."""
        yield _DryRunRow("scheduler", self.placement.scheduler)
        # The text that stands in the column for the source, if the scheduler or the user gave no value.
        defaults = {"nnodes": "this machine alone", "node_rank": "the only node", "port": "from the job id"}
        placement_values = _make_placement_dict(self.placement)
        for name in ("nnodes", "node_rank", "hosts", "head", "port", "job_id"):
            value = ",".join(placement_values["hosts"]) if name == "hosts" else str(placement_values[name])
            # A value without a source is a default.
            source = self.placement.source.get(name) or defaults.get(name, "")
            yield _DryRunRow(name, value or "-", source)
        yield _DryRunRow("max_failures", str(self.max_failures), "failures that the run survives")
        starters = {"torchrun": "torchrun", "direct": self.placement.scheduler, "per-node": "the command"}
        yield _DryRunRow("mode", self.mode, f"{starters[self.mode]} starts the workers")

    def _decision_rows(self) -> Iterator[_DryRunRow]:
        """Yield the rows of a dry run about the secret, and about each value that has a reason.

        If the image's variables are unknown, one more row says so, because its values are then taken for the
        user's.
        """
        if self.secret:
            yield _DryRunRow("secret", self.secret)
        else:
            yield _DryRunRow("secret", "-", "not needed, or none is set")
        # Only a value of the user can be in doubt, since it may also come from the image.
        has_user_values = any(decision.origin == "user" for decision in self.decisions)
        if self.image_problem and has_user_values:
            yield _DryRunRow("image", "unknown", self.image_problem)
        for decision in self.decisions:
            # The reason of an unused value says why imgkit does not set it.
            reason = decision.reason if decision.used else f"not set: {decision.reason}"
            yield _DryRunRow(decision.variable, decision.value or "-", reason)

    def _variable_rows(self) -> Iterator[_DryRunRow]:
        """Yield the rows of a dry run about variables that imgkit sets or removes without giving a reason."""
        decided_names = {decision.variable for decision in self.decisions}
        for name, value in self.env.items():
            if name not in decided_names:
                yield _DryRunRow(name, value, "set by imgkit for the workers")
        for name in self.unset:
            yield _DryRunRow(name, "-", "removed from the workers' environment")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document that ``--dry-run --json`` prints."""
        return {
            "schema": SCHEMA,
            "scheduler": self.placement.scheduler,
            "source": dict(self.placement.source),
            "placement": _make_placement_dict(self.placement),
            "max_failures": self.max_failures,
            "nproc": self.nproc,
            "mode": self.mode,
            "secret": self.secret,
            "image": self.image_problem,
            "argv": list(self.argv),
            "env": dict(self.env),
            "unset": list(self.unset),
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
            "notes": list(self.messages.notes),
            "warnings": list(self.messages.warnings),
        }


class _DryRunRow(NamedTuple):
    """A value of the plan, as a row of ``--dry-run``."""

    name: str
    value: str
    source: str = ""
    """Where the value comes from, such as ``SLURM_NNODES``, or its reason."""


def _make_placement_dict(placement: Placement) -> dict[str, Any]:
    """Return the nodes of the run, as a part of the JSON document of a dry run."""
    return {
        "nnodes": placement.nnodes,
        "size": dataclasses.asdict(placement.size or Size(training=placement.nnodes)),
        "node_rank": placement.node_rank,
        "hosts": list(placement.hosts),
        "head": placement.head,
        # The port of the roll call, in which the nodes agree on torchrun's own port.
        "port": ports.rollcall_port(placement.job_id, placement.port),
        "job_id": placement.job_id,
    }


def decide_launch(
    request: Request,
    worker: Sequence[str],
    *,
    torchrun: str,
    placement: Placement,
    host: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    is_own_program: bool = False,
) -> LaunchPlan:
    """Decide how to start the command `worker` on this node, and return the plan.

    Parameters
    ----------
    worker : argv of one worker. With ``--per-node``, argv of the command that runs once on each node.
    torchrun : name of the Python module that runs torchrun.
    placement : the nodes of the run, and the rank of this node among them.
    host : the facts about this machine.
    system : the facts about the cluster from the image's recipe, or None if the image has none.
    is_own_program : True if `worker` is a program of this package.

    Raises
    ------
    NoPlan : no launch can work. For example, the GPUs in the recipe are not visible, or NCCL cannot use the
        network.
    """
    device = _choose_device(request, host, system, env)
    network = fabric.choose_fabric(host, system, env, nnodes=placement.nnodes, head=placement.head)
    if device.value == "cuda":
        _refuse_blocked_network(network, placement)
    nproc = _choose_nproc(request, device.value, host, placement, env)
    binding = _choose_binding(request, device.value, host, placement, int(nproc.value), env)
    threads = _choose_threads(host, int(nproc.value), binding, system, env)
    variables = _merge_variables(device.value, network, threads, binding)
    mode = _choose_mode(request, placement)
    argv = tuple(worker)
    if mode == "torchrun":
        argv = (*_build_torchrun_argv(torchrun, request, placement, host, nproc.value), *worker)
        variables["IMGKIT_START"] = _choose_start_method(request, device.value, is_own_program=is_own_program)
    elif mode == "direct":
        variables |= _make_rank_variables(placement)
    elif placement.node_rank > 0:  # with --per-node, on every node except the head
        argv += request.worker_args
    own_warnings = _warn_of_unused_nproc(request, placement, nproc.value, env)
    own_warnings += _warn_of_useless_spares(placement)
    # On one node, Gloo uses the loopback interface. Warnings about the cluster's network do not matter then.
    uses_network = device.value == "cuda" or placement.nnodes > 1
    cpus = Decision(cores.VARIABLE, binding.value, binding.reason, used=bool(binding.value))
    own_decisions = (decision for decision in (device, nproc, cpus, threads) if decision and decision.reason)
    return LaunchPlan(
        placement=placement,
        max_failures=_choose_max_failures(request, placement),
        mode=mode,
        nproc=int(nproc.value),
        argv=argv,
        env=variables,
        unset=(*_find_misleading_variables(mode, env), *network.unset),
        decisions=(*own_decisions, *network.decisions),
        setup=NodeSetup(links=network.links),
        image_problem=network.image,
        messages=_make_start_messages(own_warnings, network, uses_network=uses_network),
    )


def _merge_variables(
    device: str, network: fabric.FabricPlan, threads: Decision | None, binding: cores.CpuBinding
) -> dict[str, str]:
    """Return the variables that the workers get in every mode.

    They come from the choices of the network, the number of threads and the processors. `threads` is None if
    `network` already contains that number.
    """
    chosen = dict(network.env)
    # A value that the user has set is in the environment already.
    if threads and threads.origin != "user":
        chosen[threads.variable] = threads.value
    if binding.value:
        chosen[cores.VARIABLE] = binding.value
    # IMGKIT_DECIDED tells dist-doctor which variables imgkit has chosen, and not the user.
    return {"IMGKIT_DEVICE": device, "IMGKIT_DECIDED": ",".join(sorted(chosen)), **chosen}


def _find_misleading_variables(mode: Mode, env: Mapping[str, str]) -> list[str]:
    """Return the variables in `env` that would mislead the command, so that they are removed for it."""
    # torchrun takes the defaults of its flags from PET_*. Kubernetes operators set some with values on which
    # torchrun fails, such as PET_STANDALONE="".
    names = sorted(name for name in env if name.startswith("PET_"))
    if mode == "per-node":
        names += [name for name in per_node.RANK_VARIABLES if name in env]
    return names


def _make_start_messages(
    own_warnings: Sequence[str], network: fabric.FabricPlan, *, uses_network: bool
) -> StartMessages:
    """Return the warnings of the start: `own_warnings`, and then those about the network.

    The warnings about the network are hidden if the run does not use it.
    """
    network_warnings = tuple(str(finding) for finding in network.warnings)
    return StartMessages(
        warnings=(*own_warnings, *network_warnings),
        hidden=frozenset(() if uses_network else network_warnings),
    )


def _choose_mode(request: Request, placement: Placement) -> Mode:
    """Return what starts the workers. If the launcher has already started every rank, there is no choice."""
    if placement.direct is not None:
        return "direct"
    return "per-node" if request.is_per_node else "torchrun"


def _choose_start_method(request: Request, device: str, *, is_own_program: bool) -> str:
    """Return how torchrun starts the workers (apps/torchrun.py): ``fork`` or ``exec``.

    If the user has not chosen, use ``fork`` only for programs of imgkit on CPUs. Forks were not tested with
    CUDA, and a user's program may not work in a forked process.
    """
    if request.start != "auto":
        return request.start
    return "fork" if is_own_program and device == "cpu" else "exec"


def _refuse_blocked_network(network: fabric.FabricPlan, placement: Placement) -> None:
    """Raise NoPlan if NCCL cannot work with the network of this node.

    Without this error, the run would hang, or fail later with an obscure message.
    """
    problems = list(network.refusals)
    if placement.nnodes > 1:  # on one node, NCCL does not use the network
        problems += network.blockers
    if problems:
        raise NoPlan(
            problems[0].what,
            where=f"fabric {network.kind}",
            hint=f"{problems[0].fix}; --device cpu runs over gloo",
        )


def _choose_binding(
    request: Request, device: str, host: HostFacts, placement: Placement, nproc: int, env: Mapping[str, str]
) -> cores.CpuBinding:
    """Choose the processors on which each worker may run, which are those close to its GPU.

    Workers are not bound if they have no GPU of their own, or if torchrun does not start them. A result
    without a reason is not shown in a dry run.
    """
    if not request.binds_cpus:
        return cores.CpuBinding(reason="--no-cpu-binding")
    if device != "cuda" or request.is_per_node or placement.direct:
        return cores.CpuBinding()
    return cores.choose_binding(host, nproc, env)


def _choose_max_failures(request: Request, placement: Placement) -> int:
    """Return the number of failures after which the run still starts a new attempt.

    The result is 0 if the launcher has started the ranks itself, since no node agent could start them again.
    Without a number from the user, it is `DEFAULT_FAILURES` in a run with spares (``--nnodes N+S``), which
    replace lost nodes, and otherwise 0.
    """
    if placement.direct is not None:  # the launcher has started the ranks
        return 0
    if request.max_failures is not None:
        return request.max_failures
    has_spares = placement.size is not None
    return DEFAULT_FAILURES if has_spares else 0


def _warn_of_useless_spares(placement: Placement) -> tuple[str, ...]:
    """Return a warning if the run has spares that cannot replace lost nodes. Otherwise return ().

    There are two cases. If the launcher has started the ranks without torchrun, all ranks take part. The
    launchers in `ENDED_TOGETHER` end the whole job when a node is lost.
    """
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


def _choose_device(
    request: Request, host: HostFacts, system: SystemFacts | None, env: Mapping[str, str]
) -> Decision:
    """Choose the device of the workers, ``cuda`` or ``cpu``.

    Raises
    ------
    NoPlan : no GPU is visible although the user, the image or the job asks for one, or the GPUs are AMD's.
    """
    if request.device == "cpu":
        return Decision(variable="device", value="cpu", reason="")
    _refuse_amd(host)  # before the number of GPUs is read, since an AMD image must not fall back to the CPU
    if host.gpus:
        return Decision(variable="device", value="cuda", reason=f"{host.gpus} GPUs: {host.gpus_source}")
    expected, source = _find_expected_gpus(system, env)
    # Without these errors, a forgotten --nv would silently start the ranks on the CPU.
    if expected:
        raise _make_no_gpu_error(host, str(expected), f"{source} says {expected} per node")
    if request.device == "cuda":
        raise _make_no_gpu_error(host, "N", "--device cuda asks for one")
    return Decision(variable="device", value="cpu", reason="no GPU is visible, and none is expected")


def _make_no_gpu_error(host: HostFacts, number: str, reason: str) -> NoPlan:
    """Return the error about a node on which a GPU is needed, but none is visible.

    Parameters
    ----------
    number : number of GPUs to request from the scheduler, or ``N`` if it is unknown.
    reason : why the run needs a GPU.
    """
    remedy = f"request GPUs from the scheduler (Slurm: --gres=gpu:{number})"
    if ONLY_NVIDIA in host.gpus_source:
        hint = f"{remedy} on nodes with NVIDIA GPUs; a container with --rocm does not help"
    else:
        hint = f"start the container with --nv (docker: --gpus=all), and {remedy}"
    return NoPlan(
        f"no GPU is visible here, but {reason} ({host.gpus_source})",
        hint=f"{hint}; to run on the CPU anyway: --device cpu",
    )


def _refuse_amd(host: HostFacts) -> None:
    """Raise NoPlan if the image or the node is for AMD GPUs, which imgkit does not support.

    Without this error, the run would silently use the CPU.
    """
    # `host.rocm` is evidence of an AMD image, and `host.amd_gpus` of AMD GPUs on the node.
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


def _find_expected_gpus(system: SystemFacts | None, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of GPUs that this node must have, and the source of the number.

    The image's recipe (`system`) takes precedence over the job's variables, such as those of Slurm, in `env`.
    If neither gives a number, return ``(0, "")``. The caller raises an error if a number is given and no GPU
    is visible.
    """
    if system is not None and system.node.gpus:
        source = str(SYSTEM_JSON)
        if system.node.gpu_model:
            source += f" ({system.node.gpu_model})"
        return system.node.gpus, source
    for name in _GPU_VARIABLES:
        gpu_count = env.get(name)
        if gpu_count:  # a value that is not a number is ignored, as if no GPU were expected
            return parse_digits(gpu_count) or 0, name
    return 0, ""


def _choose_nproc(
    request: Request, device: str, host: HostFacts, placement: Placement, env: Mapping[str, str]
) -> Decision:
    """Choose the number of workers on this node: the user's number, or else one for each GPU.

    Raises
    ------
    NoPlan : several workers would share a GPU, or the number from a Kubernetes operator cannot be read.
    """
    # The order is the precedence. `direct` is set if the launcher has started every rank itself, without
    # torchrun. The number of workers can then no longer be changed.
    if placement.direct is not None:
        worker_count, reason = placement.direct.local_world_size, f"{placement.scheduler} started them"
    elif request.nproc != "auto":
        worker_count, reason = int(request.nproc), "--nproc"
    elif env.get(_PET_NPROC):
        worker_count, reason = _read_operators_nproc(env[_PET_NPROC], host)
    elif device == "cuda":
        worker_count, reason = host.gpus, "one per GPU"
    else:
        worker_count, reason = 1, "no GPU: one; --nproc N starts more"
    if device == "cuda" and worker_count > host.gpus:
        raise NoPlan(
            f"{worker_count} processes with {host.gpus} visible GPUs would put several ranks on one GPU",
            where=host.gpus_source,
            hint=f"give --nproc {host.gpus} or less, or --device cpu",
        )
    return Decision(variable="nproc", value=str(worker_count), reason=reason)


def _read_operators_nproc(text: str, host: HostFacts) -> tuple[int, str]:
    """Return the number of processes (workers) that a Kubernetes operator requests, and its source.

    `text` is the value of `_PET_NPROC`. As for torchrun's ``--nproc-per-node``, it is a number, ``auto``,
    ``gpu`` or ``cpu``.

    Raises
    ------
    NoPlan : `text` is none of these values, or stands for no process at all.
    """
    # As in torchrun, "auto" means one process per GPU, or one per processor on a node without GPUs. The order
    # of the two conditions matters: on a node with GPUs, the first one must catch "auto".
    if text in ("auto", "gpu") and host.gpus:
        return host.gpus, f"{_PET_NPROC}={text}: one per GPU"
    if text in ("auto", "cpu"):
        return host.cpus, f"{_PET_NPROC}={text}: one per processor allowed"
    worker_count = parse_digits(text)
    if worker_count and worker_count <= _MAX_NPROC:
        return worker_count, _PET_NPROC
    reason = f" ({host.gpus_source})" if text == "gpu" else ""
    raise NoPlan(
        f"{text[:200]!r} is not a number of processes on this node{reason}",
        where=_PET_NPROC,
        hint="a number from 1, auto, cpu, or gpu where GPUs are visible; or give --nproc N",
    )


def _warn_of_unused_nproc(
    request: Request, placement: Placement, nproc: str, env: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a warning if the run does not use the number of processes that a Kubernetes operator requests.

    Otherwise return (). The operator requests the number in the variable `_PET_NPROC`. `nproc` is the number
    of processes (workers) that start on this node.
    """
    requested = env.get(_PET_NPROC, "")
    if requested in ("", "auto", nproc):
        return ()
    if placement.direct is not None:
        reason = f"{placement.scheduler} started them"
    elif request.nproc != "auto":
        reason = "--nproc takes precedence"
    else:
        return ()
    return (f"{_PET_NPROC}={requested[:200]} is not used: {reason}, {nproc} on this node",)


def _choose_threads(
    host: HostFacts,
    nproc: int,
    binding: cores.CpuBinding,
    system: SystemFacts | None,
    env: Mapping[str, str],
) -> Decision | None:
    """Choose OMP_NUM_THREADS, which is the number of CPU threads that each worker uses.

    It is the user's value, or else the processors of this node divided by the number of workers. Return None
    if the image's recipe sets the variable: `fabric.choose_fabric` then includes it in the plan's variables.

    Parameters
    ----------
    nproc : number of workers on this node.
    binding : the processors to which each worker is bound. Its `value` is empty if workers are not bound.
    system : what the image's recipe says, or None if there is no recipe.
    """
    name = "OMP_NUM_THREADS"
    current_value = env.get(name)
    # `env` contains the variables of the image as well. A value that equals the image's is not the user's.
    image_value = (host.image_env or {}).get(name)
    recipe_value = system.env.get(name) if system else None
    # The recipe sets the variable, and nobody has overridden it.
    if recipe_value is not None and current_value in (None, image_value, recipe_value):
        return None
    # PBS sets the variable to the number of processors of the chunk, and mpiexec passes it on. The user has
    # not chosen this value. With it, each of the nproc workers would start a thread for every processor of
    # the chunk.
    is_from_pbs = bool(env.get("PBS_JOBID")) and current_value in (env.get("NCPUS"), str(host.cpus))
    if current_value and not is_from_pbs and current_value != image_value:
        return Decision(variable=name, value=current_value, reason="set by the user", origin="user")
    cpus = host.cpus // nproc
    reason = f"{host.cpus} processors allowed / {nproc} processes"
    if binding.value and binding.cpus_per_worker < cpus:
        cpus = binding.cpus_per_worker
        reason = f"a worker has {cpus} processors beside its GPU"
    if current_value and current_value == image_value:
        reason += f"; replaces the image's {image_value!r}"
    return Decision(variable=name, value=str(max(1, cpus)), reason=reason)


def _make_rank_variables(placement: Placement) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker, such as RANK.

    They are for a worker that the launcher has started itself, without torchrun.
    """
    assert placement.direct is not None  # noqa: S101 - the caller branches on it
    return {
        "RANK": str(placement.direct.rank),
        "LOCAL_RANK": str(placement.direct.local_rank),
        "WORLD_SIZE": str(placement.direct.world_size),
        "LOCAL_WORLD_SIZE": str(placement.direct.local_world_size),
        "MASTER_ADDR": placement.head or "127.0.0.1",
        "MASTER_PORT": str(placement.base_port),
    }


def _build_torchrun_argv(
    module: str, request: Request, placement: Placement, host: HostFacts, nproc: str
) -> tuple[str, ...]:
    """Return the argv of torchrun up to the worker's argv, which the caller appends.

    Values that are known only once an attempt (a start of the workers on all nodes) begins are markers, such
    as `PORT_PENDING`. `fill_markers` replaces them.

    Parameters
    ----------
    module : the Python module that runs torchrun.
    nproc : number of workers on this node.
    """
    # On one node, use the loopback address. A container without a network cannot resolve the host's name, and
    # torchrun would hang for ten minutes.
    head = placement.head if placement.nnodes > 1 else "127.0.0.1"
    nnodes, node_rank = str(placement.nnodes), str(placement.node_rank)
    # `size` is set in a run with spares, which are nodes that replace lost ones. There, the number of nodes
    # and the rank of this node may change from attempt to attempt.
    if placement.size and placement.nnodes > 1:
        nnodes, node_rank = NNODES_PENDING, NODE_RANK_PENDING
    options = {
        # Always use the static rendezvous. The alternative is c10d, which --standalone uses as well. It
        # ignores the node rank. It also unpickles a value from a store that listens on all addresses and
        # lists its keys, so that anyone in the network could run code as this user.
        "--rdzv-backend": "static",
        "--nnodes": nnodes,
        "--node-rank": node_rank,
        "--master-addr": head,
        "--master-port": PORT_PENDING,
        "--nproc-per-node": nproc,
        "--max-restarts": "0",  # the node agents start the workers again, on all nodes together
        "--monitor-interval": "0.1",  # seconds; torch 2.3 checks its workers only every 5 s by default
    }
    if is_torch_since(host.torch_version, _SHUTDOWN_SINCE):
        options["--shutdown-timeout"] = "3"
    options["--tee"] = "3" if request.prefix else "0"  # 3: both standard output and standard error
    options["--log-dir"] = _choose_torchrun_log_folder(request, placement, host)
    # With -I and --no-python, neither torchrun nor imgkit's programs import modules from the current folder
    # or from PYTHONPATH. Without -u, torchrun would hold the workers' lines back until its end if stdout is a
    # file.
    argv = [sys.executable or "python3", "-I", "-u", "-m", module]
    for option, value in options.items():
        argv += [option, value]
    # Without "--", torchrun would read a program's --max as a short form of --max-restarts.
    return (*argv, "--no-python", "--")


def _choose_torchrun_log_folder(request: Request, placement: Placement, host: HostFacts) -> str:
    """Return the folder for the output of each process, or the marker `LOGS_PENDING` if the user names none.

    `fill_markers` later replaces the marker with a folder inside the node's stop folder.
    """
    if not request.log_dir:
        return LOGS_PENDING
    # Each node has its own folder, since torchrun's paths name no host and nodes may share a file system.
    node_folder = PurePath(request.log_dir, host_label(host.hostname))
    # Every attempt writes files of the same names, so each one needs its own folder.
    if _choose_max_failures(request, placement):
        return str(node_folder / ATTEMPT_PENDING)
    return str(node_folder)


def is_torch_since(version: str, first: tuple[int, int]) -> bool:
    """Return whether a version such as ``2.12.0a0+git`` is at least the version `first`, such as ``(2, 12)``.

    Return False for an unknown version.
    """
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    return match is not None and (int(match[1]), int(match[2])) >= first


def host_label(host: str) -> str:
    """Return a host name in a form that can be part of a path.

    Characters other than letters, digits, ``.``, ``_`` and ``-`` become ``_``.
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "node"


PORT_PENDING = "<port from the roll call>"
"""Marker for torchrun's port. The head chooses a free one during the roll call."""
NNODES_PENDING = "<number of nodes of this attempt>"
"""Marker for the number of nodes that train, in a run with spares."""
NODE_RANK_PENDING = "<node rank of this attempt>"
"""Marker for this node's rank among the nodes that train."""
ATTEMPT_PENDING = "<attempt>"
"""Marker for ``attempt1``, ``attempt2`` and so on. It may be a part of a path."""
LOGS_PENDING = "<log folder of this run>"
"""Marker for a folder of logs that the node agent removes after the run. torchrun never removes its logs."""


def fill_markers(argv: Sequence[str], order: AttemptStart, node_rank: int, stop_folder: Path) -> list[str]:
    """Return `argv` with the values of an attempt in place of markers such as `PORT_PENDING`.

    The values are known only once the head orders the start of the attempt. `order` is that message.
    """
    attempt = f"attempt{order.attempt}"
    marker_values = {
        PORT_PENDING: str(order.port),
        NNODES_PENDING: str(order.nnodes),
        NODE_RANK_PENDING: str(node_rank),
        LOGS_PENDING: str(stop_folder / "logs" / attempt),
    }
    return [marker_values.get(arg, arg).replace(ATTEMPT_PENDING, attempt) for arg in argv]
