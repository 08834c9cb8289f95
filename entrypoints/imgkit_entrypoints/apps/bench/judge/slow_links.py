"""Slow nodes, rails and links, from the bandwidths that ``--matrix`` measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.measure.matrix import Matrix

SLOW = 0.7
"""Share of a link's expected bandwidth below which it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A node, a rail, one end of a rail or a link that is slow."""

    name: str
    sentence: str


def slow(rails: Sequence[Matrix], hosts: Sequence[str]) -> tuple[SlowPart, ...]:
    """Name what is slow, each cause once: a rail on all nodes, a node, one node's end of a rail, a link.

    `rails` holds one matrix for each local rank, or a single one that stands for the nodes.
    """
    if _alone(rails, hosts):
        return ()
    best = [[max(row) for row in matrix] for matrix in rails]
    top = max(map(max, best))
    bad = {
        (rail, node)
        for rail, ends in enumerate(best)
        for node, value in enumerate(ends)
        if value < SLOW * top
    }
    nodes = range(len(hosts))
    whole_rails = [rail for rail in range(len(rails)) if all((rail, node) in bad for node in nodes)]
    whole_nodes = [node for node in nodes if all((rail, node) in bad for rail in range(len(rails)))]
    parts: list[SlowPart] = []
    for rail in whole_rails:
        at_most = _share(max(best[rail]), top)
        name = f"local rank {rail}"
        parts.append(
            _part("RAIL", name, f"{at_most} on every node. Check the switch and ports of that rail.")
        )
    for node in whole_nodes:
        at_most = _share(max(ends[node] for ends in best), top)
        parts.append(_part("NODE", hosts[node], f"{at_most}. Check its port and cable."))
    for rail, node in sorted(bad):
        if rail not in whole_rails and node not in whole_nodes:
            name = f"local rank {rail} on {hosts[node]}"
            at_most = _share(best[rail][node], top)
            parts.append(_part("RAIL", name, f"{at_most}. Check the network port next to it, and its cable."))
    return (*parts, *_links(rails, hosts, best, bad))


def sentences(rails: Sequence[Matrix], hosts: Sequence[str]) -> list[str]:
    """The sentence of everything that is slow, or that nothing is."""
    if _alone(rails, hosts):
        return ["Two nodes have one link, so there is nothing to compare it with."]
    found = [part.sentence for part in slow(rails, hosts)]
    return found or [f"No slow link: every link reaches at least {100 * SLOW:.0f} % of its nodes' best."]


def _alone(rails: Sequence[Matrix], hosts: Sequence[str]) -> bool:
    return len(hosts) < 3 and len(rails) < 2


def _part(kind: str, name: str, rest: str) -> SlowPart:
    return SlowPart(name=name, sentence=f"SLOW {kind}: {name} exchanges {rest}")


def _share(value: float, top: float) -> str:
    return f"at most {value:.3g} GBps with any other node, {100 * value / top:.0f} % of the best link"


def _links(
    rails: Sequence[Matrix],
    hosts: Sequence[str],
    best: Sequence[Sequence[float]],
    bad: set[tuple[int, int]],
) -> Iterator[SlowPart]:
    """The slow links between two ends that are not slow themselves."""
    for rail, matrix in enumerate(rails):
        where = f" by local rank {rail}" if len(rails) > 1 else ""
        for one in range(len(hosts)):
            for other in range(one + 1, len(hosts)):
                expected = min(best[rail][one], best[rail][other])
                value = matrix[one][other]
                if {(rail, one), (rail, other)} & bad or value >= SLOW * expected:
                    continue
                name = f"{hosts[one]} - {hosts[other]}{where}"
                yield SlowPart(
                    name=name,
                    sentence=f"SLOW LINK: {name} at {value:.3g} GBps, {100 * value / expected:.0f} % "
                    "of what both reach with other nodes. Check the path between them.",
                )
