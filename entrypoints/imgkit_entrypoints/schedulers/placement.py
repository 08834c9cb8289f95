"""The placement of this process (the node of its job on which it runs), and the user's request for it."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan

# Computed ports are from 20000 to 30999. Linux uses ports from 32768 on for outgoing connections. Ray uses
# 10002 to 19999 for its workers, and refuses these ports for its head.
FIRST_PORT = 20000
PORTS = 11000


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """The rank of this process in direct mode, in which the launcher starts every rank without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of nodes that a run trains on and keeps in reserve, which is the value of ``--nnodes``."""

    training: int
    """Number of nodes that train."""
    spares: int = 0
    """Number of spare nodes, each of which waits until it can replace a lost node."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """Return the size in `text`: ``4`` means four nodes, and ``4+1`` means four nodes and a spare.

        A spare is a node that waits until it can replace a lost node.

        Raises
        ------
        ValueError : the text is neither ``N`` nor ``N+S``. `size_examples` returns what the user can type
            instead.
        """
        if _RANGE.fullmatch(text.strip()):
            raise ValueError(f"{text!r} is a range, but a run has a fixed number of nodes")
        match = re.fullmatch(r"([0-9]{1,7})(?:\+([0-9]{1,7}))?", text.strip(), re.ASCII)
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
        """Return the number of nodes on which the command is started, including spares."""
        return self.training + self.spares


# "MIN:MAX" nodes, which torchrun and some schedulers accept.
_RANGE = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)


def size_examples(text: str, option: str) -> str:
    """Return what the user can type instead of a text that `Size.parse` refuses, for a hint.

    For the range ``2:4``, it is ``--nnodes 4, or --nnodes 4+1 with one spare``.

    Parameters
    ----------
    option : the text before the value: ``"--nnodes "``, or the name of the variable with an equals sign.
    """
    ends = _RANGE.fullmatch(text.strip())
    nodes = max(1, *map(int, ends.groups())) if ends else 4
    return f"{option}{nodes}, or {option}{nodes}+1 with one spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of a job on which this process runs. All numbers are about nodes, except those in `direct`."""

    scheduler: str
    """Launcher that placed the process: slurm, pbs, pals, openmpi, hydra, kubeflow, manual or standalone."""
    nnodes: int
    node_rank: int
    hosts: tuple[str, ...] = ()
    """Hosts in the order of the node ranks. Empty if they are unknown."""
    head: str = ""
    """Name or address by which the other nodes reach node 0. Empty in a run on one node."""
    port: int | None = None
    """Port that the scheduler or the user has set. With None, `job_port` computes the port."""
    job_id: str = ""
    """A text that is the same on all nodes and differs between starts. Empty if the launcher has none."""
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables or the flag that a field was read from, by the name of the field."""
    direct: Direct | None = None
    """The rank of this process in direct mode. None if torchrun starts the workers."""
    size: Size | None = None
    """The size of a run with spares. None if all `nnodes` train."""

    def numbered(self, nnodes: int, node_rank: int) -> Placement:
        """Return this placement with the numbers that the head has assigned in the roll call.

        In the roll call, all nodes meet. If the numbers differ from the launcher's, the hosts are dropped,
        because their order no longer corresponds to the ranks.
        """
        if (nnodes, node_rank) == (self.nnodes, self.node_rank):
            return self
        return dataclasses.replace(self, nnodes=nnodes, node_rank=node_rank, hosts=())

    @property
    def base_port(self) -> int:
        """Return `port`, or else a port that is computed from the job id. It is the same on all nodes."""
        return job_port(self.job_id) if self.port is None else self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The placement that flags and ``IMGKIT_*`` variables request. None leaves a field to the scheduler."""

    scheduler: str | None = None
    size: Size | None = None
    node_rank: int | None = None
    head: str | None = None
    port: int | None = None
    direct: bool = False
    """True if this process is a rank itself (``--direct``)."""
    command: tuple[str, ...] = ("dist-run",)
    """Argv of this command, for errors that show how to start it."""

    @property
    def nnodes(self) -> int | None:
        """Return the number of nodes on which this command is started, spares included, if requested."""
        return self.size.started if self.size else None

    @property
    def describes_node(self) -> bool:
        """Return whether the flags fully describe this node of several, so that no launcher is needed."""
        has_rank = self.head is not None and self.node_rank is not None
        return has_rank and (self.nnodes or 1) > 1


class WrongStart(NoPlan):
    """The error for a job of several nodes in which only this process was started.

    Parameters
    ----------
    nnodes : number of nodes of the job.
    """

    def __init__(self, problem: str, *, where: str, nnodes: int) -> None:
        super().__init__(problem, where=where)
        self.nnodes = nnodes


def job_port(job_id: str) -> int:
    """Return a port from 20000 to 30999, which is the same on all nodes of a job.

    crc32 is used because Python's own hash of a text differs between processes.
    """
    return FIRST_PORT + zlib.crc32(job_id.encode()) % PORTS
