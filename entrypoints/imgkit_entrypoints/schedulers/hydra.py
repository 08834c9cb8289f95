"""MPICH and Intel MPI (Hydra): ``mpiexec`` starts one process per node, and the process finds its place."""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import MpiLauncher, RankVariables

NAME = "hydra"

FIELDS = RankVariables(
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job_id=("PBS_JOBID", "SLURM_JOB_ID"),
)

OWN: tuple[str, ...] = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Variables that only Hydra sets; Slurm's and HPE's launchers set PMI_* too."""

FORWARD: tuple[str, ...] = ("IMGKIT_NODES", "IMGKIT_HEAD")
"""Variables that a job script passes to the processes, each with its own ``-genv``."""

_LAUNCHER = MpiLauncher(
    name=NAME,
    fields=FIELDS,
    forward=FORWARD,
    program="mpiexec",
    count="-n",
    once_per_node=("-ppn", "1", "-bind-to", "none"),
    export=("-genv", "{name}", "{value}"),
)
place = _LAUNCHER.place
start_argv = _LAUNCHER.start_argv
per_node_command = _LAUNCHER.per_node_command


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that show Hydra's launcher."""
    return present(env, *OWN, *FIELDS.rank, *FIELDS.world_size) if present(env, *FIELDS.rank) else ()
