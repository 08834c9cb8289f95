"""Input whose result is known exactly, and its comparison bit by bit, on the device, in chunks.

Element j of rank r in iteration k is ``table[(j + 7919 r + 104729 k) mod 131071]``: a table of hashed whole
numbers, small enough that the sum over all ranks is exact in the type. The number depends on element, rank
and iteration, so shifted data, swapped chunks and stale results all compare unequal. The period is prime, so
that no two chunks of a buffer are whole periods apart.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.collectives import Segment

if TYPE_CHECKING:
    import torch

PERIOD = 131_071
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements filled or compared at once: few launches on a GPU, and little extra memory."""
_RANK_STEP, _ITERATION_STEP = 7_919, 104_729
_LARGEST = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element that differs from its expected value."""

    op: str
    size_bytes: int
    iteration: int
    rank: int
    index: int
    expected: str
    """Like `got`, a text: ranks send both as JSON, which has no infinity."""
    got: str

    def __str__(self) -> str:
        return (
            f"WRONG: {self.op} of {self.size_bytes} bytes, iteration {self.iteration}, rank {self.rank}, "
            f"element {self.index}: {self.got}, expected {self.expected}"
        )


def phase(rank: int, iteration: int) -> int:
    """Position in the table at which the input of `rank` begins."""
    return (rank * _RANK_STEP + iteration * _ITERATION_STEP) % PERIOD


def blocks(count: int, first: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, position in the table, length) of each block of `count` elements from `first` on."""
    for start in range(0, count, most):
        yield start, (first + start) % PERIOD, min(most, count - start)


def numbers(dtype: Dtype, ranks: int) -> array.array[int]:
    """One period of the table: whole numbers whose sum over `ranks` is exact in `dtype`."""
    modulus = min(max(2, dtype.exact // ranks + 1), _LARGEST)
    # With more ranks than the type can count, most numbers are 0; half of the range is left for chance.
    keep = (1 << 16) if ranks <= dtype.exact else (dtype.exact << 15) // ranks
    found = array.array("i")
    for place in range(PERIOD):
        mixed = (place + 1) * 0x9E3779B1 & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE3D & 0xFFFFFFFF
        mixed ^= mixed >> 16
        found.append(mixed % modulus if mixed >> 16 < keep else 0)
    return found


def pour(table: torch.Tensor, buffer: torch.Tensor, first: int, most: int) -> None:
    """Fill `buffer` from the periodic `table`, from place `first` on, `most` elements at once."""
    for start, place, length in blocks(buffer.numel(), first, most):
        buffer[start : start + length].copy_(table[place : place + length])


class Noise:
    """Random numbers that the timed batches carry: links and processors may treat zeros better."""

    def __init__(self, dtype: Dtype, device: torch.device) -> None:
        import torch

        self._block = BLOCK[device.type]
        one = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) * 2 - 1
        kind = getattr(torch, dtype.torch)
        self._table = one.to(kind).to(device).repeat(2 + self._block // PERIOD)

    def fill(self, buffer: torch.Tensor, rank: int, slot: int) -> None:
        """Fill the buffer of `rank` in `slot`."""
        pour(self._table, buffer, phase(rank, slot), self._block)


class ExpectedValues:
    """The tables for one type, number of ranks and way to combine their values, on one device."""

    def __init__(self, dtype: Dtype, ranks: int, device: torch.device, redop: str = "sum") -> None:
        import torch

        one = torch.frombuffer(numbers(dtype, ranks), dtype=torch.int32)
        combine = {"min": torch.minimum, "max": torch.maximum}.get(redop, torch.add)
        total = one
        for rank in range(1, ranks):
            total = combine(total, one.roll(-(rank * _RANK_STEP) % PERIOD))
        assert int(total.max()) <= dtype.exact, (dtype, ranks)
        if redop == "avg":
            total = total / ranks
        kind = getattr(torch, dtype.torch)
        self._bits = getattr(torch, dtype.bits)
        self._block = BLOCK[device.type]
        self._one, self._total = (
            table.to(kind).to(device).repeat(2 + self._block // PERIOD) for table in (one, total)
        )

    def fill(self, buffer: torch.Tensor, rank: int, iteration: int) -> None:
        """Fill `buffer` with the input of `rank`."""
        pour(self._one, buffer, phase(rank, iteration), self._block)

    def wrong(
        self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int
    ) -> tuple[int, tuple[int, float, float] | None]:
        """Number of elements of `buffer` that differ from `result`; index, expected and got of the first."""
        import torch

        count = torch.zeros((), dtype=torch.int64, device=buffer.device)
        for _, expected, got in self._pairs(buffer, result, iteration):
            count += torch.count_nonzero(expected.view(self._bits) != got.view(self._bits))
        found = int(count.item())
        if not found:
            return 0, None
        for start, expected, got in self._pairs(buffer, result, iteration):
            places = torch.nonzero(expected.view(self._bits) != got.view(self._bits))
            if len(places):
                at = int(places[0].item())
                return found, (start + at, float(expected[at].item()), float(got[at].item()))
        raise AssertionError("unreachable: counted above")

    def _pairs(
        self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for segment in result:
            table = self._total if segment.source is None else self._one
            first = phase(segment.source or 0, iteration) + segment.offset
            for start, place, length in blocks(segment.count, first, self._block):
                at = segment.start + start
                yield at, table[place : place + length], buffer[at : at + length]


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


def dtype_named(name: str) -> Dtype:
    """Return the type with this name."""
    return next(item for item in DTYPES if item.name == name)
