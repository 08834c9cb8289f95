"""Open MPI 4 and 5: ``mpirun`` starts one process per node, and the process finds its place.

Notes
-----
OMPI_COMM_WORLD_NODE_RANK is the rank among all jobs on one node, not the node's index: it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import MpiLauncher, RankVariables

NAME = "openmpi"

FIELDS = RankVariables(
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job_id=("PMIX_NAMESPACE",),
)

FORWARD: tuple[str, ...] = ("IMGKIT_NODES", "IMGKIT_HEAD")
"""Variables that a job script passes to the processes, each with its own ``-x``."""

_LAUNCHER = MpiLauncher(
    name=NAME,
    fields=FIELDS,
    forward=FORWARD,
    program="mpirun",
    count="-np",
    # The default binds torchrun, and with it all workers of the node, to one core.
    once_per_node=("--map-by", "ppr:1:node", "--bind-to", "none"),
    export=("-x", "{name}={value}"),
)
place = _LAUNCHER.place
start_argv = _LAUNCHER.start_argv
per_node_command = _LAUNCHER.per_node_command


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that show Open MPI's launcher; PMIX_* do not, because srun sets them too."""
    return present(env, *FIELDS.rank, *FIELDS.world_size)
