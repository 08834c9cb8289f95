"""Sizes as users write them (4G is GiB as in nccl-tests, 4GB is 4e9) and as tables print them: both ways."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    """Bytes of ``64M`` or ``64MiB`` (powers of 1024), ``64MB`` (powers of 1000) or ``64``.

    Raises
    ------
    argparse.ArgumentTypeError : it is no size above zero.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(|IB|B)", text.strip().upper())
    if found:
        unit = (_DECIMAL if found[3] == "B" else _BINARY)[found[2]]
        value = float(found[1]) * unit
        if value >= 1 and value == int(value) and (found[2] or found[3] != "IB"):
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is no size: 64M is 64 x 1024 x 1024 bytes, 64MB is 64e6")


def binary(size_bytes: int) -> str:
    """``4GiB``, ``3.7GiB``; three digits."""
    return _written(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal(size_bytes: int) -> str:
    """``4GB``, ``4.29GB``; three digits."""
    return _written(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def both(size_bytes: int) -> str:
    """``4GiB (4.29GB)``; one of them where they are the same."""
    one, other = binary(size_bytes), decimal(size_bytes)
    return one if one == other else f"{one} ({other})"


def _written(size_bytes: int, step: int, units: tuple[str, ...]) -> str:
    value, place = float(size_bytes), 0
    while value >= step and place < len(units) - 1:
        value, place = value / step, place + 1
    return f"{value:.4g}{units[place]}" if value >= 1000 else f"{value:.3g}{units[place]}"


def swept(least: int, most: int, factor: int) -> Iterator[int]:
    """`least`, `least` x `factor`, ... up to `most`."""
    now = least
    while now <= most:
        yield now
        now *= factor
