"""Slurm: ``srun`` starts one process per node, and the process detects its rank.

Notes
-----
The variables follow Slurm's src/common/env.c and were seen on 22.05:

* A batch script also has SLURM_PROCID=0 and SLURM_NODEID=0, so these do not prove that srun has started this
  process. SLURM_STEP_NUM_NODES and SLURM_STEP_NODELIST do prove it, because only srun sets them.
  SLURM_STEP_ID proves nothing, because the batch script (-5) and salloc's interactive shell (-6) have it too.
* SLURM_LAUNCH_NODE_IPADDR is the node on which srun was called. Under salloc, that is a login node and never
  the head (node 0).
* In 22.05, srun stopped inheriting --cpus-per-task, and it inherits it again since 23.11. So command lines of
  srun always contain the option.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import Environment, HostList, short_host
from imgkit_entrypoints.schedulers.hostlist import expand_counts, expand_nodelist
from imgkit_entrypoints.schedulers.placement import Direct, Placement, WrongStart

NAME = "slurm"

# Variables of a step. If a field has several names, the first one that is set counts.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "nnodes": ("SLURM_STEP_NUM_NODES",),
    "hosts": ("SLURM_STEP_NODELIST",),
    "node_rank": ("SLURM_NODEID",),  # SLURM_PROCID differs with several tasks on a node
    "job_id": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "step_id": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "tasks": ("SLURM_STEP_TASKS_PER_NODE",),
    "rank": ("SLURM_PROCID",),
    "local_rank": ("SLURM_LOCALID",),
    "world_size": ("SLURM_STEP_NUM_TASKS",),
}
# Variables of the whole job, which a batch script and a shell of salloc have as well.
JOB_FIELDS: Mapping[str, tuple[str, ...]] = {
    "nnodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "hosts": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
}

OUTLIVES_NODES = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""srun's options for a step that continues without a lost node. The job needs --no-kill as well."""

# Slurm's own steps have small negative numbers as ids (slurm.h). This is -16 as an unsigned number of 32
# bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# The node lists of the components of a heterogeneous job. Other variables with *_PACK_GROUP_* are no evidence
# of such a job: Slurm 22.05 sets SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0 in every step of a batch script.
_HET = re.compile(r"SLURM_JOB_NODELIST_(?:HET|PACK)_GROUP_[0-9]+")


def claims(env: Environment) -> tuple[str, ...]:
    """Return the variables that show a Slurm job, or () outside of a job."""
    names = (*FIELDS["nnodes"], *FIELDS["hosts"], *JOB_FIELDS["nnodes"], *JOB_FIELDS["hosts"])
    # The salloc shell of a heterogeneous job has none of these variables, but only the lists of its
    # components.
    return (*env.find_set(*names), *_find_hetjob_variables(env))


def find_placement(env: Environment) -> Placement:
    """Return the placement of this process, which is the node of a Slurm step on which srun has started it.

    A step is one call of srun in a job.

    Raises
    ------
    WrongStart : this is the shell of the batch script or of salloc, and the job has several nodes.
    NoPlan : the job is heterogeneous, or variables contradict each other.
    """
    _refuse_heterogeneous_job(env)
    if not env.find_set(*FIELDS["nnodes"], *FIELDS["hosts"]):
        return _find_placement_outside_step(env)
    # A name that ends with _from is the variable that contains the value, for messages.
    step_hosts = _expand_hosts(env, FIELDS["hosts"])
    nnodes, nnodes_from = _read_step_size(env, step_hosts)
    node_rank, rank_from = _read_node_rank(env, nnodes, step_hosts)
    run_hosts = env.choose_hosts(nnodes, step_hosts)
    head, head_from = env.find_head(nnodes, run_hosts)
    if nnodes > 1 and not head:
        raise NoPlan(
            f"the step has {nnodes} nodes, but SLURM_STEP_NODELIST, which lists them, is not set",
            where=env.quote(nnodes_from),
            hint="start the container without --cleanenv, or give --head HOST: the host of node 0",
        )
    job_id, job_id_from = _job_id(env)
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "hosts": run_hosts.variable,
        "head": head_from,
        "job_id": job_id_from,
    }
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=run_hosts.names,
        head=head,
        job_id=job_id,
        source=source,
        direct=None if _is_shell(env) else _find_direct_rank(env, nnodes, node_rank),
    )


def _refuse_heterogeneous_job(env: Environment) -> None:
    """Raise NoPlan in a heterogeneous job, whose nodes belong to several components."""
    components = _find_hetjob_variables(env)
    if components:
        raise NoPlan(
            "this is a heterogeneous Slurm job, which is not supported",
            where=env.quote(*components[:2]),
            hint="request all nodes in one component: no `:` in the request, and no `#SBATCH hetjob`",
        )


