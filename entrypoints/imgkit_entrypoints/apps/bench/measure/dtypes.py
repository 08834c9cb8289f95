"""The element types, and the range in which each holds every whole number exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One element type; `torch` is its name in torch."""

    name: str
    torch: str
    item_bytes: int
    exact: int
    """Whole numbers up to this one are exact, so their sums do not depend on the order."""
    bits: str
    """The integer type of the same width, for comparison bit by bit."""


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="fp32", torch="float32", item_bytes=4, exact=1 << 24, bits="int32"),
    Dtype(name="bf16", torch="bfloat16", item_bytes=2, exact=1 << 8, bits="int16"),
    Dtype(name="fp16", torch="float16", item_bytes=2, exact=1 << 11, bits="int16"),
    Dtype(name="fp64", torch="float64", item_bytes=8, exact=1 << 53, bits="int64"),
)


def named(name: str) -> Dtype:
    """Return the type with this name."""
    return next(item for item in DTYPES if item.name == name)
