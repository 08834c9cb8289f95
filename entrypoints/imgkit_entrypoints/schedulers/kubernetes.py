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
from typing import NamedTuple

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
    nnodes, nnodes_from = _read_pod_count(env)
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
    head = _Head()
    if nnodes > 1:
        head = _find_head(env, nnodes, hosts)
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "job_id": "PET_RDZV_ID" if job_id else "",
        "hosts": hosts.variable,
        "head": head.host_from,
        "port": head.port_from,
    }
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts.names,
        head=head.host,
        port=head.port,
        job_id=job_id,
        source=source,
    )


def _read_pod_count(env: Environment) -> tuple[int, str]:
    """Return the number of pods, and the variable from which it was read.

    Raises
    ------
    NoPlan : the number is a range or unknown.
    """
    if ":" in env.get("PET_NNODES", ""):
        raise NoPlan(
            "the number of pods is a range, but a run has a fixed number of nodes",
            where=f"PET_NNODES={env['PET_NNODES']}",
            hint="leave elasticPolicy out of the PyTorchJob, or --min-replicas out of runai",
        )
    count_variable = env.choose_name(("PET_NNODES", "WORLD_SIZE"))
    count = env.read_number(count_variable, least=1)
    requested = parse_digits(env.get("IMGKIT_NNODES", ""))
    # WORLD_SIZE is ambiguous, because it counts pods in one operator and processes in another. So --nnodes
    # decides.
    if count_variable == "WORLD_SIZE" and requested is not None:
        return requested, "IMGKIT_NNODES"
    return count, count_variable


class _Head(NamedTuple):
    """The address and the port of the first pod, and the variables from which they were read.

    The port is None if no variable contains it. A run on one pod needs neither address nor port.
    """

    host: str = ""
    host_from: str = ""
    port: int | None = None
    port_from: str = ""


def _find_head(env: Environment, nnodes: int, hosts: HostList) -> _Head:
    """Return the address and the port of the first of several pods.

    Raises
    ------
    NoPlan : no variable contains the address, or the port is not valid.
    """
    host, host_from = env.find_head(nnodes, hosts, "PET_MASTER_ADDR", "MASTER_ADDR")
    port_from = env.find_first_set(("PET_MASTER_PORT", "MASTER_PORT"))
    # PET_RDZV_ENDPOINT is "HOST:PORT" or "HOST". It takes precedence over MASTER_ADDR, but not over
    # PET_MASTER_ADDR and the variables of the user.
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    if endpoint and host_from not in ("IMGKIT_HEAD", "IMGKIT_NODES", "PET_MASTER_ADDR"):
        host, _, port_text = endpoint.partition(":")
        host_from = "PET_RDZV_ENDPOINT"
        if port_text:
            # `read_port` below reads a variable, so store the port in one.
            env, port_from = Environment({host_from: port_text}), host_from
    if not host:
        raise NoPlan(
            f"the run has {nnodes} pods, but no variable says where the first one is",
            where="PET_MASTER_ADDR, MASTER_ADDR",
            hint="give --head HOST: the first pod, under a name that the others can reach",
        )
    return _Head(host, host_from, env.read_port(port_from), port_from)


def start_argv(command: Sequence[str]) -> tuple[str, ...]:
    """Return `command` unchanged, because the operator runs it once in each pod."""
    return tuple(command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the line that starts `command` in a pod, which is the command itself."""
    return shlex.join(command)
