"""Input whose result is known exactly, and its comparison bit by bit, on the device, in blocks.

Element j of rank r in iteration k is ``table[(j + 7919 r + 104729 k) mod 131071]``: a table of hashed whole
numbers, small enough that the sum over all ranks is exact in the type. The number depends on element, rank
and iteration, so shifted data, swapped chunks and stale results all compare unequal. The period is prime, so
that no two chunks of a buffer are whole periods apart.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from imgkit_entrypoints.apps.bench.collectives import Segment

if TYPE_CHECKING:
    import torch

# Numbers in the table: a prime (2 ** 17 - 1).
PERIOD = 131_071
# Elements filled or compared at once: few launches on a GPU, and little extra memory.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}
# Primes: the inputs of two ranks or iterations begin at different positions of the table.
_RANK_STEP, _ITERATION_STEP = 7_919, 104_729
# Numbers in the table are below this, also where the type could hold larger ones.
_MAX_NUMBER = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element that differs from its expected value."""

    collective: str
    size_bytes: int
    iteration: int
    rank: int
    index: int
    expected: str
    """Like `actual`, a text: ranks send both as JSON, which has no infinity."""
    actual: str

    def __str__(self) -> str:
        return (
            f"WRONG: {self.collective} of {self.size_bytes} bytes, iteration {self.iteration}, "
            f"rank {self.rank}, element {self.index}: {self.actual}, expected {self.expected}"
        )


def table_position(rank: int, iteration: int) -> int:
    """Return the position in the table at which the input of `rank` begins."""
    return (rank * _RANK_STEP + iteration * _ITERATION_STEP) % PERIOD


