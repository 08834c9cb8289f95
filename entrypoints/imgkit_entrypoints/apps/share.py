"""Divide work among ranks. This module does not need torch."""

from __future__ import annotations


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first item of a rank's part of ``range(total)``, and the item behind its last one.

    Every item is in the part of exactly one rank: ``total=10, world_size=3 -> (0, 3), (3, 6), (6, 10)``.
    """
    return total * rank // world_size, total * (rank + 1) // world_size
