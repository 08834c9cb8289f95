"""The place of this process among the nodes of its job, as one value, and the request that shapes it."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan

Read = Callable[[str], "str | None"]
"""Function from an absolute path to the file's content; None where it cannot be read."""

FIRST_PORT = 15000
PORTS = 16000


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """One rank: the launcher started every rank of the node itself, and torchrun has nothing to do."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Nodes that a run needs, takes and keeps in reserve: the value of ``--nnodes``."""

    least: int
    """Fewest nodes that may train."""
    most: int
    """Most nodes that train at a time."""
    spares: int = 0
    """Further nodes, which wait for the loss of one."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """Return the size that ``N``, ``MIN:MAX`` or ``N+S`` means.

        Raises
        ------
        ValueError : it is none of them.
        """
        found = re.fullmatch(r"([0-9]{1,7})(?:([:+])([0-9]{1,7}))?", text.strip(), re.ASCII)
        if found is None:
            raise ValueError(f"{text!r} is none of N, MIN:MAX and N+S")
        first, sign, last = int(found[1]), found[2], int(found[3] or 0)
        if first < 1:
            raise ValueError(f"{text!r} asks for {first} nodes; at least 1 must train")
        if sign == ":" and last < first:
            raise ValueError(f"{text!r} is not a range MIN:MAX, since MIN is the larger one")
        return cls(least=first, most=last if sign == ":" else first, spares=last if sign == "+" else 0)

    def __str__(self) -> str:
        if self.spares:
            return f"{self.most}+{self.spares}"
        return f"{self.least}:{self.most}" if self.least < self.most else str(self.most)

    @property
    def started(self) -> int:
        """Nodes on which the command is started."""
        return self.most + self.spares

    @property
    def fixed(self) -> bool:
        """Whether it is a plain number of nodes."""
        return self.least == self.most and not self.spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One node of a job. It counts nodes, never processes; only `direct` counts ranks."""

    scheduler: str
    """Module that placed the process: slurm, pbs, pals, openmpi, hydra, kubeflow, manual or standalone."""
    nnodes: int
    node_rank: int
    hosts: tuple[str, ...]
    """Hosts in the order of the node ranks; empty where the launcher does not give them."""
    head: str
    """Name or address of node 0 that the others can reach; empty on one node."""
    port: int | None
    """Port that the scheduler or the user gave; None leaves it to `job_port`."""
    job_id: str
    """A text that is equal on all nodes and differs between starts; empty where the launcher has none."""
    source: Mapping[str, str]
    """Field -> the variables or the flag that it came from."""
    direct: Direct | None = None
    size: Size | None = None
    """The size that was asked for, as a range or with spares; None: all `nnodes` train."""

    def numbered(self, nnodes: int, node_rank: int) -> Placement:
        """Return this node's place in a run that `nnodes` nodes have started, numbered by the head."""
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

    def __init__(self, what: str, *, where: str, nnodes: int, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.nnodes = nnodes


def job_port(job_id: str) -> int:
    """A port from 15000 to 30999 that is equal wherever it is computed for the same job.

    From 32768 on, Linux hands out ports for outgoing connections, so such a port is sometimes taken. crc32 is
    used because Python's own hash of a text differs between processes.
    """
    return FIRST_PORT + zlib.crc32(job_id.encode()) % PORTS
