"""Sizes in bytes as text for people."""

from __future__ import annotations

# Powers of 1000, the units that disks and registries use.
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size_text(size_bytes: int) -> str:
    """Return a size in the largest unit that fits, such as ``3.4 GB``, ``12.0 MB`` or ``999 bytes``."""
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"
