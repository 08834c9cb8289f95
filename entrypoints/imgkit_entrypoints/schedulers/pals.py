"""Cray PALS, the ``mpiexec`` of HPE systems with PBS: one process per node, and how it finds its place.

Notes
-----
PALS_PPN, PALS_CPU_BIND and PALS_DEPTH are inputs that sites preset: they show nothing. Some systems do not
set PALS_SIZE, so PMI_SIZE comes first and the host list last. Slurm's Cray plugin sets PALS_* as well: there
Slurm places the process.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.mpi import MpiLauncher, RankVariables

NAME = "pals"

FIELDS = RankVariables(
    rank=("PALS_RANKID",),
    world_size=("PMI_SIZE", "PALS_SIZE"),
    local_rank=("PALS_LOCAL_RANKID",),
    local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node_rank=("PALS_NODEID",),
    job_id=("PBS_JOBID", "PALS_APID"),
)

FORWARD: tuple[str, ...] = ("IMGKIT_NODES",)
"""Variables that a job script passes to the processes: mpiexec passes the environment on, the container may
not.
"""

_LAUNCHER = MpiLauncher(
    name=NAME,
    fields=FIELDS,
    forward=FORWARD,
    program="mpiexec",
    count="-n",
    once_per_node=("--ppn", "1", "--cpu-bind", "none"),
    export=("--env", "{name}={value}"),
)
place = _LAUNCHER.place
start_argv = _LAUNCHER.start_argv
per_node_command = _LAUNCHER.per_node_command


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that show a process started by PALS."""
    return present(env, *FIELDS.rank, *FIELDS.node_rank)
