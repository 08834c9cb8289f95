"""Flip random bits of a file, one at a time, and list those that nothing notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path


def flip(path: Path, bit: int) -> None:
    """Change one bit; the same call again changes it back."""
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        (old,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([old ^ 1 << bit % 8]))


def survivors(path: Path, noticed: Callable[[], bool], flips: int, seed: int, *, start: int = 0) -> list[int]:
    """The bytes from `start` on where a flipped bit was not noticed."""
    chosen = random.Random(seed)  # noqa: S311 - no secret
    unnoticed, end = [], path.stat().st_size
    for _ in range(flips):
        bit = chosen.randrange(start * 8, end * 8)
        flip(path, bit)
        if not noticed():
            unnoticed.append(bit // 8)
        flip(path, bit)
    return unnoticed
