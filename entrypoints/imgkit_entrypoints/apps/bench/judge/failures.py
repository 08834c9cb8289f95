"""The reasons for which a finished run still ends with exit code 1, for one line at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.judge import slow_links, verdict
from imgkit_entrypoints.apps.bench.measure.matrix import Matrix
from imgkit_entrypoints.apps.bench.requirement import Requirement

NAMED = 4
"""Most names in the line; the sentences above it have all of them."""


def line(reasons: Sequence[str]) -> str:
    """The last line of a run that failed."""
    return f"FAILED: {'; '.join(reasons)}."


def wrong_values(count: int) -> Iterator[str]:
    """Yield the reason if elements were wrong."""
    if count:
        yield f"{count} elements were wrong, so run dist-doctor before you train here"


def slow_parts(rails: Sequence[Matrix], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the reason if ``--matrix`` found something slow."""
    names = [part.name for part in slow_links.slow(rails, hosts)]
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"slow, by --matrix: {', '.join(names[:NAMED])}{more}"


def missed(
    asked: Requirement | None, largest: Sequence[verdict.Largest], context: verdict.RunContext
) -> Iterator[str]:
    """Yield a reason for each collective that misses `asked` at its largest size.

    A percentage is what the ports counted, or else the least that the algorithm can have sent.
    """
    if asked is None:
        return
    if not largest:
        yield f"nothing was measured that could reach the {asked} of --require"
    for item in largest:
        at = f"{item.op.name} of {sizes.both(item.size_bytes)} reached"
        if asked.GBps is not None and item.busbw_GBps < asked.GBps:
            yield f"{at} {item.busbw_GBps:.4g} GBps of busbw, --require asks for {asked}"
        if asked.percent is None:
            continue
        crossed = verdict.traffic(item, context)
        reached = crossed.best_percent if crossed else None
        if reached is None or reached < asked.percent:
            yield f"{at} {reached or 0.0:.3g} % of the line rate, --require asks for {asked}"


def slow_exchanges(asked: Requirement | None, rails: Sequence[Matrix], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the reason if links of ``--matrix`` are below `asked`."""
    if asked is None or asked.GBps is None:
        return
    links = [
        (matrix[one][other], f"{hosts[one]} - {hosts[other]}")
        for matrix in rails
        for one in range(len(hosts))
        for other in range(one + 1, len(hosts))
    ]
    below = sorted(link for link in links if link[0] < asked.GBps)
    if below:
        value, name = below[0]
        slowest = f"the slowest is {name} with {value:.3g}"
        yield f"{len(below)} of {len(links)} links are below the {asked} of --require, {slowest}"
