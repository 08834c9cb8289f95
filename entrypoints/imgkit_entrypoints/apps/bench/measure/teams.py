"""Which ranks work together, and where everybody is."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place."""

    rank: int
    local_rank: int
    host: str
    """Its node's name, with the node's number where several nodes have that name."""
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The ranks that run a collective together; `group` is None for all of them."""

    group: Any
    ranks: tuple[int, ...]
    rank: int
    """This process' place among them."""

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


def seats(here: Ranks) -> tuple[Seat, ...]:
    """Where every rank is; a collective call."""
    import torch.distributed as dist

    found: list[Any] = [None] * here.world_size
    dist.all_gather_object(found, (os.environ.get("GROUP_RANK", ""), platform.node(), here.local_rank))
    return placed(found)


def placed(found: Sequence[tuple[str, str, int]]) -> tuple[Seat, ...]:
    """Seats from (torchrun's node number or empty, host name, local rank) of every rank in order."""
    nodes: dict[tuple[str, str], int] = {}
    for number, host, _ in found:
        nodes.setdefault((number, host), len(nodes))
    names = [host for _, host in nodes]
    return tuple(
        Seat(
            rank=rank,
            local_rank=local_rank,
            host=f"{host} (node {nodes[number, host]})" if names.count(host) > 1 else host,
            node=nodes[number, host],
        )
        for rank, (number, host, local_rank) in enumerate(found)
    )


def members(kind: str, everybody: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
    """Ranks of every team: one of all, one a node, or one a local rank.

    Raises
    ------
    UsageError : they would be of different sizes, and no figure could stand for all.
    """
    if kind == "world":
        return (tuple(seat.rank for seat in everybody),)
    teams: dict[int, list[int]] = {}
    for seat in everybody:
        teams.setdefault(seat.node if kind == "node" else seat.local_rank, []).append(seat.rank)
    if len({len(team) for team in teams.values()}) > 1:
        raise UsageError(
            f"--group {kind}: the nodes have different numbers of ranks",
            hint="give --nproc, the same on all nodes",
        )
    return tuple(tuple(team) for team in teams.values())


def joined(kind: str, everybody: Sequence[Seat], here: Ranks) -> Team:
    """This rank's team; a collective call."""
    import torch.distributed as dist

    mine: Team | None = None
    for ranks in members(kind, everybody):
        group = None if kind == "world" else dist.new_group(list(ranks))  # by all, also by those outside
        if here.rank in ranks:
            mine = Team(group=group, ranks=ranks, rank=ranks.index(here.rank))
    assert mine is not None
    return mine
