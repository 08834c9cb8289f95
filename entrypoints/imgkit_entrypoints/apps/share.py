"""Divide work among ranks. This module does not need torch."""

from __future__ import annotations


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the start and the end (exclusive) of a rank's part of ``range(total)``.

    Every item belongs to exactly one rank, and the sizes of the parts differ by at most one. For example, 10
    items and 3 ranks give ``(0, 3), (3, 6), (6, 10)``.
    """
    return total * rank // world_size, total * (rank + 1) // world_size
