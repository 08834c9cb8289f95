"""Fit the line ``t(S) = a + S/B`` to the times of one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRUSTED = 0.30
"""Largest relative residual of a usable fit; beyond it, latency and bandwidth are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted line and its largest residual."""

    latency_s: float
    bytes_per_s: float
    residual: float
    """Largest relative difference between a time and the line."""

    @property
    def trusted(self) -> bool:
        """True if the line describes the times."""
        return self.residual <= TRUSTED

    @property
    def half_bytes(self) -> float:
        """The size at which half of the bandwidth is reached."""
        return self.latency_s * self.bytes_per_s


def fit(times: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares over (bytes, seconds), weighted by 1/t^2; None if no line with a, B >= 0 exists.

    Without weights the largest size alone would decide the line, and the latency would be noise.
    """
    if len({size for size, _ in times}) < 3:
        return None  # two points fit any line
    # Minimise the sum of (a/t + S b/t - 1)^2.
    rows = [(1.0 / seconds, size / seconds) for size, seconds in times]
    one = sum(u * u for u, _ in rows)
    mixed = sum(u * v for u, v in rows)
    two = sum(v * v for _, v in rows)
    left, right = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = one * two - mixed * mixed
    if determinant <= 0:
        return None
    latency = (left * two - right * mixed) / determinant
    per_byte = (one * right - mixed * left) / determinant
    if latency < 0 or per_byte <= 0:
        return None
    residual = max(abs(latency * u + per_byte * v - 1.0) for u, v in rows)
    return Fit(latency_s=latency, bytes_per_s=1.0 / per_byte, residual=residual)
