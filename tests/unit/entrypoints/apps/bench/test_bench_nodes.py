"""The nodes of the ranks: their names, and the refusal of uneven ones."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench import machine
from imgkit_entrypoints.apps.bench.machine import RankNode
from imgkit_entrypoints.errors import UsageError


def names(*rank_nodes: tuple[str, str]) -> tuple[str, ...]:
    return machine.node_names([RankNode(number=number, host=host) for number, host in rank_nodes])


def test_ranks_of_a_node_share_its_name() -> None:
    assert names(("0", "a"), ("0", "a"), ("1", "b"), ("1", "b")) == ("a", "a", "b", "b")


def test_nodes_of_one_name_stay_apart() -> None:
    assert names(("0", "pod"), ("1", "pod")) == ("pod (node 0)", "pod (node 1)")


def test_ranks_of_each_node_are_counted() -> None:
    assert machine.ranks_per_node(names(("0", "a"), ("0", "a"), ("1", "b"), ("1", "b"))) == 2


def test_uneven_nodes_are_refused_with_the_option_that_helps() -> None:
    with pytest.raises(UsageError, match="different numbers of ranks: 2 on a, 1 on b") as caught:
        machine.ranks_per_node(["a", "a", "b"])
    assert (caught.value.hint or "").startswith("--nproc 1 ")
