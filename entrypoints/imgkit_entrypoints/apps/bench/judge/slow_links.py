"""Slow nodes and slow links, from the matrix that ``--matrix`` measured."""

from __future__ import annotations

from collections.abc import Sequence

from imgkit_entrypoints.apps.bench.measure.matrix import Matrix

SLOW = 0.7
"""Share of a link's expected bandwidth below which it is named."""


def sentences(matrix: Matrix, hosts: Sequence[str]) -> list[str]:
    """Name each node whose best link is slow, and each slow link between two other nodes."""
    if len(hosts) < 3:
        return ["Two nodes have one link, so there is nothing to compare it with."]
    best = [max(row) for row in matrix]
    top = max(best)
    slow = [node for node, value in enumerate(best) if value < SLOW * top]
    result = [
        f"SLOW NODE: {hosts[node]} exchanges at most {best[node]:.3g} GBps with any other node, "
        f"{100 * best[node] / top:.0f} % of the best link. Check its port and cable."
        for node in slow
    ]
    for one in range(len(hosts)):
        for other in range(one + 1, len(hosts)):
            expected = min(best[one], best[other])
            if one not in slow and other not in slow and matrix[one][other] < SLOW * expected:
                result.append(
                    f"SLOW LINK: {hosts[one]} - {hosts[other]} at {matrix[one][other]:.3g} GBps, "
                    f"{100 * matrix[one][other] / expected:.0f} % of what both reach with other nodes. "
                    "Check the path between them."
                )
    return result or [f"No slow link: every link reaches at least {100 * SLOW:.0f} % of its nodes' best."]
