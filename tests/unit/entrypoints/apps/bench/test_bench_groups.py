"""The groups of ranks, and the pairs of nodes of --matrix."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench import machine, matrix
from imgkit_entrypoints.errors import UsageError


def at(number: str, host: str, local_rank: int) -> machine.RankHost:
    return machine.RankHost(number=number, host=host, local_rank=local_rank)


@pytest.mark.parametrize("nodes", range(2, 10))
def test_tournament_meets_every_pair_once(nodes: int) -> None:
    found = matrix.rounds(nodes)
    assert len(found) == nodes - 1 + nodes % 2
    pairs = [pair for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in found)


def test_rails_join_equal_local_ranks() -> None:
    ranks = machine.located([at("0", "a", 0), at("0", "a", 1), at("1", "b", 0), at("1", "b", 1)])
    assert machine.group_members("rail", ranks) == ((0, 2), (1, 3))
    assert machine.group_members("node", ranks) == ((0, 1), (2, 3))


def test_nodes_of_one_name_stay_apart() -> None:
    ranks = machine.located([at("0", "pod", 0), at("1", "pod", 0)])
    assert [one.host for one in ranks] == ["pod (node 0)", "pod (node 1)"]


def test_uneven_nodes_have_no_rails() -> None:
    ranks = machine.located([at("0", "a", 0), at("0", "a", 1), at("1", "b", 0)])
    with pytest.raises(UsageError, match="different numbers of ranks"):
        machine.group_members("rail", ranks)
