"""The placement of this process: which node of its job it runs on. Also the request of the user for it."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan

# The range of computed ports: 20000 to 30999. Linux takes the ports from 32768 on for outgoing connections.
# Ray takes 10002 to 19999 for its workers, and refuses one of them as the port of its head.
FIRST_PORT = 20000
PORTS = 11000


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """The rank of this process, if the launcher has started every rank itself and torchrun is not used."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of nodes that a run uses and keeps in reserve: the value of ``--nnodes``."""

    training: int
    """Number of nodes that train."""
    spares: int = 0
    """Number of further nodes, which wait until a node is lost."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """Return the size that `text` means: ``4`` is four nodes, and ``4+1`` is four nodes and a spare.

        A spare is a node that waits until it can replace a lost one.

        Raises
        ------
        ValueError : the text is neither ``N`` nor ``N+S``. `size_examples` returns what to type instead.
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
        """Return the number of nodes on which the command is started, spares included."""
        return self.training + self.spares


# "MIN:MAX" nodes, which torchrun and some schedulers accept.
_RANGE = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)


def size_examples(text: str, option: str) -> str:
    """Return what to type instead of a text that `Size.parse` refuses, for a hint.

    For the range ``2:4``, it is ``--nnodes 4, or --nnodes 4+1 with one spare``.

    Parameters
    ----------
    option : what precedes the value: ``"--nnodes "``, or the variable with an equals sign.
    """
    ends = _RANGE.fullmatch(text.strip())
    nodes = max(1, *map(int, ends.groups())) if ends else 4
    return f"{option}{nodes}, or {option}{nodes}+1 with one spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of a job on which this process runs. It counts nodes, and only `direct` counts ranks."""

    scheduler: str
    """Launcher that placed the process: slurm, pbs, pals, openmpi, hydra, kubeflow, manual or standalone."""
    nnodes: int
    node_rank: int
    hosts: tuple[str, ...] = ()
    """Hosts in the order of the node ranks. Empty if the launcher does not give them."""
    head: str = ""
    """Name or address by which the other nodes reach node 0. Empty on one node."""
    port: int | None = None
    """Port that the scheduler or the user gave. With None, it is computed by `job_port`."""
    job_id: str = ""
    """A text that is equal on all nodes and differs between starts. Empty if the launcher has none."""
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables or the flag from which a field comes, by the field's name."""
    direct: Direct | None = None
    """The rank of this process in direct mode. None if torchrun starts the workers."""
    size: Size | None = None
    """The size of a run with spares. None if all `nnodes` train."""

    def numbered(self, nnodes: int, node_rank: int) -> Placement:
        """Return this placement with the numbers that the head has given in the roll call.

        If they differ from the launcher's, the hosts are dropped, since their order does not apply any more.
        """
        if (nnodes, node_rank) == (self.nnodes, self.node_rank):
            return self
        return dataclasses.replace(self, nnodes=nnodes, node_rank=node_rank, hosts=())

    @property
    def base_port(self) -> int:
        """Return the given port, or else the one computed from the job id. All nodes have the same one."""
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
        """Return whether the flags say which node of several this is, so that no launcher has to."""
        has_rank = self.head is not None and self.node_rank is not None
        return has_rank and (self.nnodes or 1) > 1


class WrongStart(NoPlan):
    """The error for an allocation of several nodes on which only this one process was started.

    Parameters
    ----------
    nnodes : number of nodes of the allocation.
    """

    def __init__(self, problem: str, *, where: str, nnodes: int) -> None:
        super().__init__(problem, where=where)
        self.nnodes = nnodes


def job_port(job_id: str) -> int:
    """Return a port from 20000 to 30999, which is the same on all nodes of a job.

    crc32 is used because Python's own hash of a text differs between processes.
    """
    return FIRST_PORT + zlib.crc32(job_id.encode()) % PORTS
