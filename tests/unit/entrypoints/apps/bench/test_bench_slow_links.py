"""The nodes and links that --matrix names as slow."""

from __future__ import annotations

from imgkit_entrypoints.apps.bench import matrix

HOSTS = ("n1", "n2", "n3", "n4")
N3_SLOW = {(0, 2): 2.0, (1, 2): 2.1, (2, 3): 1.9}


def square(slow: dict[tuple[int, int], float], nodes: int = 4) -> matrix.Matrix:
    return tuple(
        tuple(0.0 if a == b else slow.get((min(a, b), max(a, b)), 10.0) for b in range(nodes))
        for a in range(nodes)
    )


def test_slow_link_is_named() -> None:
    (text,) = matrix.sentences([square({(1, 3): 2.0})], HOSTS)
    assert text.startswith("SLOW LINK: n2 - n4 at 2 GBps, 20 %")


def test_slow_node_is_named_once() -> None:
    (text,) = matrix.sentences([square(N3_SLOW)], HOSTS)
    assert text.startswith("SLOW NODE: n3")


def test_even_links_name_nobody() -> None:
    assert matrix.sentences([square({(0, 1): 8.0})], HOSTS) == [
        "No slow link: every link reaches at least 70 % of its nodes' best."
    ]


def test_one_link_alone_is_not_judged() -> None:
    assert "nothing to compare it with" in matrix.sentences([square({}, 2)], HOSTS[:2])[0]
    assert matrix.slow([square({(0, 1): 0.1}, 2)], HOSTS[:2]) == ()


def names(*rails: matrix.Matrix, hosts: tuple[str, ...] = HOSTS) -> list[str]:
    return [part.sentence.partition(" exchanges")[0] for part in matrix.slow(rails, hosts)]


def test_one_end_of_a_rail_is_named() -> None:
    assert names(square({}), square(N3_SLOW)) == ["SLOW RAIL: local rank 1 on n3"]


def test_node_whose_rails_are_all_slow_is_one_node() -> None:
    assert names(square(N3_SLOW), square(N3_SLOW)) == ["SLOW NODE: n3"]


def test_rail_that_is_slow_everywhere_is_one_rail() -> None:
    everywhere = {(a, b): 2.0 for a in range(4) for b in range(a + 1, 4)}
    assert names(square({}), square(everywhere)) == ["SLOW RAIL: local rank 1"]


def test_two_nodes_compare_their_rails() -> None:
    assert names(square({}, 2), square({(0, 1): 3.0}, 2), hosts=HOSTS[:2]) == ["SLOW RAIL: local rank 1"]


def test_slow_link_of_one_rail_is_named_with_it() -> None:
    (part,) = matrix.slow([square({(1, 3): 2.0}), square({})], HOSTS)
    assert part.name == "n2 - n4 by local rank 0"
