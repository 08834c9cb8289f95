"""The sizes that a run measures, and how often a collective is run at each size.

Users write a size as ``4G`` (4 GiB, as in nccl-tests) or ``4GB`` (4e9 bytes). Messages show both units.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BINARY_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL_FACTORS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
# "64" and "64B" have no prefix, "64M" and "64MIB" have a binary prefix, and "64MB" has a decimal prefix.
_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)((?P<binary>[KMGT])(IB)?|(?P<decimal>[KMGT])?B)?")


def parse_size(text: str) -> int:
    """Parse ``64M`` or ``64MiB`` (powers of 1024), ``64MB`` (powers of 1000) or ``64`` into bytes.

    Raises
    ------
    argparse.ArgumentTypeError : the text is not a size, or the size is less than one byte.
    """
    size_bytes = 0.0
    match = _SIZE.fullmatch(text.strip().upper())
    if match is not None:
        size_bytes = float(match["number"])
        if match["binary"]:
            size_bytes *= _BINARY_FACTORS[match["binary"]]
        elif match["decimal"]:
            size_bytes *= _DECIMAL_FACTORS[match["decimal"]]
    if size_bytes < 1 or not size_bytes.is_integer():  # 0 also means that the text has another form
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: 64M is 64 x 1024 x 1024 bytes, 64MB is 64e6"
        )
    return int(size_bytes)


def format_binary(size_bytes: int) -> str:
    """Format a size in powers of 1024 with about three digits: ``4GiB``, ``3.7GiB``."""
    return _format(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_size(size_bytes: int) -> str:
    """Format a size in powers of 1024 and of 1000: ``4GiB (4.29GB)``. If both are equal, show only one."""
    with_1024 = format_binary(size_bytes)
    with_1000 = _format(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))
    if with_1024 == with_1000:
        return with_1024
    return f"{with_1024} ({with_1000})"


def _format(size_bytes: int, step: int, units: tuple[str, ...]) -> str:
    """Format a size in the largest unit that is not larger than the size: 3,000,000 gives ``3MB``.

    Parameters
    ----------
    step : factor between a unit and the next larger unit, which is 1000 or 1024.
    """
    size_in_unit = float(size_bytes)
    power = 0
    while size_in_unit >= step and power < len(units) - 1:
        size_in_unit /= step
        power += 1
    # With three digits, 1023KiB would be printed as 1.02e+03KiB.
    digits = 4 if size_in_unit >= 1000 else 3
    return f"{size_in_unit:.{digits}g}{units[power]}"


def iterate_sizes(min_bytes: int, max_bytes: int, factor: int) -> Iterator[int]:
    """Yield the sizes from `min_bytes` up to `max_bytes`. Each size is `factor` times the previous one."""
    size_bytes = min_bytes
    while size_bytes <= max_bytes:
        yield size_bytes
        size_bytes *= factor


# Number of batches for one size. A batch is a number of launches with one wait, and gives one measured time.
MIN_BATCHES, MAX_BATCHES = 5, 50
# If batches would have more launches than this, the number of batches is increased instead.
BATCH_LAUNCHES = 10
# Limit for the launches in all batches together.
MAX_LAUNCHES = 1000
# Number of iterations whose values are verified. Several are needed to find errors that occur only sometimes.
MIN_VERIFIED, MAX_VERIFIED = 20, 200
# Largest factor between the numbers of launches for two successive sizes. If the sizes themselves differ by a
# larger factor, that factor applies.
MAX_STEP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often a collective is run at one size. The counts are the same on all ranks."""

    size_bytes: int
    batches: int
    launches: int
    """Number of launches in each batch."""

    @property
    def total(self) -> int:
        """Number of launches in all batches together."""
        return self.batches * self.launches

    @property
    def verified(self) -> int:
        """Number of iterations whose values are verified."""
        return min(MAX_VERIFIED, max(MIN_VERIFIED, self.total))


def plan_counts(
    size_bytes: int, launches_that_fit: float, *, iters: int | None, previous: Counts | None
) -> Counts:
    """Return how often a collective is run at one size. A launch is one call of the collective.

    Parameters
    ----------
    launches_that_fit : number of launches that fit into the time budget, by a first estimate that may be far
        off.
    iters : number of launches that the user has requested, or None.
    previous : counts of the previous size, or None for the first size.
    """
    total = iters
    if total is None:
        total = _plan_launches(size_bytes, launches_that_fit, previous)
    # Many launches mean that each is short. Long batches then keep the constant cost of a batch, which is a
    # wait and two readings of the clock, small in comparison.
    batches = min(MAX_BATCHES, max(MIN_BATCHES, total // BATCH_LAUNCHES))
    return Counts(size_bytes=size_bytes, batches=batches, launches=math.ceil(total / batches))


def _plan_launches(size_bytes: int, launches_that_fit: float, previous: Counts | None) -> int:
    """Return the number of launches in all batches together, from 5 to 1000.

    The number changes only little from one size to the next. So a wrong estimate causes neither too few
    launches nor a measurement of several minutes.

    Parameters
    ----------
    launches_that_fit : estimate of how many launches fit into the time budget.
    previous : counts of the previous size, or None for the first size.
    """
    total = max(launches_that_fit, MIN_BATCHES)
    if previous is not None:
        # At least half as many launches as before, and at most twice as many. If the size has grown by more
        # than a factor of 2, the number of launches may decrease by the same factor.
        size_ratio = size_bytes / previous.size_bytes
        least = previous.total / max(MAX_STEP, size_ratio)
        most = previous.total * MAX_STEP
        total = min(most, max(least, total))
    return int(min(total, MAX_LAUNCHES))
