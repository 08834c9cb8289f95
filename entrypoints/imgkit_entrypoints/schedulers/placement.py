"""Which node of its job this process is on, the request that shapes it, and variables with their errors."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist

Read = Callable[[str], "str | None"]
"""Function from an absolute path to the file's content; None where it cannot be read."""

FIRST_PORT = 15000
PORTS = 16000

NODES = "IMGKIT_NODES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """One rank: the launcher started every rank of the node itself, and torchrun has nothing to do."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Nodes that a run uses and keeps in reserve: the value of ``--nnodes``."""

    training: int
    """Nodes that train."""
    spares: int = 0
    """Further nodes, which wait for the loss of one."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """Return the size that ``N`` or ``N+S`` means.

        Raises
        ------
        ValueError : it is neither; `size_examples` has what to type instead.
        """
        match = re.fullmatch(r"([0-9]{1,7})(?:\+([0-9]{1,7}))?", text.strip(), re.ASCII)
        if match is None and _RANGE.fullmatch(text.strip()):
            raise ValueError(f"{text!r} is a range, but a run has a fixed number of nodes")
        if match is None:
            raise ValueError(f"{text!r} is neither N nor N+S")
        training, spares = int(match[1]), int(match[2] or 0)
        if training < 1:
            raise ValueError(f"{text!r} asks for {training} nodes; at least 1 must train")
        return cls(training=training, spares=spares)

    def __str__(self) -> str:
        return f"{self.training}+{self.spares}" if self.spares else str(self.training)

    @property
    def started(self) -> int:
        """Nodes on which the command is started."""
        return self.training + self.spares


_RANGE = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)
"""``MIN:MAX``, as torchrun and some schedulers accept it."""


def size_examples(text: str, option: str) -> str:
    """Return what to type instead of `text`, which `Size.parse` refuses: ``--nnodes 4, or --nnodes 4+1``.

    Parameters
    ----------
    option : the option or variable with the text between it and its value.
    """
    ends = _RANGE.fullmatch(text.strip())
    nodes = max(1, *map(int, ends.groups())) if ends else 4
    return f"{option}{nodes}, or {option}{nodes}+1 with one spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One node of a job. It counts nodes, never processes; only `direct` counts ranks."""

    scheduler: str
    """Module that placed the process: slurm, pbs, pals, openmpi, hydra, kubeflow, manual or standalone."""
    nnodes: int
    node_rank: int
    hosts: tuple[str, ...] = ()
    """Hosts in the order of the node ranks; empty where the launcher does not give them."""
    head: str = ""
    """Name or address of node 0 that the others can reach; empty on one node."""
    port: int | None = None
    """Port that the scheduler or the user gave; None leaves it to `job_port`."""
    job_id: str = ""
    """A text that is equal on all nodes and differs between starts; empty where the launcher has none."""
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field -> the variables or the flag that it came from."""
    direct: Direct | None = None
    size: Size | None = None
    """The size with its spares; None: all `nnodes` train."""

    def numbered(self, nnodes: int, node_rank: int) -> Placement:
        """Return this node's position in a run that `nnodes` nodes have started, numbered by the head."""
        if (nnodes, node_rank) == (self.nnodes, self.node_rank):
            return self
        return dataclasses.replace(self, nnodes=nnodes, node_rank=node_rank, hosts=())

    @property
    def base_port(self) -> int:
        """The given port, else the port computed from the job id: all nodes agree without a message."""
        return job_port(self.job_id) if self.port is None else self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The request of flags and ``IMGKIT_*`` variables; None leaves a field to the scheduler."""

    scheduler: str | None = None
    size: Size | None = None
    node_rank: int | None = None
    head: str | None = None
    port: int | None = None
    direct: bool | None = None
    command: tuple[str, ...] = ("dist-run",)
    """Words of this command, for the errors that show how to start it."""

    @property
    def nnodes(self) -> int | None:
        """Nodes on which this command is started, spares included."""
        return self.size.started if self.size else None


class WrongStart(NoPlan):
    """The allocation has several nodes, but only this one process was started on them.

    Parameters
    ----------
    nnodes : nodes of the allocation.
    """

    def __init__(self, problem: str, *, where: str, nnodes: int) -> None:
        super().__init__(problem, where=where)
        self.nnodes = nnodes


def job_port(job_id: str) -> int:
    """Return a port from 15000 to 30999 that is equal wherever it is computed for the same job.

    From 32768 on, Linux hands out ports for outgoing connections, so such a port is sometimes taken. crc32 is
    used because Python's own hash of a text differs between processes.
    """
    return FIRST_PORT + zlib.crc32(job_id.encode()) % PORTS


def present(env: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Return those of `names` that are set and not empty: operators set unused ones to the empty string."""
    return tuple(name for name in names if env.get(name))


