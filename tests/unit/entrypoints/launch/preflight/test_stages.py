"""The order of a preflight's stages: everybody alone, then pairs whose partners change, then all."""

from __future__ import annotations

import itertools

import pytest

from imgkit_entrypoints.launch.preflight import verdict
from imgkit_entrypoints.launch.preflight.verdict import Stage


def all_stages(nodes: int, *, absent: tuple[int, ...] = (), suspects: tuple[int, ...] = ()) -> list[Stage]:
    found = (
        verdict.stage(number, range(nodes), absent=absent, suspects=suspects) for number in itertools.count()
    )
    return [one for one in itertools.takewhile(lambda one: one is not None, found) if one]


def partners(found: list[Stage], node: int) -> list[int]:
    return [
        other for one in found if one.kind == "pair" for pair in one.groups if node in pair for other in pair
        if other != node
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", range(2, 20))
def test_all_rounds_together_pair_everybody_once(nodes: int) -> None:
    rounds = [verdict.pairs(nodes, turn) for turn in range(nodes + nodes % 2 - 1)]
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(nodes), 2))
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs), "one partner at a time"


@pytest.mark.parametrize("nodes", [4, 5, 8, 17, 100, 4096])
def test_three_rounds_give_different_partners(nodes: int) -> None:
    found = all_stages(nodes)
    assert [one.kind for one in found] == ["alone", "alone", "pair", "pair", "pair", "all"]
    for node in (0, 1, nodes - 1):
        met = partners(found, node)
        assert len(set(met)) == len(met) >= (3 if nodes % 2 == 0 else 2)


def test_odd_number_lets_one_rest() -> None:
    found = [one for one in all_stages(3) if one.kind == "pair"]
    assert [len(one.groups) for one in found] == [1, 1, 1]
    assert {pair for one in found for pair in one.groups} == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize(
    ("nodes", "kinds"), [(1, ["alone", "alone"]), (2, ["alone", "alone", "pair", "all"])]
)
def test_few_nodes_have_fewer_stages(nodes: int, kinds: list[str]) -> None:
    assert [one.kind for one in all_stages(nodes)] == kinds


def test_absent_node_leaves_its_partners_free() -> None:
    found = all_stages(6, absent=(4,))
    assert partners(found, 4) == []
    whole = all_stages(6)
    for node in (0, 1, 2, 3, 5):
        assert partners(found, node) == [other for other in partners(whole, node) if other != 4]
    assert found[-1].groups == ((0, 1, 2, 3, 5),)


def test_only_suspects_measure_alone_again() -> None:
    first, again = all_stages(4, suspects=(1, 3), absent=(3,))[:2]
    assert first.groups == ((0,), (1,), (2,))
    assert again.groups == ((1,),)
    assert again.limit_s < first.limit_s


def test_all_stages_together_stay_within_a_minute() -> None:
    assert sum(one.limit_s for one in all_stages(64, suspects=(1,))) <= 60


def test_nobody_left_means_no_further_measurement() -> None:
    assert [one.groups for one in all_stages(2, absent=(0, 1))] == [(), (), ()]