def _read_step_size(env: Environment, hosts: HostList) -> tuple[int, str]:
    """Return the number of nodes of the step, and the variable from which it was read.

    Raises
    ------
    WrongStart : the step is the shell of salloc, which runs on one of several nodes.
    NoPlan : the number of nodes differs from the number of `hosts` in the step.
    """
    nnodes, nnodes_from = len(hosts.names), hosts.variable
    size_variable = env.find_first_set(FIELDS["nnodes"])
    if size_variable:
        nnodes, nnodes_from = env.read_number(size_variable, least=1), size_variable
    job_nodes, job_nodes_from = _read_node_count(env)
    if nnodes < job_nodes and _is_shell(env):
        raise WrongStart(
            f"this is the shell of salloc, on 1 of the job's {job_nodes} nodes: srun has started nothing on "
            "the others",
            where=env.quote(job_nodes_from),
            nnodes=job_nodes,
        )
    if hosts.names and len(hosts.names) != nnodes:
        problem = f"{env[hosts.variable]} has {len(hosts.names)} hosts, but {nnodes_from} says {nnodes}"
        raise NoPlan(problem, where=hosts.variable)
    return nnodes, nnodes_from


def _read_node_rank(env: Environment, nnodes: int, hosts: HostList) -> tuple[int, str]:
    """Return the rank of this node in the step, and the variable that contains it.

    Raises
    ------
    NoPlan : the rank is not below `nnodes`, or it is the rank of another of the step's `hosts`.
    """
    rank_from = env.choose_name(FIELDS["node_rank"])
    node_rank = env.read_number(rank_from) if nnodes > 1 else 0
    if node_rank >= nnodes:
        problem = f"{rank_from} is {node_rank}, but the step has only nodes 0 to {nnodes - 1}"
        raise NoPlan(problem, where=rank_from)
    # SLURMD_NODENAME is the name of this node. If the rank belongs to another node in the list, the variables
    # of another task were passed on to this one.
    node = env.get("SLURMD_NODENAME", "")
    if hosts.names.count(node) == 1 and hosts.names[node_rank] != node:
        raise NoPlan(
            f"{rank_from}={node_rank} is {hosts.names[node_rank]} in {env[hosts.variable]}, but this node is "
            f"{node}",
            where="SLURMD_NODENAME",
            hint="check whether the job script passes the environment of one task on to another",
        )
    return node_rank, rank_from


