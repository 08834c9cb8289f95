"""The ranks that run a collective together, and the node of every rank."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """What a rank knows about its own place."""

    number: str
    """torchrun's number of the node; empty without torchrun."""
    host: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The node of one rank."""

    rank: int
    local_rank: int
    host: str
    """The node's name, with the node's number where several nodes share the name."""
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that run a collective together."""

    torch_group: Any
    """torch's process group; None for all ranks."""
    ranks: tuple[int, ...]
    rank: int
    """This process' rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


def locations(here: Ranks) -> tuple[RankLocation, ...]:
    """Locate every rank; a collective call."""
    number, host = os.environ.get("GROUP_RANK", ""), platform.node()
    return located(here.gather(RankHost(number=number, host=host, local_rank=here.local_rank), RankHost))


def located(found: Sequence[RankHost]) -> tuple[RankLocation, ...]:
    """Locations from what every rank knows, in the order of the ranks."""
    nodes: dict[tuple[str, str], int] = {}
    for one in found:
        nodes.setdefault((one.number, one.host), len(nodes))
    names = [host for _, host in nodes]
    return tuple(
        RankLocation(
            rank=rank,
            local_rank=one.local_rank,
            host=f"{one.host} (node {nodes[one.number, one.host]})"
            if names.count(one.host) > 1
            else one.host,
            node=nodes[one.number, one.host],
        )
        for rank, one in enumerate(found)
    )


def first_ranks(all_ranks: Sequence[RankLocation]) -> list[int]:
    """The first rank of each node."""
    found: dict[int, int] = {}
    for one in all_ranks:
        found.setdefault(one.node, one.rank)
    return [found[node] for node in sorted(found)]


def members(kind: str, all_ranks: Sequence[RankLocation], asked: str = "") -> tuple[tuple[int, ...], ...]:
    """The ranks of every group: one for all ranks, one per node, or one per local rank.

    `asked` is the option that needs the groups, for the error.

    Raises
    ------
    UsageError : the groups have different sizes, so that no figure holds for all of them.
    """
    if kind == "world":
        return (tuple(one.rank for one in all_ranks),)
    groups: dict[int, list[int]] = {}
    for one in all_ranks:
        groups.setdefault(one.node if kind == "node" else one.local_rank, []).append(one.rank)
    if len({len(ranks) for ranks in groups.values()}) > 1:
        raise UsageError(
            "the nodes have different numbers of ranks",
            where=asked or f"--group {kind}",
            hint="start with the same --nproc N on every node",
        )
    return tuple(tuple(ranks) for ranks in groups.values())


def joined(
    kind: str, all_ranks: Sequence[RankLocation], here: Ranks, number: int = 1
) -> tuple[RankGroup, ...]:
    """Make all groups, `number` communicators of each, and return this rank's; a collective call."""
    import torch.distributed as dist

    mine: list[RankGroup] = []
    for ranks in members(kind, all_ranks):
        for again in range(number):
            whole = kind == "world" and not again
            group = (
                None if whole else dist.new_group(list(ranks))
            )  # every rank must call this, members or not
            if here.rank in ranks:
                mine.append(RankGroup(torch_group=group, ranks=ranks, rank=ranks.index(here.rank)))
    return tuple(mine)
