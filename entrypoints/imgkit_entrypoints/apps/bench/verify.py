"""Verify collectives: fill inputs with known values, and compare the outputs bit by bit on the device.

Element j of rank r in iteration k is ``table[(j + 7919 r + 104729 k) mod 131071]``. The table contains
integers from a hash function. They are so small that the sum over all ranks is exact in the element type.
Each value depends on element, rank and iteration. So the comparison detects shifted data, swapped chunks, and
results of an earlier iteration. The period of the table is prime, so that no two chunks of a buffer are a
multiple of the period apart.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from imgkit_entrypoints.apps.bench.collectives import Segment

if TYPE_CHECKING:
    import torch

# Number of integers in the table, which is a prime (2 ** 17 - 1).
PERIOD = 131_071
# Number of elements that are filled or compared at once. Large blocks need few kernel launches on a GPU, and
# small blocks need little additional memory.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 22}
# Primes, so that the inputs of two ranks or iterations begin at different positions of the table.
_RANK_STEP, _ITERATION_STEP = 7_919, 104_729
# All integers in the table are below this limit, even if the element type can represent larger ones.
_MAX_NUMBER = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """One element of an output that differs from its expected value."""

    collective: str
    size_bytes: int
    iteration: int
    rank: int
    index: int
    expected: str
    """The expected value. It is a text, as is `actual`, because ranks send JSON, which has no infinity."""
    actual: str

    def __str__(self) -> str:
        return (
            f"WRONG: {self.collective} of {self.size_bytes} bytes, iteration {self.iteration}, "
            f"rank {self.rank}, element {self.index}: {self.actual}, expected {self.expected}"
        )


def table_position(rank: int, iteration: int) -> int:
    """Return the position in the table at which the input of `rank` begins in this iteration."""
    return (rank * _RANK_STEP + iteration * _ITERATION_STEP) % PERIOD


def iterate_blocks(count: int, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Divide `count` elements into blocks, and yield the start, the table position and the length of each.

    Parameters
    ----------
    first : position of the first element in the table. It may exceed the table, which is periodic.
    length : number of elements in a block. The last block may be shorter.
    """
    for start in range(0, count, length):
        yield start, (first + start) % PERIOD, min(length, count - start)


