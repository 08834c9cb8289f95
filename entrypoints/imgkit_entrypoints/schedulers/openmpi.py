"""Open MPI 4 and 5: one process per node by ``mpirun``, and how that process finds its place.

Notes
-----
OMPI_COMM_WORLD_NODE_RANK is the rank on its node over all jobs, not the node's index: it is not read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import RankVariables, place_rank
from imgkit_entrypoints.schedulers.placement import Placement, Read

NAME = "openmpi"

FIELDS = RankVariables(
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job_id=("PMIX_NAMESPACE",),
    hand_in="mpirun -x {name}={value}",
)

FORWARD: tuple[str, ...] = ("IMGKIT_NODES", "IMGKIT_HEAD")
"""Variables that a job script must hand to the processes, each by its own ``-x``."""


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show Open MPI's launcher; PMIX_* do not, srun sets them too."""
    return present(env, *FIELDS.rank, *FIELDS.world_size)


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
    given = (word for name, value in (forward or {}).items() for word in ("-x", f"{name}={value}"))
    return (
        *("mpirun", "-np", str(nnodes), "--map-by", "ppr:1:node"),
        # The default binds torchrun, and with it all workers of the node, to one core.
        *("--bind-to", "none", *given, *options, *command),
    )


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """The line to type instead, where mpirun was typed."""
    forward = {name: env[name] for name in present(env, *FORWARD)}
    return shlex.join(start_argv(command, nnodes=nnodes, forward=forward))