def start_argv(
    command: Sequence[str],
    *,
    nnodes: int,
    cpus: int | None = None,
    outlives_nodes: bool = False,
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the argv of srun that starts `command` once on each of `nnodes` nodes of this job.

    Parameters
    ----------
    cpus : number of CPUs on each node. None leaves the number to Slurm.
    outlives_nodes : True if the step must continue when a task ends or a node is lost.
    options : further options of srun.
    """
    # One task on each node: a dist-* command starts the ranks of its node itself.
    argv = ["srun", f"--nodes={nnodes}", f"--ntasks={nnodes}", "--ntasks-per-node=1"]
    if cpus is not None:
        argv.append(f"--cpus-per-task={cpus}")
    if outlives_nodes:
        argv += OUTLIVES_NODES
    else:
        argv.append("--kill-on-bad-exit=1")
    return (*argv, *options, *command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the line that starts `command` on all nodes of this job, for a hint.

    The tasks get all CPUs of the job.
    """
    cpus = None
    counts = env.get("SLURM_JOB_CPUS_PER_NODE")
    if counts:
        # All tasks get the same number of CPUs, so the node with the fewest CPUs decides.
        cpus = min(expand_counts(counts, where="SLURM_JOB_CPUS_PER_NODE"))
    elif env.get("SLURM_CPUS_PER_TASK"):
        cpus = env.read_number("SLURM_CPUS_PER_TASK", least=1)
    return shlex.join(start_argv(command, nnodes=nnodes, cpus=cpus))


def _find_hetjob_variables(env: Environment) -> tuple[str, ...]:
    """Return the variables that list the components of a heterogeneous job, or () in any other job."""
    return tuple(name for name in sorted(env) if _HET.fullmatch(name))


def _expand_hosts(env: Environment, names: Sequence[str]) -> HostList:
    """Return the hosts in the first of the variables `names` that is set."""
    name = env.find_first_set(names)
    if not name:
        return HostList()
    return HostList(expand_nodelist(env[name], where=name), name)


def _read_node_count(env: Environment) -> tuple[int, str]:
    """Return the number of nodes of the job, and the variable that contains it.

    The number is 0 if no variable contains it.
    """
    name = env.find_first_set(JOB_FIELDS["nnodes"])
    if name:
        return env.read_number(name, least=1), name
    hosts = _expand_hosts(env, JOB_FIELDS["hosts"])
    return len(hosts.names), hosts.variable


def _is_shell(env: Environment) -> bool:
    """Return whether the step is a shell that Slurm has started: a batch script (id -5) or salloc (id -6).

    Some versions print the id as an unsigned number, such as 4294967290 for -6.
    """
    text = env.get(env.find_first_set(FIELDS["step_id"]), "")
    number = parse_digits(text)
    return text.startswith("-") or (number is not None and number >= _FIRST_SPECIAL_STEP)


def _find_placement_outside_step(env: Environment) -> Placement:
    """Return the placement of a process that srun has not started, such as a batch script.

    In a job of one node, the process runs on that node. In a job of several nodes, the other nodes have no
    process yet, which is an error.

    Raises
    ------
    WrongStart : the job has several nodes, or this shell does not run on the job's node. The caller adds the
        command that starts the run on `nnodes` nodes.
    """
    nnodes, nnodes_from = _read_node_count(env)
    hosts = _expand_hosts(env, JOB_FIELDS["hosts"])
    # A batch script has SLURM_NODEID, but a shell of salloc on the login node does not.
    is_on_node = env.find_first_set(FIELDS["node_rank"]) != ""
    if nnodes > 1:
        shell = f"of salloc, outside the job of {nnodes} nodes"
        if is_on_node:
            shell = f"of the batch script, on 1 of the job's {nnodes} nodes"
        raise WrongStart(
            f"this is the shell {shell}: srun has started nothing on the others",
            where=env.quote(nnodes_from),
            nnodes=nnodes,
        )
    if not is_on_node:
        _refuse_other_machine(env, hosts)
    job_id, job_id_from = _job_id(env)
    source = {"nnodes": nnodes_from, "hosts": hosts.variable, "job_id": job_id_from}
    return Placement(scheduler=NAME, nnodes=1, node_rank=0, hosts=hosts.names, job_id=job_id, source=source)


def _refuse_other_machine(env: Environment, hosts: HostList) -> None:
    """Raise WrongStart if a shell of salloc does not run on the only node of its job, the first of `hosts`.

    salloc opens the shell on that node or on the login node. If one of the names is unknown, do nothing.
    """
    hostname = env.hostname()
    if not hosts.names or not hostname:
        return
    job_node = hosts.names[0]
    if short_host(hostname) != short_host(job_node):
        raise WrongStart(
            f"this shell runs on {hostname}, but the job's node is {job_node}",
            where=env.quote(hosts.variable),
            nnodes=1,
        )


def _job_id(env: Environment) -> tuple[str, str]:
    """Return the ids of the job and the step as ``4711.0``, and the variables that contain them.

    The id of the step is included because two steps of one job may share a node.
    """
    names = env.find_set(env.find_first_set(FIELDS["job_id"]), env.find_first_set(FIELDS["step_id"]))
    return ".".join(env[name] for name in names), ", ".join(names)


def _find_direct_rank(env: Environment, nnodes: int, node_rank: int) -> Direct | None:
    """Return the rank of this task if the step has several tasks on a node, otherwise None.

    With several tasks on a node, srun has already started every rank, and torchrun is not used.

    Raises
    ------
    NoPlan : the numbers of tasks and nodes contradict each other, or a number is missing.
    """
    counts = _read_task_counts(env, nnodes)
    if max(counts) == 1:
        return None
    return Direct(
        rank=env.read_number(env.choose_name(FIELDS["rank"])),
        local_rank=env.read_number(env.choose_name(FIELDS["local_rank"])),
        world_size=sum(counts),
        local_world_size=counts[node_rank],
    )


def _read_task_counts(env: Environment, nnodes: int) -> Sequence[int]:
    """Return the number of tasks on each node of the step, such as ``(4, 4, 3)``.

    Raises
    ------
    NoPlan : the numbers of tasks and nodes contradict each other, or a number is missing.
    """
    counts_from = env.find_first_set(FIELDS["tasks"])
    if not counts_from:
        return _divide_tasks(env, nnodes)
    counts_text = env[counts_from]  # "4(x2),3"
    counts = expand_counts(counts_text, where=counts_from)
    if len(counts) != nnodes:
        problem = (
            f"{counts_from} has counts for {len(counts)} nodes, but the step has {nnodes}: {counts_text}"
        )
        raise NoPlan(problem, where=counts_from)
    return counts


def _divide_tasks(env: Environment, nnodes: int) -> Sequence[int]:
    """Return the same number of tasks for each node, because no variable contains the numbers.

    Raises
    ------
    NoPlan : the tasks of the step cannot be divided equally.
    """
    total_from = env.find_first_set(FIELDS["world_size"])
    total = env.read_number(total_from, least=1) if total_from else nnodes  # one task on each node
    if total % nnodes:
        raise NoPlan(
            f"the step has {total} tasks on {nnodes} nodes, but no variable says how many run on each",
            where=total_from,
        )
    return (total // nnodes,) * nnodes
