"""Which node of its job this process is on, and the request that shapes it."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan

# Linux takes the ports from 32768 on for outgoing connections. Ray takes 10002 to 19999 for its workers, and
# refuses one of them as the port of its head.
FIRST_PORT = 20000
PORTS = 11000


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
    direct: bool = False
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
