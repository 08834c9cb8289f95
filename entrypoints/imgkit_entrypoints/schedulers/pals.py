"""Cray PALS, the ``mpiexec`` of HPE systems with PBS: one process per node, and how it finds its place.

Notes
-----
PALS_PPN, PALS_CPU_BIND and PALS_DEPTH are inputs too, which sites preset: they show nothing. PALS_SIZE is
missing on some systems, so PMI_SIZE comes first and the list of hosts last. Slurm's Cray plugin sets PALS_*
as well: there Slurm decides.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import RankVariables, place_rank
from imgkit_entrypoints.schedulers.placement import Placement, Read

NAME = "pals"

FIELDS = RankVariables(
    rank=("PALS_RANKID",),
    world_size=("PMI_SIZE", "PALS_SIZE"),
    local_rank=("PALS_LOCAL_RANKID",),
    local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node_rank=("PALS_NODEID",),
    job_id=("PBS_JOBID", "PALS_APID"),
    hand_in="mpiexec --env {name}={value}",
)

FORWARD: tuple[str, ...] = ("IMGKIT_NODES",)
"""Variables that a job script must hand to the processes: mpiexec passes the environment, the container may
not.
"""


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show a process started by PALS."""
    return present(env, *FIELDS.rank, *FIELDS.node_rank)


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
    given = (word for name, value in (forward or {}).items() for word in ("--env", f"{name}={value}"))
    return ("mpiexec", "-n", str(nnodes), "--ppn", "1", "--cpu-bind", "none", *given, *options, *command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """The line to type instead, in the job script."""
    forward = {name: env[name] for name in present(env, *FORWARD)}
    return shlex.join(start_argv(command, nnodes=nnodes, forward=forward))
