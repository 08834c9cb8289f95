"""How often one size is run: the number of batches, the launches in each, and the single iterations."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

LEAST_BATCHES, MOST_BATCHES = 5, 50
"""Batches of one size: their median and their spread are the result."""
LAUNCHES = 10
"""Launches in a batch from which on a size gets more batches instead of longer ones."""
MOST_LAUNCHES = 1000
"""Launches of all batches together."""
LEAST_SINGLE, MOST_SINGLE = 20, 200
STEP = 2.0
"""Largest factor between the launches of neighbouring sizes, or the factor of the sizes if that is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of one size, the same on all ranks."""

    size_bytes: int
    batches: int
    launches: int
    """Launches in each batch."""
    singles: int

    @property
    def total(self) -> int:
        """Launches of all batches together."""
        return self.batches * self.launches

    def turns(self) -> tuple[tuple[int, int], ...]:
        """Batches and single iterations in each of `LEAST_BATCHES` turns.

        They take turns so that a slow phase of the machine does not meet all batches of a size.
        """
        ends = [
            (self.batches * turn // LEAST_BATCHES, self.singles * turn // LEAST_BATCHES)
            for turn in range(LEAST_BATCHES + 1)
        ]
        return tuple((b - a, d - c) for (a, c), (b, d) in itertools.pairwise(ends))


def planned(
    size_bytes: int,
    *,
    fitting: float,
    iters: int | None,
    checked: bool,
    before: Counts | None,
) -> Counts:
    """Plan one size.

    `fitting` iterations fit into the time budget, by a first guess that may be far off; `iters`, if given, is
    the number that the user wants. The counts `before` are those of the size before this one.
    """
    total = float(iters or min(MOST_LAUNCHES, max(LEAST_BATCHES, fitting)))
    if before and not iters:
        step = max(STEP, size_bytes / before.size_bytes)
        total = min(max(total, before.total / step, LEAST_BATCHES), before.total * STEP, MOST_LAUNCHES)
    batches = int(min(MOST_BATCHES, max(LEAST_BATCHES, total // LAUNCHES)))
    least = LEAST_SINGLE if checked else 1  # intermittent errors need iterations to show
    return Counts(
        size_bytes=size_bytes,
        batches=batches,
        launches=-(-int(total) // batches),
        singles=max(least, iters or min(MOST_SINGLE, int(total))),
    )
