"""Pods of a training operator (Kubeflow v1, Trainer v2, RunAI): the operator starts one process per pod.

Notes
-----
The same words mean different things. RANK and WORLD_SIZE count pods in operator v1 as the RunAI tutorials
know it, but WORLD_SIZE is pods x processes in later ones, which also set PET_NNODES and PET_NODE_RANK: PET_*
win wherever they are set. Empty ones (``PET_STANDALONE=""``) count as not set. Source:
kubeflow/training-operator pkg/controller.v1/pytorch/{envvar,elastic}.go.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import (
    first,
    head_of,
    named_hosts,
    node_range,
    number,
    port_in,
    present,
)
from imgkit_entrypoints.schedulers.placement import Placement, Read

NAME = "kubeflow"

FIELDS: Mapping[str, tuple[str, ...]] = {
    "nnodes": ("PET_NNODES", "WORLD_SIZE"),
    "node_rank": ("PET_NODE_RANK", "RANK"),
    "head": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "port": ("PET_MASTER_PORT", "MASTER_PORT"),
    "job_id": ("PET_RDZV_ID",),
}

OWN: tuple[str, ...] = ("PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT")
"""Set by operators alone; RANK and the like are anybody's."""

FORWARD: tuple[str, ...] = ()
"""Variables that a job must hand to the processes: the operator sets all."""


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that show a pod of a training operator; empty in a worker, which has RANK too."""
    if present(env, "LOCAL_RANK"):
        return ()
    plain = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    return (*present(env, *OWN), *(plain if present(env, *plain) == plain else ()))


def place(env: Mapping[str, str], read: Read) -> Placement:
    """The pod that this process runs in.

    Raises
    ------
    NoPlan : the rank is not below the number of pods, or nothing says where the first pod is.
    """
    nnodes_from = first(env, FIELDS["nnodes"])
    least, nnodes = node_range(env, nnodes_from or "PET_NNODES")
    nnodes = number(env, "PET_NNODES") if nnodes is None else nnodes
    wanted = env.get("IMGKIT_NNODES", "")
    if nnodes_from == "WORLD_SIZE" and wanted.isdigit():
        # The only number here that cannot be taken at its word: pods for one operator, processes for another.
        nnodes, nnodes_from = int(wanted), "IMGKIT_NNODES"
    rank_from = first(env, FIELDS["node_rank"])
    node_rank = number(env, rank_from or "PET_NODE_RANK") if nnodes > 1 else 0
    if node_rank >= nnodes:
        raise NoPlan(
            f"this is pod {node_rank}, and {nnodes_from} says {nnodes} in all",
            where=f"{rank_from}={node_rank}, {nnodes_from}={nnodes}",
            hint="give --nnodes with the number of pods (RunAI: workers + 1)",
        )
    hosts, hosts_from = named_hosts(env, nnodes, (), "")
    head, head_from = head_of(env, nnodes, hosts, hosts_from, *FIELDS["head"])
    port_from = first(env, FIELDS["port"])
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    if nnodes > 1 and endpoint and head_from not in ("IMGKIT_HEAD", "IMGKIT_NODES", "PET_MASTER_ADDR"):
        head, _, port = endpoint.partition(":")
        head_from = "PET_RDZV_ENDPOINT"
        if port:
            env, port_from = {**env, "PET_RDZV_ENDPOINT": port}, "PET_RDZV_ENDPOINT"
    if nnodes > 1 and not head:
        raise NoPlan(
            f"{nnodes} pods, and nothing says where the first one is",
            where=", ".join(FIELDS["head"]),
            hint="give --head HOST, the first pod as the others reach it",
        )
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=head,
        port=port_in(env, port_from) if port_from and nnodes > 1 else None,
        job_id=env.get("PET_RDZV_ID", ""),
        min_nnodes=least,
        source={
            "nnodes": nnodes_from,
            "node_rank": rank_from,
            "hosts": hosts_from,
            "head": head_from,
            "port": port_from if nnodes > 1 else "",
            "job_id": first(env, FIELDS["job_id"]),
        },
    )


def start_argv(command: Sequence[str]) -> tuple[str, ...]:
    """The words of a pod's command: the operator runs them once in each."""
    return tuple(command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """The command of a pod."""
    return shlex.join(start_argv(command))