def make_table(dtype: Dtype, ranks: int) -> array.array[int]:
    """Return the table of integers, whose sum over all ranks is exact in `dtype`."""
    modulus = min(max(2, dtype.exact // ranks + 1), _MAX_NUMBER)
    # How many of 2 ** 16 numbers are not 0. If there are more ranks than the largest exact integer, only few
    # numbers are not 0. The sum is then expected to be half of the largest exact integer.
    nonzero = 1 << 16
    if ranks > dtype.exact:
        nonzero = (dtype.exact << 15) // ranks
    table = array.array("i")
    for index in range(PERIOD):
        bits = _hash(index + 1)
        # The upper half of the hash decides whether the number is 0. Its value depends on the whole hash.
        upper_half = bits >> 16
        number = 0
        if upper_half < nonzero:
            number = bits % modulus
        table.append(number)
    return table


def _hash(number: int) -> int:
    """Return a hash of 32 bits. About half of the bits differ between successive numbers.

    The constants are those of xxHash.
    """
    mixed = number * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE3D & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def fill_from_table(buffer: torch.Tensor, table: torch.Tensor, first: int, length: int) -> None:
    """Fill `buffer` from the periodic `table`, from position `first` on, in blocks of `length` elements."""
    for start, position, count in iterate_blocks(buffer.numel(), first, length):
        buffer[start : start + count].copy_(table[position : position + count])


class Noise:
    """Random numbers for the buffers of timed batches.

    The buffers are not filled with zeros, because links and processors may transfer zeros faster.
    """

    def __init__(self, dtype: Dtype, device: torch.device) -> None:
        import torch

        self._block = BLOCK[device.type]
        values = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) * 2 - 1
        values = values.to(getattr(torch, dtype.torch))
        self._table = values.to(device).repeat(2 + self._block // PERIOD)

    def fill(self, buffer: torch.Tensor, rank: int, number: int) -> None:
        """Fill a buffer of `rank` with random numbers, which depend on the rank and on `number`.

        If a rank has several buffers, `number` distinguishes them.
        """
        fill_from_table(buffer, self._table, table_position(rank, number), self._block)


class Difference(NamedTuple):
    """An element of a buffer that differs from its expected value."""

    element: int
    """Index in the buffer."""
    expected: float
    actual: float


class _Block(NamedTuple):
    """A part of a buffer that is compared at once, and the expected values of its elements."""

    start: int
    """Index of the first element in the buffer."""
    expected: torch.Tensor
    actual: torch.Tensor


class ExpectedValues:
    """Fills inputs with known values, and compares outputs with the expected values.

    The tables of values are made once for an element type and a number of ranks, and are kept on the device.
    """

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
        # The table is repeated, so that a block can begin at any position of the first period.
        repeats = 2 + self._block // PERIOD
        self._single = single.to(torch_dtype).to(device).repeat(repeats)
        self._total = total.to(torch_dtype).to(device).repeat(repeats)

    def fill(self, buffer: torch.Tensor, rank: int, iteration: int) -> None:
        """Fill `buffer` with the input of `rank` for this iteration."""
        fill_from_table(buffer, self._single, table_position(rank, iteration), self._block)

    def count_wrong(self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int) -> int:
        """Return how many elements of `buffer` differ from their expected values.

        Parameters
        ----------
        result : the expected content of the buffer. Each segment is part of a rank's input or of the sum.
        """
        import torch

        # The count stays on the device until the whole buffer is compared, so there is only one wait.
        count = torch.zeros((), dtype=torch.int64, device=buffer.device)
        for block in self._divide_into_blocks(buffer, result, iteration):
            count += torch.count_nonzero(self._compare_bits(block))
        return int(count.item())

    def find_first_wrong(
        self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int
    ) -> Difference | None:
        """Return the first element of `buffer` that differs from its expected value, or None.

        The parameters are the same as in `count_wrong`. This function is slower, because it waits for the
        device after each block.
        """
        import torch

        for block in self._divide_into_blocks(buffer, result, iteration):
            positions = torch.nonzero(self._compare_bits(block))
            if len(positions):
                index = int(positions[0].item())
                expected = float(block.expected[index].item())
                actual = float(block.actual[index].item())
                return Difference(block.start + index, expected, actual)
        return None

    def _compare_bits(self, block: _Block) -> torch.Tensor:
        """Return a boolean for each element of a block: whether its bits differ from the expected bits."""
        return block.expected.view(self._bits) != block.actual.view(self._bits)

    def _divide_into_blocks(
        self, buffer: torch.Tensor, result: Sequence[Segment], iteration: int
    ) -> Iterator[_Block]:
        """Divide a buffer into blocks, and yield each with its expected values.

        Parameters
        ----------
        result : the expected content of the buffer. Each segment is part of a rank's input or of the sum.
        """
        for segment in result:
            table = self._single
            source = segment.source
            # The sum over all ranks has a table of its own, which begins at the position of rank 0.
            if source is None:
                table = self._total
                source = 0
            # The input of each rank begins at another position of the table, which is periodic. A block never
            # crosses the table's end, because the table on the device has several periods.
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
    """Largest integer up to which all integers are exact. Sums up to it do not depend on the order."""
    bits: str
    """The integer type of the same width, which is used to compare bit by bit."""


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="fp32", torch="float32", nccl="float", item_bytes=4, exact=1 << 24, bits="int32"),
    Dtype(name="bf16", torch="bfloat16", nccl="bfloat16", item_bytes=2, exact=1 << 8, bits="int16"),
    Dtype(name="fp16", torch="float16", nccl="half", item_bytes=2, exact=1 << 11, bits="int16"),
    Dtype(name="fp64", torch="float64", nccl="double", item_bytes=8, exact=1 << 53, bits="int64"),
)


def dtype_named(name: str) -> Dtype:
    """Return the element type with this name, such as ``bf16``."""
    return next(dtype for dtype in DTYPES if dtype.name == name)