def iterate_blocks(count: int, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the start, the position in the table and the length of each block of `count` elements.

    Parameters
    ----------
    first : position of the first element in the table, or a whole number of periods beyond it.
    length : elements in a block; the last block may be shorter.
    """
    for start in range(0, count, length):
        yield start, (first + start) % PERIOD, min(length, count - start)


def make_table(dtype: Dtype, ranks: int) -> array.array[int]:
    """Return one period of the table: whole numbers whose sum over `ranks` is exact in `dtype`."""
    modulus = min(max(2, dtype.exact // ranks + 1), _MAX_NUMBER)
    # How many of 2 ** 16 numbers are not 0. With more ranks than the type can count, these are few, so that
    # the expected sum is half of what is exact.
    nonzero = 1 << 16
    if ranks > dtype.exact:
        nonzero = (dtype.exact << 15) // ranks
    values = array.array("i")
    for index in range(PERIOD):
        bits = _hash(index + 1)
        # Whether the number is 0 depends on the upper half of the hash, and its value on all of it.
        upper_half = bits >> 16
        number = 0
        if upper_half < nonzero:
            number = bits % modulus
        values.append(number)
    return values


def _hash(number: int) -> int:
    """Return 32 bits that differ in about half of them between neighbouring numbers (xxHash's constants)."""
    mixed = number * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE3D & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def fill_from_table(buffer: torch.Tensor, table: torch.Tensor, first: int, length: int) -> None:
    """Fill `buffer` from the periodic `table`, from position `first` on, `length` elements at once."""
    for start, position, count in iterate_blocks(buffer.numel(), first, length):
        buffer[start : start + count].copy_(table[position : position + count])


class Noise:
    """Random numbers that the timed batches carry: links and processors may treat zeros better."""

    def __init__(self, dtype: Dtype, device: torch.device) -> None:
        import torch

        self._block = BLOCK[device.type]
        values = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) * 2 - 1
        values = values.to(getattr(torch, dtype.torch))
        self._table = values.to(device).repeat(2 + self._block // PERIOD)

    def fill(self, buffer: torch.Tensor, rank: int, number: int) -> None:
        """Fill a buffer of `rank`. Buffers with other numbers get other values."""
        fill_from_table(buffer, self._table, table_position(rank, number), self._block)


class Difference(NamedTuple):
    """An element of a buffer that is not as expected."""

    element: int
    """Index in the buffer."""
    expected: float
    actual: float


class _Block(NamedTuple):
    """Consecutive elements of a buffer, and their expected values."""

    start: int
    """Index of the first element in the buffer."""
    expected: torch.Tensor
    actual: torch.Tensor


class ExpectedValues:
    """The tables for one type and number of ranks, on one device."""

    def __init__(self, dtype: Dtype, ranks: int, device: torch.device) -> None:
        import torch

        single = torch.frombuffer(make_table(dtype, ranks), dtype=torch.int32)
        total = single
        for rank in range(1, ranks):
            total = total + single.roll(-(rank * _RANK_STEP) % PERIOD)
        assert int(total.max()) <= dtype.exact, (dtype, ranks)
        self._bits = getattr(torch, dtype.bits)
        self._block = BLOCK[device.type]
        torch_dtype = getattr(torch, dtype.torch)
        repeats = 2 + self._block // PERIOD
        self._single = single.to(torch_dtype).to(device).repeat(repeats)
        self._total = total.to(torch_dtype).to(device).repeat(repeats)

    def fill(self, buffer: torch.Tensor, rank: int, iteration: int) -> None:
        """Fill `buffer` with the input of `rank`."""
        fill_from_table(buffer, self._single, table_position(rank, iteration), self._block)

    def count_wrong(self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int) -> int:
        """Return how many elements of `buffer` differ from the expected ones.

        Parameters
        ----------
        result : which rank's input, or the sum of all, each part of the buffer should hold.
        """
        import torch

        # Counted on the device, with one wait for the whole buffer.
        count = torch.zeros((), dtype=torch.int64, device=buffer.device)
        for block in self._blocks(buffer, result, iteration):
            count += torch.count_nonzero(self._compare_bits(block))
        return int(count.item())

    def find_first_wrong(
        self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int
    ) -> Difference | None:
        """Return the first element of `buffer` that differs from the expected one, or None if none does.

        The parameters are those of `count_wrong`. This waits for the device once for each block.
        """
        import torch

        for block in self._blocks(buffer, result, iteration):
            positions = torch.nonzero(self._compare_bits(block))
            if len(positions):
                index = int(positions[0].item())
                expected = float(block.expected[index].item())
                actual = float(block.actual[index].item())
                return Difference(block.start + index, expected, actual)
        return None

    def _compare_bits(self, block: _Block) -> torch.Tensor:
        """Return for each element of a block whether its bits differ."""
        return block.expected.view(self._bits) != block.actual.view(self._bits)

    def _blocks(self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int) -> Iterator[_Block]:
        """Yield a buffer in blocks, each with the values that it should hold.

        Parameters
        ----------
        result : which rank's input, or the sum of all, each part of the buffer should hold.
        """
        for segment in result:
            table = self._single
            source = segment.source
            if source is None:  # the sum; its table begins at the position of rank 0
                table = self._total
                source = 0
            first = table_position(source, iteration) + segment.offset
            for offset, position, length in iterate_blocks(segment.count, first, self._block):
                start = segment.start + offset
                expected = table[position : position + length]
                yield _Block(start, expected, buffer[start : start + length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One element type. `torch` is its name in torch, and `nccl` its name in nccl-tests."""

    name: str
    torch: str
    nccl: str
    item_bytes: int
    exact: int
    """Whole numbers up to this one are exact, so their sums do not depend on the order."""
    bits: str
    """The integer type of the same width, for comparison bit by bit."""


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="fp32", torch="float32", nccl="float", item_bytes=4, exact=1 << 24, bits="int32"),
    Dtype(name="bf16", torch="bfloat16", nccl="bfloat16", item_bytes=2, exact=1 << 8, bits="int16"),
    Dtype(name="fp16", torch="float16", nccl="half", item_bytes=2, exact=1 << 11, bits="int16"),
    Dtype(name="fp64", torch="float64", nccl="double", item_bytes=8, exact=1 << 53, bits="int64"),
)


def dtype_named(name: str) -> Dtype:
    """Return the type with this name."""
    return next(dtype for dtype in DTYPES if dtype.name == name)
