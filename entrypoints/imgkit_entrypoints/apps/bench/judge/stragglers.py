"""Who comes late: in a collective that all begin together, the late rank is the one that waits least."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.judge.spread import percentile

PROBE_ITERATIONS = 100
PROBE_BYTES = 8
"""So small that no link, however slow, makes a difference: what is left is the processes."""
LEAST_S = 0.4e-3
"""Median lead of the others from which a rank is late."""
LEAST_SHARED_S = 4e-3
"""The same where ranks share processors: whoever is not running then is late, without being slow."""
LEAST_SHARE = 0.3
"""Of the others' wait; where collectives take long for other reasons, small differences mean nothing."""
USUALLY = 0.25
"""In all iterations but this share it must be half of that; noise is not, however strong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank that keeps the others waiting."""

    rank: int
    seconds: float
    """Median over the iterations."""


def late(waits: Sequence[Sequence[float]], least_s: float = LEAST_S) -> tuple[Late, ...]:
    """The ranks that are late by `least_s`, the latest first; ``waits[rank][iteration]`` in seconds."""
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