def first(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first of `names` that is set and not empty; empty if none is."""
    return next((name for name in names if env.get(name)), "")


def variable(env: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first of `names` that is set; if none is, the first of all, for an error message."""
    return first(env, names) or names[0]


def number(env: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """Return the whole number in variable `name`.

    Raises
    ------
    NoPlan : the variable is not set, not a whole number, or below `least`.
    """
    text = env.get(name, "").strip()
    if not text:
        raise NoPlan(f"{name} is not set", where=name, hint="start the container without --cleanenv")
    value = digits(text) if len(text) < 10 else None
    if value is None or value < least:
        raise NoPlan(f"{text!r} is not a whole number of at least {least}", where=name)
    return value


def size_in(env: Mapping[str, str], name: str) -> Size | None:
    """Return the size of a run in variable `name`; None where it is not set.

    Raises
    ------
    NoPlan : the text is no size.
    """
    text = env.get(name, "")
    try:
        return Size.parse(text) if text.strip() else None
    except ValueError as error:
        raise NoPlan(str(error), where=name, hint=size_examples(text, f"{name}=")) from None


def port_in(env: Mapping[str, str], name: str) -> int | None:
    """Return the port in variable `name`; None where it is not set.

    Raises
    ------
    NoPlan : the text is not a number from 1 to 65535.
    """
    if not env.get(name):
        return None
    port = number(env, name, least=1)
    if port > 65535:
        raise NoPlan(f"{port} is not a port number from 1 to 65535", where=name)
    return port


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return each name once, in the order of first appearance."""
    return tuple(dict.fromkeys(names))


def short(name: str) -> str:
    """Return a host name without its domain; addresses stay complete."""
    return name if name.replace(".", "").isdigit() or ":" in name else name.split(".", 1)[0]


def hostname(read: Read) -> str:
    """Return the name of this machine; empty where /proc does not show it."""
    return (read("/proc/sys/kernel/hostname") or "").strip()


def position_in(hosts: Sequence[str], read: Read) -> int | None:
    """Return the index of this machine in `hosts`; None if it is not there exactly once."""
    name = short(hostname(read))
    positions = [index for index, host in enumerate(hosts) if name and short(host) == name]
    return positions[0] if len(positions) == 1 else None


def requested_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of IMGKIT_NODES in their order, each once; empty if it is not set.

    A list with brackets is read as Slurm's compact form. Repeats are dropped: a PBS node file has a line for
    each process of a host.
    """
    text = env.get(NODES, "")
    if "[" in text or "]" in text:
        return unique(expand_nodelist(text, where=NODES))
    return unique(text.replace(",", " ").split())


def listed_hosts(env: Mapping[str, str], read: Read) -> tuple[tuple[str, ...], str]:
    """Return the hosts of IMGKIT_NODES, else of PBS' node file, and the variable; empty without both."""
    if hosts := requested_nodes(env):
        return hosts, NODES
    # Most containers do not show the file.
    text = read(env["PBS_NODEFILE"]) if env.get("PBS_NODEFILE") else None
    hosts = unique((text or "").split())
    return hosts, "PBS_NODEFILE" if hosts else ""


def named_hosts(
    env: Mapping[str, str], nnodes: int, hosts: tuple[str, ...], hosts_from: str
) -> tuple[tuple[str, ...], str]:
    """Return hosts and where they come from: IMGKIT_NODES wins over `hosts` of the launcher.

    On clusters where each node has a second name on the fast network, IMGKIT_NODES holds those names.

    Raises
    ------
    NoPlan : IMGKIT_NODES has another number of hosts than the launcher started.
    """
    requested = requested_nodes(env)
    if not requested or nnodes == 1:
        return hosts, hosts_from
    if len(requested) != nnodes:
        raise NoPlan(
            f"{NODES} has {len(requested)} hosts ({', '.join(requested[:8])}), but the launcher started "
            f"{nnodes}",
            where=NODES,
            hint=f"leave {NODES} out, or list the {nnodes} hosts in the order of their ranks",
        )
    return requested, NODES


def head_of(
    env: Mapping[str, str], nnodes: int, hosts: tuple[str, ...], hosts_from: str, *variables: str
) -> tuple[str, str]:
    """Return the address of node 0 and where it comes from.

    That is IMGKIT_HEAD, the first host, or one of `variables`. Both are empty where none of them is known,
    and on one node.
    """
    if nnodes == 1:
        return "", ""
    if env.get("IMGKIT_HEAD"):
        return env["IMGKIT_HEAD"], "IMGKIT_HEAD"
    if hosts:
        return hosts[0], hosts_from
    name = first(env, variables)
    return env.get(name, ""), name
