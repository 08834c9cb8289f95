"""The collectives that dist-bench can measure, and the buffers that they need.

Each collective has one record in `COLLECTIVES`. To add a collective, add a record. Sizes and bus bandwidths
are defined as in NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu (v2.19). The command line reads the
records without torch, so torch is only imported in the functions that run a collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.run.ranks import Ranks

# The size of each rank's chunk is a multiple of this many bytes, as in nccl-tests.
CHUNK_BYTES = 16
# Rank that is the root of broadcast, reduce, gather and scatter. This is also nccl-tests' default.
ROOT = 0

# A function that runs a collective once. On a GPU, it returns before the collective has finished.
Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of consecutive elements in a rank's output, and the input from which they come."""

    start: int
    count: int
    source: int | None
    """Rank from whose input the elements come. None means that they are the sum of all ranks' inputs."""
    offset: int
    """Position of the first element in this input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The number of elements of a collective, seen from one rank."""

    count: int
    """Number of elements that correspond to the size in the table."""
    ranks: int
    rank: int

    @property
    def part(self) -> int:
        """Number of elements in the part of each rank, if the elements are divided among the ranks."""
        return self.count // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """The arguments with which the function of a collective is called."""

    dist: Any
    """The module torch.distributed, which is passed so that this module need not import torch."""
    input: torch.Tensor
    output: torch.Tensor
    """The same tensor as `input` if the collective works in place."""
    ranks: int
    rank: int

    def chunks(self, buffer: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the chunks of `buffer`, one for each rank, on the root rank, and None on all other ranks."""
        if self.rank != ROOT:
            return None
        return list(buffer.chunk(self.ranks))


def _full_size(shape: Shape) -> int:
    """Return the number of all elements, for collectives whose buffer has the full size."""
    return shape.count


def _part(shape: Shape) -> int:
    """Return the number of elements of one rank's part, for collectives whose buffer has only this part."""
    return shape.part


def _between_nodes(nodes: int, _ranks_per_node: int) -> Fraction:
    """Return the traffic of the root's node in a gather or scatter: the parts of all other nodes."""
    return Fraction(nodes - 1, nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The description of one collective: its buffers, its bandwidths, how to call it, and its result."""

    name: str
    is_divided: bool = False
    """True if the size is divided into one part per rank. Otherwise, each rank's buffer has the full size."""
    input: Callable[[Shape], int] = _full_size
    """Returns the number of elements of a rank's input."""
    output: Callable[[Shape], int] | None = None
    """Returns the number of elements of a rank's output. None means that input and output are one buffer."""
    adds_values: bool = False
    """True if the values of all ranks are added up."""
    has_root: bool = False
    bus: Callable[[Fraction], Fraction] = lambda _: Fraction(1)
    """Returns busbw / algbw: how many bytes the links must carry for each byte of the size.

    The argument is (ranks - 1) / ranks. algbw is the size divided by the time. busbw is comparable with the
    rate of the links.
    """
    traffic: Callable[[int, int], Fraction] = lambda _nodes, _ranks_per_node: Fraction(1)
    """Returns how many bytes leave (or enter) the busiest node for each byte of the size.

    The arguments are the number of nodes and the number of ranks per node. Collectives that use a ring are
    assumed to use one ring over all ranks.
    """
    fills_network: bool = False
    """True if all nodes send and receive all the time. A low share of the line rate then means a problem."""
    call: Callable[[CollectiveCall], Launch]
    """Returns the function that runs the collective once on the given buffers."""
    result: Callable[[Shape], tuple[Segment, ...]]
    """Returns the expected output of a rank. It is empty if the collective does not define the output."""

    @property
    def has_separate_output(self) -> bool:
        """Whether input and output are two buffers."""
        return self.output is not None

    def factor(self, ranks: int) -> float:
        """Return busbw / algbw for a number of ranks, as nccl-tests defines it."""
        return float(self.bus(Fraction(ranks - 1, ranks)))

    def busbw_GBps(self, size_bytes: int, seconds: float, ranks: int) -> float:
        """Return the bus bandwidth if one operation of this size takes `seconds`."""
        return self.factor(ranks) * size_bytes / seconds / 1e9

    def expected_busbw_GBps(self, line_rate_Gbps: float, nodes: int, ranks_per_node: int) -> float:
        """Return the largest bus bandwidth that the network between several nodes allows.

        At this bandwidth, the network adapters of the busiest node carry as much as they can.

        Parameters
        ----------
        line_rate_Gbps : rate of all network adapters of a node together, in one direction.
        """
        algbw_GBps = line_rate_Gbps / 8 / float(self.traffic(nodes, ranks_per_node))
        return algbw_GBps * self.factor(nodes * ranks_per_node)

    def round_to_elements(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return how many elements of `item_bytes` a size has, rounded down to at least one.

        If the size is divided into one part per rank, each part is a multiple of 16 bytes and is not empty.
        """
        count = size_bytes // item_bytes
        if not self.is_divided:
            return max(1, count)
        chunk_elements = CHUNK_BYTES // item_bytes
        chunks_per_rank = max(1, count // ranks // chunk_elements)
        return chunks_per_rank * chunk_elements * ranks

    def output_elements(self, shape: Shape) -> int:
        """Return the number of elements of a rank's output, or 0 if input and output are one buffer."""
        if self.output is None:
            return 0
        return self.output(shape)

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Return the number of bytes of all buffers on the rank that needs most memory, which is the root."""
        shape = Shape(count=size_bytes, ranks=ranks, rank=ROOT)
        # The functions are linear in the count, so they also work with bytes instead of elements.
        return self.input(shape) + self.output_elements(shape)


def _ring_bytes(factor: int) -> Callable[[int, int], Fraction]:
    """Return the `traffic` function of a collective that runs as one ring over all ranks.

    In a ring, each rank sends all chunks except one to the next rank, `factor` times.
    """

    def traffic(nodes: int, ranks_per_node: int) -> Fraction:
        ranks = nodes * ranks_per_node
        return factor * Fraction(ranks - 1, ranks)

    return traffic


def _alltoall_bytes(nodes: int, ranks_per_node: int) -> Fraction:
    """Return the traffic of an all-to-all: each rank of a node sends the parts of all other nodes."""
    return ranks_per_node * Fraction(nodes - 1, nodes)


def _all_gather(call: CollectiveCall) -> Launch:
    # torch 2.13 has a new name for this function and deprecates the old one.
    function = getattr(call.dist, "all_gather_single", None) or call.dist.all_gather_into_tensor
    return partial(function, call.output, call.input)


def _reduce_scatter(call: CollectiveCall) -> Launch:
    function = getattr(call.dist, "reduce_scatter_single", None) or call.dist.reduce_scatter_tensor
    return partial(function, call.output, call.input)


def _alltoallv(call: CollectiveCall) -> Launch:
    """Return an all-to-all with explicit sizes of the parts, which are equal here."""
    splits = [call.input.numel() // call.ranks] * call.ranks
    return partial(call.dist.all_to_all_single, call.output, call.input, splits, splits)


def _sendrecv(call: CollectiveCall) -> Launch:
    """Return a function that sends to the next rank and receives from the previous one."""
    if call.ranks == 1:
        return partial(call.output.copy_, call.input)
    # Start to receive before sending. gloo sends data when the peer has announced that it is ready to
    # receive. In the other order, this announcement is queued after the data, and the two directions take
    # turns (50 % of a link between nodes).
    pair = [
        call.dist.P2POp(call.dist.irecv, call.output, (call.rank - 1) % call.ranks),
        call.dist.P2POp(call.dist.isend, call.input, (call.rank + 1) % call.ranks),
    ]

    def exchange() -> None:
        for work in call.dist.batch_isend_irecv(pair):
            work.wait()

    return exchange


def _sum_of_all(shape: Shape) -> tuple[Segment, ...]:
    """Return the expected output if it is the sum of all inputs."""
    return (Segment(start=0, count=shape.count, source=None, offset=0),)


def _copy_of(shape: Shape, source: int) -> tuple[Segment, ...]:
    """Return the expected output if it is a copy of the input of the rank `source`."""
    return (Segment(start=0, count=shape.count, source=source, offset=0),)


def _joined_parts(shape: Shape, offset: int = 0) -> tuple[Segment, ...]:
    """Return the expected output if it consists of one part of each rank's input.

    `offset` is the position of this part in the inputs.
    """
    return tuple(
        Segment(start=source * shape.part, count=shape.part, source=source, offset=offset)
        for source in range(shape.ranks)
    )


COLLECTIVES: tuple[Collective, ...] = (
    Collective(
        name="all_reduce",
        adds_values=True,
        bus=lambda share: 2 * share,
        traffic=_ring_bytes(2),
        fills_network=True,
        call=lambda to: partial(to.dist.all_reduce, to.input),
        result=_sum_of_all,
    ),
    Collective(
        name="all_gather",
        is_divided=True,
        input=_part,
        output=_full_size,
        bus=lambda share: share,
        traffic=_ring_bytes(1),
        fills_network=True,
        call=_all_gather,
        result=_joined_parts,
    ),
    Collective(
        name="reduce_scatter",
        is_divided=True,
        output=_part,
        adds_values=True,
        bus=lambda share: share,
        traffic=_ring_bytes(1),
        fills_network=True,
        call=_reduce_scatter,
        result=lambda shape: (
            Segment(start=0, count=shape.part, source=None, offset=shape.rank * shape.part),
        ),
    ),
    Collective(
        name="broadcast",
        has_root=True,
        call=lambda to: partial(to.dist.broadcast, to.input, ROOT),
        result=lambda shape: _copy_of(shape, ROOT),
    ),
    Collective(
        name="reduce",
        adds_values=True,
        has_root=True,
        call=lambda to: partial(to.dist.reduce, to.input, ROOT),
        result=lambda shape: _sum_of_all(shape) if shape.rank == ROOT else (),
    ),
    Collective(
        name="alltoall",
        is_divided=True,
        output=_full_size,
        bus=lambda share: share,
        traffic=_alltoall_bytes,
        fills_network=True,
        call=lambda to: partial(to.dist.all_to_all_single, to.output, to.input),
        result=lambda shape: _joined_parts(shape, shape.rank * shape.part),
    ),
    Collective(
        # All-to-all with explicit sizes of the parts, which expert-parallel programs use.
        name="alltoallv",
        is_divided=True,
        output=_full_size,
        bus=lambda share: share,
        traffic=_alltoall_bytes,
        fills_network=True,
        call=_alltoallv,
        result=lambda shape: _joined_parts(shape, shape.rank * shape.part),
    ),
    Collective(
        # The ranks form a ring in the order of the nodes, so only the last rank of each node sends to another
        # node.
        name="sendrecv",
        output=_full_size,
        call=_sendrecv,
        result=lambda shape: _copy_of(shape, (shape.rank - 1) % shape.ranks),
    ),
    Collective(
        name="gather",
        is_divided=True,
        input=_part,
        output=lambda shape: shape.count if shape.rank == ROOT else 0,
        has_root=True,
        bus=lambda share: share,
        traffic=_between_nodes,
        call=lambda to: partial(to.dist.gather, to.input, to.chunks(to.output), ROOT),
        result=lambda shape: _joined_parts(shape) if shape.rank == ROOT else (),
    ),
    Collective(
        name="scatter",
        is_divided=True,
        input=lambda shape: shape.count if shape.rank == ROOT else 0,
        output=_part,
        has_root=True,
        bus=lambda share: share,
        traffic=_between_nodes,
        call=lambda to: partial(to.dist.scatter, to.output, to.chunks(to.input), ROOT),
        result=lambda shape: (
            Segment(start=0, count=shape.part, source=ROOT, offset=shape.rank * shape.part),
        ),
    ),
)
NAMES = tuple(collective.name for collective in COLLECTIVES)


def find_collective(name: str) -> Collective:
    """Return the collective with this name."""
    return COLLECTIVES[NAMES.index(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The buffers of this rank for one operation. If it works in place, `output` is the same as `input`."""

    input: torch.Tensor
    output: torch.Tensor


# Alignment of buffers that share one block of memory. torch aligns separate allocations in the same way.
ALIGNED_BYTES = 512


def allocate(
    collective: Collective, count: int, dtype: torch.dtype, ranks: Ranks, copies: int = 1
) -> tuple[Buffers, ...]:
    """Allocate `copies` sets of this rank's buffers for a collective with `count` elements.

    All memory is filled with zeros, because the kernel maps memory only when it is first written. Otherwise,
    the first timed launch would include the mapping.
    """
    shape = Shape(count=count, ranks=ranks.world_size, rank=ranks.rank)
    inputs = _allocate_tensors(collective.input(shape), dtype, ranks.device, copies)
    outputs = inputs
    if collective.has_separate_output:
        outputs = _allocate_tensors(collective.output_elements(shape), dtype, ranks.device, copies)
    return tuple(Buffers(input=source, output=target) for source, target in zip(inputs, outputs, strict=True))


def _allocate_tensors(
    elements: int, dtype: torch.dtype, device: torch.device, copies: int
) -> list[torch.Tensor]:
    """Return `copies` tensors of zeros that follow each other in one block of memory."""
    import torch

    stride = elements
    if copies > 1:
        aligned_elements = ALIGNED_BYTES // torch.empty(0, dtype=dtype).element_size()
        stride = math.ceil(elements / aligned_elements) * aligned_elements
    block = torch.empty(stride * copies, dtype=dtype, device=device).zero_()
    starts = [stride * index for index in range(copies)]
    return [block[start : start + elements] for start in starts]


def bind(collective: Collective, buffers: Buffers, ranks: Ranks) -> Launch:
    """Return a function without arguments that runs `collective` once on `buffers`."""
    import torch.distributed as dist

    return collective.call(
        CollectiveCall(
            dist=dist,
            input=buffers.input,
            output=buffers.output,
            ranks=ranks.world_size,
            rank=ranks.rank,
        )
    )


def rotate(launches: Sequence[Launch]) -> Launch:
    """Return a function that runs another one of `launches` at each call, and begins again after the last."""
    cycle = itertools.cycle(launches)
    return lambda: next(cycle)()
