"""Pods of a training operator (Kubeflow v1, Trainer v2, RunAI): the operator starts one process per pod.

Notes
-----
Operators use the same variables with different meanings. In the operator v1 of the RunAI tutorials, RANK and
WORLD_SIZE count pods. In later operators, WORLD_SIZE is the number of pods times the number of processes in
each pod. These operators also set PET_NNODES and PET_NODE_RANK, so PET_* take precedence. Empty variables
(``PET_STANDALONE=""``) count as not set. In a job with an elasticPolicy, PET_NNODES is a range, which is
refused. Source: kubeflow/training-operator pkg/controller.v1/pytorch/{envvar,elastic}.go. EPFL's page on
RunAI also lists LOCAL_RANK, which is 0 in every pod.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import Environment, HostList
from imgkit_entrypoints.schedulers.placement import Placement

NAME = "kubeflow"

OWN = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT")
"""Variables that only operators set."""
# Variables that operators set, but also job scripts and other launchers. Only all three together show a pod.
PLAIN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def claims(env: Environment) -> tuple[str, ...]:
    """Return the variables that show a pod of a training operator, or () outside of such a pod."""
    names = env.find_set(*OWN)
    if env.has_all(PLAIN) and not _is_rank(env):
        return (*names, *PLAIN)
    return names


def _is_rank(env: Environment) -> bool:
    """Return whether the variables in `PLAIN` describe one of several processes on a node, and not a pod."""
    # With --direct, the user says that this process is a rank. It may then have the local rank 0 without
    # being a pod.
    if env.get("IMGKIT_DIRECT") == "1" and env.get("LOCAL_RANK"):
        return True
    return (env.get("LOCAL_RANK") or "0") != "0" or (env.get("LOCAL_WORLD_SIZE") or "1") != "1"


def find_placement(env: Environment) -> Placement:
    """Return the placement of the pod in which this process runs. A pod counts as a node.

    The operator that starts the pods describes them in variables, such as ``PET_NNODES=4``.

    Raises
    ------
    NoPlan : the number of pods is a range, the rank is not below that number, or the address of the first pod
        is unknown.
    """
    nnodes_from = env.find_first_set(("PET_NNODES", "WORLD_SIZE"))
    if ":" in env.get("PET_NNODES", ""):
        raise NoPlan(
            "the number of pods is a range, but a run has a fixed number of nodes",
            where=f"PET_NNODES={env['PET_NNODES']}",
            hint="leave elasticPolicy out of the PyTorchJob, or --min-replicas out of runai",
        )
    # If neither variable is set, this raises an error that names PET_NNODES.
    nnodes = env.read_number(nnodes_from or "PET_NNODES", least=1)
    requested = parse_digits(env.get("IMGKIT_NNODES", ""))
    if nnodes_from == "WORLD_SIZE" and requested is not None:
        # WORLD_SIZE is ambiguous, because it counts pods in one operator and processes in another. So
        # --nnodes decides.
        nnodes, nnodes_from = requested, "IMGKIT_NNODES"
    rank_from = env.find_first_set(("PET_NODE_RANK", "RANK"))
    node_rank = env.read_number(rank_from or "PET_NODE_RANK") if nnodes > 1 else 0
    if node_rank >= nnodes:
        raise NoPlan(
            f"this is pod {node_rank}, but {nnodes_from} allows only pods 0 to {nnodes - 1}",
            where=env.quote(rank_from, nnodes_from),
            hint="give --nnodes with the number of pods (RunAI: workers + 1)",
        )
    job_id = env.get("PET_RDZV_ID", "")
    hosts = env.choose_hosts(nnodes, HostList())
    head, head_from = env.find_head(nnodes, hosts, "PET_MASTER_ADDR", "MASTER_ADDR")
    port_from = env.find_first_set(("PET_MASTER_PORT", "MASTER_PORT"))
    # PET_RDZV_ENDPOINT is "HOST:PORT" or "HOST". It takes precedence over MASTER_ADDR, but not over
    # PET_MASTER_ADDR and the variables of the user.
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    if nnodes > 1 and endpoint and head_from not in ("IMGKIT_HEAD", "IMGKIT_NODES", "PET_MASTER_ADDR"):
        head, _, port = endpoint.partition(":")
        head_from = "PET_RDZV_ENDPOINT"
        if port:
            # Below, the port is read from the variable `port_from`, so store it there.
            env, port_from = Environment({**env, head_from: port}), head_from
    if nnodes > 1 and not head:
        raise NoPlan(
            f"the run has {nnodes} pods, but no variable says where the first one is",
            where="PET_MASTER_ADDR, MASTER_ADDR",
            hint="give --head HOST: the first pod, under a name that the others can reach",
        )
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "job_id": "PET_RDZV_ID" if job_id else "",
        "hosts": hosts.variable,
        "head": head_from,
        "port": port_from if nnodes > 1 else "",
    }
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts.names,
        head=head,
        port=env.read_port(port_from) if port_from and nnodes > 1 else None,
        job_id=job_id,
        source=source,
    )


def start_argv(command: Sequence[str]) -> tuple[str, ...]:
    """Return `command` unchanged, because the operator runs it once in each pod."""
    return tuple(command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the line that starts `command` in a pod, which is the command itself."""
    return shlex.join(command)
