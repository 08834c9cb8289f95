"""Sizes in bytes: as users write them (4G is GiB as in nccl-tests, 4GB is 4e9), and as tables print them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

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
