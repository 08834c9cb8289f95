"""Find ranks that come late: in a collective that all start together, the late rank waits least."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.judge.percentiles import percentile

LEAST_S = 0.4e-3
"""Median lead of the other ranks from which a rank counts as late."""
LEAST_SHARED_S = 4e-3
"""The same where ranks share processors: a rank that waits for its processor is late but not slow."""
LEAST_SHARE = 0.3
"""Least lead as a share of the others' wait: in slow collectives, small differences mean nothing."""
USUALLY = 0.25
"""Share of the iterations that may show less than half of the least lead. Strong noise fails this test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank that the others wait for."""

    rank: int
    seconds: float
    """Median lead of the other ranks over the iterations."""


def late(waits: Sequence[Sequence[float]], least_s: float = LEAST_S) -> tuple[Late, ...]:
    """The ranks that are at least `least_s` late, the latest first; ``waits[rank][iteration]`` in seconds."""
    if len(waits) < 2:
        return ()
    found = []
    for rank, mine in enumerate(waits):
        others = [row for other, row in enumerate(waits) if other != rank]
        theirs = [statistics.median(turn) for turn in zip(*others, strict=True)]
        lead = sorted(other - own for other, own in zip(theirs, mine, strict=True))
        middle = percentile(lead, 0.5)
        enough = max(least_s, LEAST_SHARE * statistics.median(theirs))
        if middle >= enough and percentile(lead, USUALLY) >= enough / 2:
            found.append(Late(rank=rank, seconds=middle))
    return tuple(sorted(found, key=lambda item: -item.seconds))
