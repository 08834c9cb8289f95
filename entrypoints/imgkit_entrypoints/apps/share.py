"""Division of work among ranks: pure arithmetic, no torch."""

from __future__ import annotations


def share(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and end of `rank`'s part of ``range(total)``; every item is in exactly one part."""
    return total * rank // world_size, total * (rank + 1) // world_size
