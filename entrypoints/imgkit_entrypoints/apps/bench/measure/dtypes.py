"""The element types, and up to where each holds every whole number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One type; `torch` is its name there."""

    name: str
    torch: str
    item_bytes: int
    exact: int
    """Whole numbers up to this one are exact, so sums are the same in whatever order they are made."""
    bits: str
    """The integer type of the same width: results are compared bit by bit."""


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="fp32", torch="float32", item_bytes=4, exact=1 << 24, bits="int32"),
    Dtype(name="bf16", torch="bfloat16", item_bytes=2, exact=1 << 8, bits="int16"),
    Dtype(name="fp16", torch="float16", item_bytes=2, exact=1 << 11, bits="int16"),
    Dtype(name="fp64", torch="float64", item_bytes=8, exact=1 << 53, bits="int64"),
)


def named(name: str) -> Dtype:
    """The type of that name."""
    return next(item for item in DTYPES if item.name == name)
