"""MPICH and Intel MPI (Hydra): one process per node by ``mpiexec``, and how that process finds its place."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import RankVariables, place_rank
from imgkit_entrypoints.schedulers.placement import Placement, Read

NAME = "hydra"

FIELDS = RankVariables(
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job_id=("PBS_JOBID", "SLURM_JOB_ID"),
    hand_in="mpiexec -genv {name} {value}",
)

OWN: tuple[str, ...] = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Set by Hydra alone; PMI_* also come from Slurm's and HPE's launchers."""

FORWARD: tuple[str, ...] = ("IMGKIT_NODES", "IMGKIT_HEAD")
"""Variables that a job script must hand to the processes, each by its own ``-genv``."""


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show Hydra's launcher."""
    return present(env, *OWN, *FIELDS.rank, *FIELDS.world_size) if present(env, *FIELDS.rank) else ()


def place(env: Mapping[str, str], read: Read) -> Placement:
    """The node, or with several processes a node the rank, that this process is (raises as `place_rank`)."""
    return place_rank(NAME, FIELDS, env, read)


def start_argv(
    command: Sequence[str],
    *,
    nnodes: int,
    forward: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """The words that start `command` once on each node; `forward` is set in its environment."""
    given = (word for name, value in (forward or {}).items() for word in ("-genv", name, value))
    return ("mpiexec", "-n", str(nnodes), "-ppn", "1", "-bind-to", "none", *given, *options, *command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """The line to type instead, where mpiexec was typed."""
    forward = {name: env[name] for name in present(env, *FORWARD)}
    return shlex.join(start_argv(command, nnodes=nnodes, forward=forward))
