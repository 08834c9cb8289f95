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


class BlockRange(NamedTuple):
    """A range of a buffer's elements that is processed at once, and the part of the table for it."""

    start: int
    """Index of the first element, relative to the elements that are divided into blocks."""
    table_start: int
    """Index in the table of the value for the first element."""
    length: int


def iterate_blocks(count: int, table_start: int, block_length: int) -> Iterator[BlockRange]:
    """Divide `count` elements into blocks, and yield the range of each. The last block may be shorter.

    Parameters
    ----------
    table_start : index in the table of values of the value for the first element. The table is periodic, so
        the index may be larger than the table.
    """
    for start in range(0, count, block_length):
        yield BlockRange(start, (table_start + start) % PERIOD, min(block_length, count - start))


def make_table(dtype: Dtype, ranks: int) -> array.array[int]:
    """Return the table from which the inputs of all ranks are filled: `PERIOD` integers from a hash function.

    The integers are so small that the sum of one integer of each rank is exact in `dtype`.
    """
    # The integers are in range(limit), so the sum is at most ranks * (limit - 1) <= largest_exact.
    limit = min(max(2, dtype.largest_exact // ranks + 1), _MAX_NUMBER)
    # With more ranks than `largest_exact`, even a sum of ones is too large. Then most integers are 0, and the
    # mean of the sum over all ranks is at most half of `largest_exact`.
    nonzero_of_65536 = 65_536
    if ranks > dtype.largest_exact:
        nonzero_of_65536 = 65_536 * dtype.largest_exact // (2 * ranks)
    table = array.array("i")
    for index in range(PERIOD):
        bits = _hash(index + 1)
        # The upper 16 of the 32 bits decide whether the integer is 0. Its value depends on all bits.
        if bits >> 16 < nonzero_of_65536:
            table.append(bits % limit)
        else:
            table.append(0)
    return table


def _hash(number: int) -> int:
    """Return a hash of 32 bits. About half of the bits differ between successive numbers.

    The constants are those of xxHash.
    """
    mixed = number * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE3D & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def fill_from_table(buffer: torch.Tensor, table: torch.Tensor, table_start: int, block_length: int) -> None:
    """Fill `buffer` from the periodic `table`, from the index `table_start` on, block by block."""
    for start, position, length in iterate_blocks(buffer.numel(), table_start, block_length):
        buffer[start : start + length].copy_(table[position : position + length])


class Noise:
    """Random numbers for the buffers of timed batches.

    The buffers are not filled with zeros, because links and processors may transfer zeros faster.
    """

    def __init__(self, dtype: Dtype, device: torch.device) -> None:
        import torch

        self._block_length = BLOCK[device.type]
        values = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) * 2 - 1
        values = values.to(getattr(torch, dtype.torch))
        self._table = values.to(device).repeat(2 + self._block_length // PERIOD)

    def fill(self, buffer: torch.Tensor, rank: int, number: int) -> None:
        """Fill a buffer of `rank` with random numbers, which depend on the rank and on `number`.

        If a rank has several buffers, `number` distinguishes them.
        """
        fill_from_table(buffer, self._table, table_position(rank, number), self._block_length)


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

        integers = torch.frombuffer(make_table(dtype, ranks), dtype=torch.int32)
        sums = integers
        for rank in range(1, ranks):
            sums = sums + integers.roll(-(rank * _RANK_STEP) % PERIOD)
        assert int(sums.max()) <= dtype.largest_exact, (dtype, ranks)
        self._bits = getattr(torch, dtype.bits)
        self._block_length = BLOCK[device.type]
        torch_dtype = getattr(torch, dtype.torch)
        # The table is repeated, so that a block can begin at any position of the first period.
        repeats = 2 + self._block_length // PERIOD
        self._input_table = integers.to(torch_dtype).to(device).repeat(repeats)
        # The sums over all ranks of the inputs. Its first period begins where the input of rank 0 begins.
        self._sum_table = sums.to(torch_dtype).to(device).repeat(repeats)

    def fill(self, buffer: torch.Tensor, rank: int, iteration: int) -> None:
        """Fill `buffer` with the input of `rank` for this iteration."""
        fill_from_table(buffer, self._input_table, table_position(rank, iteration), self._block_length)

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
            if segment.source is None:  # the sum over all ranks
                table = self._sum_table
                table_start = table_position(0, iteration)  # the sums are in the order of rank 0's input
            else:
                table = self._input_table
                table_start = table_position(segment.source, iteration)
            table_start += segment.offset
            for block in iterate_blocks(segment.count, table_start, self._block_length):
                # A block never crosses the table's end, because the table on the device has several periods.
                expected = table[block.table_start : block.table_start + block.length]
                start = segment.start + block.start
                yield _Block(start, expected, buffer[start : start + block.length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One element type. `torch` is its name in torch, and `nccl` its name in nccl-tests."""

    name: str
    torch: str
    nccl: str
    item_bytes: int
    largest_exact: int
    """Largest integer up to which all integers are exact. Sums up to it do not depend on the order."""
    bits: str
    """The integer type of the same width, which is used to compare bit by bit."""


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="fp32", torch="float32", nccl="float", item_bytes=4, largest_exact=1 << 24, bits="int32"),
    Dtype(name="bf16", torch="bfloat16", nccl="bfloat16", item_bytes=2, largest_exact=1 << 8, bits="int16"),
    Dtype(name="fp16", torch="float16", nccl="half", item_bytes=2, largest_exact=1 << 11, bits="int16"),
    Dtype(name="fp64", torch="float64", nccl="double", item_bytes=8, largest_exact=1 << 53, bits="int64"),
)


def dtype_named(name: str) -> Dtype:
    """Return the element type with this name, such as ``bf16``."""
    return next(dtype for dtype in DTYPES if dtype.name == name)
