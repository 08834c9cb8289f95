"""PBS (OpenPBS): ``mpiexec``, ``pbsdsh`` or ssh start one process per node, and the process detects its rank.

Notes
-----
* PBS runs the job script only on the first host, and starts nothing on the other hosts. A command that is
  started once in the script would wait for node agents that nobody starts.
* PBS_NODEFILE has a line for each chunk x mpiprocs. The file is in PBS' spool folder, which containers do not
  contain. So the job script passes the list on as IMGKIT_NODES. It keeps the order, because the script runs
  on the first host.
* A task that pbsdsh starts gets PBS_NODENUM, the index of its host, but none of the variables that the script
  exports. PBS_TASKNUM is a decimal number in the script, and has 8 hexadecimal digits in a task. This
  distinguishes the two. It is never a rank.
* pbsdsh starts one task for each line of the node file, which means two tasks on a host with mpiprocs=2. With
  ``-n INDEX``, it starts one task for one line.
* pbsdsh ends with 0 even if its tasks fail, and their output does not pass through it.

Source: openpbs src/resmom/start_exec.c, mom_comm.c, src/cmds/pbsdsh.c.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import NODES, Environment, HostList, short_host
from imgkit_entrypoints.schedulers.placement import Placement, WrongStart

NAME = "pbs"

FORWARD: tuple[str, ...] = (NODES,)
"""Variables that a job script passes to the processes."""

# PBS_TASKNUM of a task that pbsdsh has started. In the job script, it is a decimal number.
_TASK_NUMBER = re.compile("[0-9A-Fa-f]{8}")
# Shell command that prints the hosts in the node file without duplicates, separated by commas.
_LIST_HOSTS = "awk '!seen[$0]++' \"$PBS_NODEFILE\" | paste -sd, -"
# Lines of a job script that start {command} on each node. {quoted} is the same command for use inside double
# quotes. awk prints the index of each host's first line in the node file, because pbsdsh would start one task
# for each line. A task has neither the variables nor the working directory of the script, so it sets them.
_START_LINES = """\
export IMGKIT_NODES="$({list_hosts})"
mpiexec -n {nnodes} --ppn 1 --cpu-bind none {command}
or, where mpiexec is not HPE's:
for line in $(awk '!seen[$0]++{{print NR-1}}' "$PBS_NODEFILE"); do
  pbsdsh -n "$line" -- /bin/bash -c "cd '$PBS_O_WORKDIR' && exec env IMGKIT_NODES='$IMGKIT_NODES' {quoted}" &
