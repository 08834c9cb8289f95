"""The nodes and links that --matrix names as slow."""

from __future__ import annotations

from imgkit_entrypoints.apps.bench.judge import slow_links
from imgkit_entrypoints.apps.bench.measure import matrix

HOSTS = ("n1", "n2", "n3", "n4")


def square(slow: dict[tuple[int, int], float], nodes: int = 4) -> matrix.Matrix:
    return tuple(
        tuple(0.0 if a == b else slow.get((min(a, b), max(a, b)), 10.0) for b in range(nodes))
        for a in range(nodes)
    )


def test_slow_link_is_named() -> None:
    (text,) = slow_links.sentences(square({(1, 3): 2.0}), HOSTS)
    assert text.startswith("SLOW LINK: n2 - n4 at 2 GBps, 20 %")


def test_slow_node_is_named_once() -> None:
    (text,) = slow_links.sentences(square({(0, 2): 2.0, (1, 2): 2.1, (2, 3): 1.9}), HOSTS)
    assert text.startswith("SLOW NODE: n3")


def test_even_links_name_nobody() -> None:
    assert slow_links.sentences(square({(0, 1): 8.0}), HOSTS) == [
        "No slow link: every link reaches at least 70 % of its nodes' best."
    ]
    assert "nothing to compare it with" in slow_links.sentences(square({}, 2), HOSTS[:2])[0]
