"""Where this process stands among the nodes of its job, as one value, and the requests that shape it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan

Read = Callable[[str], "str | None"]
"""Content of a file by its absolute path; None where it cannot be read."""

FIRST_PORT = 15000
PORTS = 16000


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """This process is itself one rank: the launcher started all of a node's, and torchrun has nothing to
    do.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One node of a job. Counts nodes, never processes: `direct` alone knows of ranks."""

    scheduler: str
    """Name of the module that decided: slurm, pbs, pals, openmpi, hydra, kubeflow, manual or standalone."""
    nnodes: int
    node_rank: int
    hosts: tuple[str, ...]
    """In the order of the node ranks; empty where the launcher hides them."""
    head: str
    """Name or address of node 0 as the others reach it; empty on one node."""
    port: int | None
    """As the scheduler or the user gave it; None leaves it to `job_port`."""
    job_id: str
    """The same text on every node, another one for every start; empty where the launcher has none."""
    source: Mapping[str, str]
    """Field -> the variables or the flag that it came from."""
    direct: Direct | None = None
    min_nnodes: int | None = None
    """MIN of ``--nnodes MIN:MAX``."""

    @property
    def base_port(self) -> int:
        """The given port, else the one that the job id yields: equal on all nodes without a word
        exchanged.
        """
        return job_port(self.job_id) if self.port is None else self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What flags and ``IMGKIT_*`` variables ask for; None leaves it to the scheduler."""

    scheduler: str | None = None
    nnodes: int | None = None
    """MAX of ``MIN:MAX``."""
    min_nnodes: int | None = None
    node_rank: int | None = None
    head: str | None = None
    port: int | None = None
    direct: bool | None = None
    command: tuple[str, ...] = ("dist-run",)
    """The words of this very command, for the errors that show how to start it right."""


class WrongStart(NoPlan):
    """The allocation has several nodes and nothing but this one process was started on them.

    Parameters
    ----------
    nnodes : nodes of the allocation.
    """

    def __init__(self, what: str, *, where: str, nnodes: int, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.nnodes = nnodes


def job_port(job_id: str) -> int:
    """A port from 15000 to 30999, equal wherever it is computed for the same job.

    Below 32768, where Linux begins to hand out ports for outgoing connections: a port from that range is
    taken by chance, once in a while. crc32 since Python's own hash of a text differs from process to process.
    """
    return FIRST_PORT + zlib.crc32(job_id.encode()) % PORTS