done; wait"""


def claims(env: Environment) -> tuple[str, ...]:
    """Return the variables that show a PBS job, or () outside of a job."""
    return env.find_set("PBS_JOBID", "PBS_NODENUM", "PBS_NODEFILE")


def find_placement(env: Environment) -> Placement:
    """Return the placement of this process, which is the host of the PBS job on which it was started.

    Raises
    ------
    WrongStart : the job has several hosts, but this is the job script itself, which runs only on the first
        host.
    NoPlan : the job's hosts are unknown, or this host is not one of them.
    """
    hosts = env.find_hosts()
    nnodes, nnodes_from = _choose_host_count(env, hosts)
    if nnodes > 1 and _is_script(env):
        evidence = env.find_first_set(("PBS_ENVIRONMENT", "PBS_TASKNUM", "PBS_NODEFILE"))
        raise WrongStart(
            f"the job has {nnodes} hosts ({_list_names(hosts)}), but this is the job script's process: PBS "
            "starts nothing on the others",
            where=f"{hosts.variable}, {evidence}",
            nnodes=nnodes,
        )
    node_rank, rank_from = _find_node_rank(env, nnodes, nnodes_from, hosts)
    head, head_from = env.find_head(nnodes, hosts)
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "hosts": hosts.variable,
        "head": head_from,
        "job_id": env.find_first_set(("PBS_JOBID",)),
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


def _choose_host_count(env: Environment, hosts: HostList) -> tuple[int, str]:
    """Return the number of hosts of the run, and the variable from which it was read.

    Raises
    ------
    NoPlan : the hosts of the job are unknown, and the user has not requested a run on this host alone.
    """
    if hosts.names:
        return len(hosts.names), hosts.variable
    if env.get("IMGKIT_NNODES") == "1":  # the variable of --nnodes
        return 1, "IMGKIT_NNODES"
    raise NoPlan(
        "this is a PBS job, but its host list is not visible here",
        where=f"PBS_NODEFILE={env.get('PBS_NODEFILE', '')}",
        hint=f'in the job script: export {NODES}="$({_LIST_HOSTS})", and pass it into the container '
        f'(--env {NODES}="${NODES}"). To use this host alone: --nnodes 1',
    )


def _find_node_rank(env: Environment, nnodes: int, nnodes_from: str, hosts: HostList) -> tuple[int, str]:
    """Return the index of this host in the job, and its source, such as ``PBS_NODENUM``.

    Raises
    ------
    NoPlan : this host is not one of `hosts`, or its index is not below `nnodes`.
    """
    node_rank, rank_from = env.find_node_rank(nnodes, nnodes_from, hosts, "PBS_NODENUM", "IMGKIT_NODE_RANK")
    if node_rank is None:
        host = short_host(env.hostname()) or "its name"
        raise NoPlan(
            f"this host is not in the job's host list: {host} is not one of {_list_names(hosts)}",
            where="PBS_NODENUM",
            hint="start the command with mpiexec or pbsdsh, or give --node-rank",
        )
    if node_rank >= nnodes:
        raise NoPlan(
            f"this is host {node_rank} of the job, counted from 0, but {hosts.variable} lists only {nnodes}: "
            f"{_list_names(hosts)}",
            where=f"{rank_from}={node_rank}",
        )
    return node_rank, rank_from


def _list_names(hosts: HostList) -> str:
    """Return the names of the first 8 hosts, separated by commas, for messages."""
    return ", ".join(hosts.names[:8])


def start_argv(command: Sequence[str], *, line_index: str) -> tuple[str, ...]:
    """Return the argv that starts `command` through pbsdsh on one host of the PBS job.

    The command does not inherit variables, modules or the working directory from the job script. pbsdsh
    itself always ends with 0. With the option ``-v``, it prints the exit status of the task.

    Parameters
    ----------
    line_index : index of a line of the host in the node file, counted from 0, or a shell expression for it.
    """
    return ("pbsdsh", "-v", "-n", line_index, "--", *command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the lines of a job script that start `command` on each node, for a hint.

    The lines use PALS' mpiexec or, for systems without PALS, a loop with pbsdsh. For example::

        export IMGKIT_NODES="$(...)"
        mpiexec -n 2 --ppn 1 --cpu-bind none dist-run train.py
        or, where mpiexec is not HPE's:
        for line in $(...); do
          pbsdsh -n "$line" -- /bin/bash -c "... dist-run train.py" &
        done; wait
    """
    command_line = shlex.join(command)
    # These characters need a backslash inside the double quotes of the line with pbsdsh.
    quoted = re.sub(r'(["\\$`])', r"\\\1", command_line)
    lines = _START_LINES.format(list_hosts=_LIST_HOSTS, nnodes=nnodes, command=command_line, quoted=quoted)
    return lines.replace("\n", "\n     ")  # below the first line, the hint is indented


def _is_script(env: Environment) -> bool:
    """Return whether this process belongs to the job script, and is not a task on one of the hosts.

    The variables of OpenPBS have these values:

    * in the script, PBS_TASKNUM=1, PBS_NODENUM=0 and PBS_ENVIRONMENT=PBS_BATCH (or PBS_INTERACTIVE),
    * in a task of pbsdsh, for example PBS_TASKNUM=0000000A and PBS_NODENUM=3,
    * in a process that ssh has started, only what the user has passed on.
    """
    if _TASK_NUMBER.fullmatch(env.get("PBS_TASKNUM", "")):
        return False
    if env.get("PBS_NODENUM", "0") != "0":  # the script always runs on host 0
        return False
    if env.get("PBS_ENVIRONMENT") or env.get("PBS_TASKNUM"):
        return True
    # If neither variable is set, the process is a task if the list of hosts was passed on to it.
    return not env.get(NODES)
