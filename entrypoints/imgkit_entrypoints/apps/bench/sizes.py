"""The sizes of a sweep, and how often each is run.

Users write sizes as ``4G`` (GiB as in nccl-tests) or ``4GB`` (4e9 bytes), and tables print both. The counts
of a size are its batches, the launches in each, and its single iterations.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Parse ``64M`` or ``64MiB`` (powers of 1024), ``64MB`` (powers of 1000) or ``64`` into bytes.

    Raises
    ------
    argparse.ArgumentTypeError : the text is not a size above zero.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(|IB|B)", text.strip().upper())
    if found:
        unit = (_DECIMAL if found[3] == "B" else _BINARY)[found[2]]
        value = float(found[1]) * unit
        if value >= 1 and value == int(value) and (found[2] or found[3] != "IB"):
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: 64M is 64 x 1024 x 1024 bytes, 64MB is 64e6")


def binary(size_bytes: int) -> str:
    """Write with powers of 1024 and three digits: ``4GiB``, ``3.7GiB``."""
    return _written(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal(size_bytes: int) -> str:
    """Write with powers of 1000 and three digits: ``4GB``, ``4.29GB``."""
    return _written(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def both(size_bytes: int) -> str:
    """Write both ways: ``4GiB (4.29GB)``, or once where they are equal."""
    one, other = binary(size_bytes), decimal(size_bytes)
    return one if one == other else f"{one} ({other})"


def _written(size_bytes: int, step: int, units: tuple[str, ...]) -> str:
    value, place = float(size_bytes), 0
    while value >= step and place < len(units) - 1:
        value, place = value / step, place + 1
    return f"{value:.4g}{units[place]}" if value >= 1000 else f"{value:.3g}{units[place]}"


def swept(least: int, most: int, factor: int) -> Iterator[int]:
    """Yield `least`, `least` x `factor`, ... up to `most`."""
    now = least
    while now <= most:
        yield now
        now *= factor


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
