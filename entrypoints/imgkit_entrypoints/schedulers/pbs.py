"""PBS (OpenPBS): ``mpiexec``, ``pbsdsh`` or ssh start one process per node, and the process detects its rank.

Notes
-----
* PBS runs the job script on the first host only, and starts nothing on the others by itself. A launcher
  started once in the script would wait for agents that nobody starts.
* PBS_NODEFILE has a line for each chunk x mpiprocs. Its path is in PBS' spool folder, which is not in a
  container. So the job script passes the list on as IMGKIT_NODES, in the same order: the script runs on the
  first host.
* A task that pbsdsh starts gets PBS_NODENUM, its host's index, and none of the script's exports. PBS_TASKNUM
  is decimal in the script and 8 hexadecimal digits in a task. It distinguishes the two and is never a rank.
* pbsdsh starts one task for each line of the node file, so two on a host with mpiprocs=2. With ``-n INDEX``,
  it starts one task for one line.
* pbsdsh ends with 0 even if its tasks fail, and their output does not pass through it.

Source: openpbs src/resmom/start_exec.c, mom_comm.c, src/cmds/pbsdsh.c.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import NODES, Environment, short_host
from imgkit_entrypoints.schedulers.placement import Placement, WrongStart

NAME = "pbs"

FORWARD: tuple[str, ...] = (NODES,)
"""Variables that a job script passes to the processes."""

# PBS_TASKNUM of a task that pbsdsh has started. In the job script, it is a decimal number.
_SPAWNED = re.compile("[0-9A-Fa-f]{8}")
# Shell commands for the hosts of the node file without repeats, and for the index of each host's first line.
_UNIQUE_NODES = "awk '!seen[$0]++' \"$PBS_NODEFILE\""
_FIRST_LINES = "awk '!seen[$0]++{print NR-1}' \"$PBS_NODEFILE\""


def claims(env: Environment) -> tuple[str, ...]:
    """Return the variables that show a PBS job. Empty outside of a job."""
    return env.present("PBS_JOBID", "PBS_NODENUM", "PBS_NODEFILE")


def find_placement(env: Environment) -> Placement:
    """Return the placement of this process: the host of the PBS job on which it was started.

    Raises
    ------
    WrongStart : this is the job script itself, which runs on the first host only, but the job has several
        hosts.
    NoPlan : the job's hosts are unknown, or this host is not one of them.
    """
    hosts = env.find_hosts()
    if hosts.names:
        nnodes, nnodes_from = len(hosts.names), hosts.variable
    elif env.get("IMGKIT_NNODES") == "1":  # --nnodes 1 asks for this host alone
        nnodes, nnodes_from = 1, "IMGKIT_NNODES"
    else:
        raise NoPlan(
            "this is a PBS job, but its host list is not visible here",
            where=f"PBS_NODEFILE={env.get('PBS_NODEFILE', '')}",
            hint=f'in the job script: export {NODES}="$({_UNIQUE_NODES} | paste -sd, -)", and pass it '
            f'into the container (--env {NODES}="${NODES}"). To use this host alone: --nnodes 1',
        )
    names = ", ".join(hosts.names[:8])
    if nnodes > 1 and _is_script(env):
        raise WrongStart(
            f"the job has {nnodes} hosts ({names}), but this is the job script's process: PBS starts nothing "
            "on the others",
            where=f"{hosts.variable}, {env.first_set(('PBS_ENVIRONMENT', 'PBS_TASKNUM', 'PBS_NODEFILE'))}",
            nnodes=nnodes,
        )
    node_rank, rank_from = env.find_node_rank(nnodes, nnodes_from, hosts, "PBS_NODENUM", "IMGKIT_NODE_RANK")
    if node_rank is None:
        host = short_host(env.hostname()) or "its name"
        raise NoPlan(
            f"this host is not in the job's host list: {host} is not one of {names}",
            where="PBS_NODENUM",
            hint="start the command with mpiexec or pbsdsh, or give --node-rank",
        )
    if node_rank >= nnodes:
        raise NoPlan(
            f"this is host {node_rank} of the job, counted from 0, but {hosts.variable} lists only {nnodes}: "
            f"{names}",
            where=f"{rank_from}={node_rank}",
        )
    head, head_from = env.find_head(nnodes, hosts)
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "hosts": hosts.variable,
        "head": head_from,
        "job_id": env.first_set(("PBS_JOBID",)),
    }
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts.names,
        head=head,
        job_id=env.get("PBS_JOBID", ""),
        source=source,
    )


def start_argv(command: Sequence[str], *, line_index: str) -> tuple[str, ...]:
    """Return the argv that starts `command` through pbsdsh on one host of the PBS job.

    The command does not get the variables, modules or working directory of the job script. pbsdsh itself
    always ends with 0, so the option ``-v`` is given: with it, pbsdsh prints the exit status of the task.

    Parameters
    ----------
    line_index : index of a line of the host in the node file, from 0, or a shell expression for it.
    """
    return ("pbsdsh", "-v", "-n", line_index, "--", *command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the lines for a job script that start `command` on each node, for a hint.

    They show PALS' mpiexec, and pbsdsh for systems without it.
    """
    command_line = shlex.join(command)
    # With pbsdsh, the command is a part of a double-quoted word, so these characters in it need a backslash.
    quoted = re.sub(r'(["\\$`])', r"\\\1", command_line)
    return "\n     ".join(
        (
            f'export {NODES}="$({_UNIQUE_NODES} | paste -sd, -)"',
            f"mpiexec -n {nnodes} --ppn 1 --cpu-bind none {command_line}",
            "or, where mpiexec is not HPE's:",
            f"for line in $({_FIRST_LINES}); do",
            f"  pbsdsh -n \"$line\" -- /bin/bash -c \"cd '$PBS_O_WORKDIR' && exec env {NODES}='${NODES}' "
            f'{quoted}" &',
            "done; wait",
        )
    )


def _is_script(env: Environment) -> bool:
    """Return whether this process belongs to the job script.

    Otherwise, pbsdsh or another program has started it as a task on a host.
    """
    if _SPAWNED.fullmatch(env.get("PBS_TASKNUM", "")):
        return False
    if env.get("PBS_NODENUM", "0") != "0":
        return False  # the script runs on host 0
    if env.present("PBS_ENVIRONMENT", "PBS_TASKNUM"):
        return True
    # Without both variables, the process counts as a task if the hosts were passed on to it.
    return not env.present(NODES)
