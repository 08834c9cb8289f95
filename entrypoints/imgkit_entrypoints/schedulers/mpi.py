"""What the MPI launchers share: they start ranks, and say nothing of nodes beyond how many ranks are here.

With one rank on each node a rank is a node and torchrun starts the workers; with several, every process is
already a rank (direct mode).

Notes
-----
No launcher gives a host list or the head's address: IMGKIT_NODES or IMGKIT_HEAD must be handed in, or PBS'
node file be readable. Binding must be off (``--bind-to none``): by default all workers of a node share one
core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import (
    NODES,
    first,
    given_nodes,
    head_of,
    hostname,
    node_file,
    number,
    port_in,
    present,
    variable,
)
from imgkit_entrypoints.schedulers.placement import Direct, Placement, Read, WrongStart


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVariables:
    """Field -> variables of one launcher, the first that is set counts."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    job_id: tuple[str, ...]
    """Only what every rank gets: the port is computed from it. All that are set make up the id."""
    hand_in: str
    """How the launcher sets variable {name} to {value} for its processes."""

    @property
    def variables(self) -> tuple[str, ...]:
        """All that a container must be handed."""
        ranks = (*self.rank, *self.world_size, *self.local_rank, *self.local_world_size)
        return (*ranks, *self.node_rank, *self.job_id)

    def handing(self, name: str, value: str) -> str:
        """The words that hand a variable to all processes."""
        return self.hand_in.format(name=name, value=value)


def place_rank(name: str, fields: RankVariables, env: Mapping[str, str], read: Read) -> Placement:
    """The place of a process that launcher `name` started.

    Raises
    ------
    WrongStart : it was started on one node only of a list of several.
    NoPlan : nothing says where node 0 is, or the numbers contradict each other.
    """
    hosts, hosts_from = _hosts(env, read)
    size_from, local_from = first(env, fields.world_size), first(env, fields.local_world_size)
    if not hosts and not (size_from and local_from):
        missing = ", ".join(fields.local_world_size if size_from else fields.world_size)
        raise NoPlan(
            f"none of {missing} is set and no list of hosts, so the number of nodes is unknown",
            where=name,
            hint=f"start it with `{fields.handing(NODES, 'HOST,HOST,...')} ...`, in the order of the ranks",
        )
    local = number(env, local_from, least=1) if local_from else max(1, number(env, size_from) // len(hosts))
    size = number(env, size_from, least=1) if size_from else local * len(hosts)
    rank_from = variable(env, fields.rank)
    rank, local_rank = number(env, rank_from), _local_rank(fields, env, local)
    if size % local:
        raise NoPlan(
            f"{size} ranks, {local} of them on this node: nodes have different numbers of ranks",
            where=", ".join(f"{item}={env[item]}" for item in (size_from, local_from) if item),
            hint="start the same number on every node, best one: the workers are started here",
        )
    nnodes = size // local
    if rank >= size:
        raise NoPlan(f"rank {rank} of {size}", where=f"{rank_from}={rank}, {size_from}={size}")
    _compare(name, fields, nnodes, hosts, hosts_from, size_from or local_from)
    direct = (
        Direct(rank=rank, local_rank=local_rank, world_size=size, local_world_size=local)
        if local > 1
        else None
    )
    node_rank, node_rank_from = _node_rank(fields, env, rank, local_rank, local, nnodes)
    head, head_from = head_of(env, nnodes, hosts, hosts_from, "MASTER_ADDR")
    if nnodes > 1 and not head:
        known = hostname(read) if rank == 0 else ""
        raise NoPlan(
            f"{nnodes} nodes, and {name} does not say which host has rank 0",
            where="IMGKIT_HEAD",
            hint=f"add {fields.handing('IMGKIT_HEAD', known or 'HOST')}: the host of rank 0 as the others "
            f"reach it",
        )
    names = present(env, *fields.job_id)
    source = {
        "nnodes": ", ".join(filter(None, (size_from or hosts_from, local_from))),
        "node_rank": node_rank_from,
        "hosts": hosts_from,
        "head": head_from,
        "job_id": ", ".join(names),
    }
    port = port_in(env, "MASTER_PORT") if head_from == "MASTER_ADDR" else None
    if port is not None:
        source["port"] = "MASTER_PORT"
    return Placement(
        scheduler=name,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=head,
        port=port,
        job_id=".".join(env[name] for name in names),
        source=source,
        direct=direct,
    )


def _hosts(env: Mapping[str, str], read: Read) -> tuple[tuple[str, ...], str]:
    if given := given_nodes(env):
        return given, NODES
    if found := node_file(env, read):
        return found, "PBS_NODEFILE"
    return (), ""


def _local_rank(fields: RankVariables, env: Mapping[str, str], local: int) -> int:
    name = first(env, fields.local_rank)
    if not name and local == 1:
        return 0
    rank = number(env, name or fields.local_rank[0])
    if rank >= local:
        raise NoPlan(f"local rank {rank} of {local} ranks on this node", where=name)
    return rank


def _compare(
    name: str, fields: RankVariables, nnodes: int, hosts: tuple[str, ...], hosts_from: str, counted: str
) -> None:
    """Hold the number of nodes against the list of hosts, where there is one."""
    if not hosts or len(hosts) == nnodes:
        return
    if nnodes == 1:
        raise WrongStart(
            f"{name} started this on 1 node, the job has {len(hosts)} ({', '.join(hosts[:8])})",
            where=f"{hosts_from}, {counted}",
            nnodes=len(hosts),
        )
    raise NoPlan(
        f"{name} started {nnodes} nodes, {hosts_from} lists {len(hosts)}: {', '.join(hosts[:8])}",
        where=f"{hosts_from}, {counted}",
        hint=f"add {fields.handing(NODES, 'HOST,HOST,...')} with the {nnodes} hosts, in the order of the "
        f"ranks",
    )


def _node_rank(
    fields: RankVariables, env: Mapping[str, str], rank: int, local_rank: int, local: int, nnodes: int
) -> tuple[int, str]:
    if name := first(env, fields.node_rank):
        node = number(env, name)
        if node >= nnodes:
            raise NoPlan(f"node {node} of {nnodes}", where=f"{name}={node}")
        return node, name
    name = first(env, fields.rank)
    if rank % local != local_rank and rank // nnodes == local_rank:
        return rank % nnodes, name  # ranks were dealt out round the nodes
    return rank // local, name  # ranks fill a node before the next
