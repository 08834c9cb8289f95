"""The sizes of a sweep, and how often each is run.

Users write sizes as ``4G`` (GiB as in nccl-tests) or ``4GB`` (4e9 bytes), and messages name both.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Bytes of each prefix: 4G and 4GiB are binary, 4GB is decimal.
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Parse ``64M`` or ``64MiB`` (powers of 1024), ``64MB`` (powers of 1000) or ``64`` into bytes.

    Raises
    ------
    argparse.ArgumentTypeError : the text is not a size above zero.
    """
    size_bytes = 0.0
    # "64", "64B", "64M", "64MiB" or "64MB", but not "64iB"
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:([KMGT])(IB)?|([KMGT]?)B)?", text.strip().upper())
    if match is not None:
        number, binary_prefix, _, decimal_prefix = match.groups()
        size_bytes = float(number) * _BINARY[binary_prefix or ""] * _DECIMAL[decimal_prefix or ""]
    if size_bytes < 1 or not size_bytes.is_integer():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: 64M is 64 x 1024 x 1024 bytes, 64MB is 64e6"
        )
    return int(size_bytes)


def format_binary(size_bytes: int) -> str:
    """Return a size with powers of 1024 and three digits: ``4GiB``, ``3.7GiB``."""
    return _format(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_size(size_bytes: int) -> str:
    """Return a size with powers of 1024 and of 1000: ``4GiB (4.29GB)``, or once where they are equal."""
    with_1024 = format_binary(size_bytes)
    with_1000 = _format(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))
    if with_1024 == with_1000:
        return with_1024
    return f"{with_1024} ({with_1000})"


def _format(size_bytes: int, step: int, units: tuple[str, ...]) -> str:
    """Return a size in the largest of `units` that it reaches: 3,000,000 in steps of 1000 is ``3MB``.

    Parameters
    ----------
    step : how many times larger each unit is than the one before.
    """
    value = float(size_bytes)
    power = 0
    while value >= step and power < len(units) - 1:
        value /= step
        power += 1
    # :.3g would write 1023KiB as 1.02e+03KiB.
    digits = 4 if value >= 1000 else 3
    return f"{value:.{digits}g}{units[power]}"


def iterate_sizes(min_bytes: int, max_bytes: int, factor: int) -> Iterator[int]:
    """Yield the sizes from `min_bytes` to `max_bytes`, each `factor` times the one before."""
    size_bytes = min_bytes
    while size_bytes <= max_bytes:
        yield size_bytes
        size_bytes *= factor


# Batches of one size: their median and their spread are the result.
MIN_BATCHES, MAX_BATCHES = 5, 50
# Launches in a batch from which on a size gets more batches instead of longer ones.
BATCH_LAUNCHES = 10
# Launches of all batches together.
MAX_LAUNCHES = 1000
# Verified iterations: errors that come and go need several to show.
MIN_VERIFIED, MAX_VERIFIED = 20, 200
# Largest factor between the launches of neighbouring sizes, or the factor of the sizes if that is larger.
MAX_STEP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of one size, the same on all ranks."""

    size_bytes: int
    batches: int
    launches: int
    """Launches in each batch."""

    @property
    def total(self) -> int:
        """Launches of all batches together."""
        return self.batches * self.launches

    @property
    def verified(self) -> int:
        """Iterations whose values are verified."""
        return min(MAX_VERIFIED, max(MIN_VERIFIED, self.total))


def plan_counts(size_bytes: int, *, fitting: float, iters: int | None, previous: Counts | None) -> Counts:
    """Return how often one size is run.

    Parameters
    ----------
    fitting : iterations that fit into the time budget, by a first estimate that may be far off.
    iters : iterations that the user wants, or None.
    previous : counts of the previous size. From one size to the next they change little, so that one wrong
        estimate neither starves a size nor takes minutes.
    """
    total = _plan_total(size_bytes, fitting, iters, previous)
    # Short operations get long batches, since the clock and the wait cost time in each.
    batches = int(total // BATCH_LAUNCHES)
    batches = min(MAX_BATCHES, max(MIN_BATCHES, batches))
    return Counts(size_bytes=size_bytes, batches=batches, launches=math.ceil(int(total) / batches))


def _plan_total(size_bytes: int, fitting: float, iters: int | None, previous: Counts | None) -> float:
    """Return the launches of all batches together; the parameters are those of `plan_counts`."""
    if iters is not None:
        return float(iters)
    total = max(fitting, MIN_BATCHES)
    # At most twice as many launches as for the previous size, and at least half as many. Where sizes grow by
    # more than 2, the launches may shrink by the same factor.
    if previous is not None:
        size_ratio = size_bytes / previous.size_bytes
        total = max(total, previous.total / max(MAX_STEP, size_ratio))
        total = min(total, previous.total * MAX_STEP)
    return min(total, MAX_LAUNCHES)
