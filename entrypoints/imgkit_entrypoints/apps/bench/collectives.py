"""The collectives: one record each, with everything that dist-bench knows about it, and the memory to run it.

Sizes and bus bandwidths are those of NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu (v2.19). To add a
collective, add its record to `COLLECTIVES`. The command line reads the records, so torch is imported only
where a collective runs.
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

# Chunks have a whole multiple of so many bytes, as in nccl-tests.
CHUNK_BYTES = 16
# Root of broadcast, reduce, gather and scatter; nccl-tests' default too.
ROOT = 0

# Runs a collective once; on a GPU it returns before the collective has ended.
Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive output elements, and the input that they come from."""

    start: int
    count: int
    source: int | None
    """Rank whose input the elements are. None means the sum of all ranks' inputs."""
    offset: int
    """Position of the first element in that input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The data of one rank, in elements."""

    count: int
    """Elements of the whole size."""
    ranks: int
    rank: int

    @property
    def part(self) -> int:
        """Elements of one rank's part, where the size is cut into equal parts."""
        return self.count // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """What a collective is called with."""

    dist: Any
    """The module torch.distributed."""
    input: torch.Tensor
    output: torch.Tensor
    """The same as `input` if the operation works in place."""
    ranks: int
    rank: int

    def chunks(self, buffer: torch.Tensor) -> list[torch.Tensor] | None:
        """Return one chunk of `buffer` for each rank on the root, and None on all others."""
        if self.rank != ROOT:
            return None
        return list(buffer.chunk(self.ranks))


def _full_size(shape: Shape) -> int:
    return shape.count


def _part(shape: Shape) -> int:
    return shape.part


def _between_nodes(nodes: int, _ranks_per_node: int) -> Fraction:
    return Fraction(nodes - 1, nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective. The fields of a record are in the order of its life: sizes, figures, call, result."""

    name: str
    parts: bool = False
    """The size counts one chunk per rank; otherwise it is the size of each rank's buffer."""
    input: Callable[[Shape], int] = _full_size
    """Elements of a rank's input."""
    output: Callable[[Shape], int] | None = None
    """Elements of a rank's separate output. None means that input and output are one buffer."""
    sums: bool = False
    """The values of all ranks are added up."""
    has_root: bool = False
    bus: Callable[[Fraction], Fraction] = lambda _: Fraction(1)
    """busbw / algbw: bytes that the links must carry for each byte, from (ranks - 1) / ranks."""
    traffic: Callable[[int, int], Fraction] = lambda _nodes, _ranks_per_node: Fraction(1)
    """Bytes that leave (or enter) the busiest node for each byte, from the nodes and the ranks of each.

    What runs as a ring counts as one flat ring over all ranks.
    """
    fills_network: bool = False
    """All nodes send and receive all the time, so that a low share of the line rate means a problem."""
    call: Callable[[CollectiveCall], Launch]
    """Return the function that runs it once on its buffers."""
    result: Callable[[Shape], tuple[Segment, ...]]
    """The expected output of a rank. It is empty if the operation leaves it undefined."""

    @property
    def separate(self) -> bool:
        """Whether input and output are two buffers."""
        return self.output is not None

    def factor(self, ranks: int) -> float:
        """Return busbw / algbw, by nccl-tests' definition."""
        return float(self.bus(Fraction(ranks - 1, ranks)))

    def busbw_GBps(self, size_bytes: int, seconds: float, ranks: int) -> float:
        """Return the bus bandwidth of one operation that takes `seconds`."""
        return self.factor(ranks) * size_bytes / seconds / 1e9

    def expected_busbw_GBps(self, line_rate_Gbps: float, nodes: int, ranks_per_node: int) -> float:
        """Return the bus bandwidth at which the network of the busiest of several nodes is full.

        Parameters
        ----------
        line_rate_Gbps : what all network adapters of a node together can carry in one direction.
        """
        algbw_GBps = line_rate_Gbps / 8 / float(self.traffic(nodes, ranks_per_node))
        return algbw_GBps * self.factor(nodes * ranks_per_node)

    def elements(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Return the elements of the whole size: whole chunks of 16 bytes per rank if it has parts."""
        count = size_bytes // item_bytes
        if not self.parts:
            return max(1, count)
        chunk_elements = CHUNK_BYTES // item_bytes
        part = count // ranks // chunk_elements * chunk_elements
        return max(chunk_elements, part) * ranks

    def output_elements(self, shape: Shape) -> int:
        """Return the elements of a rank's separate output buffer, or 0 if it has none."""
        if self.output is None:
            return 0
        return self.output(shape)

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Return the bytes of all buffers of the rank that needs most."""
        shape = Shape(count=size_bytes, ranks=ranks, rank=ROOT)
        # Linear in the count, so bytes too.
        return self.input(shape) + self.output_elements(shape)


def _ring_bytes(factor: int) -> Callable[[int, int], Fraction]:
    """Return the traffic of one flat ring that sends `factor` times all chunks but one."""

    def traffic(nodes: int, ranks_per_node: int) -> Fraction:
        ranks = nodes * ranks_per_node
        return factor * Fraction(ranks - 1, ranks)

    return traffic


def _alltoall_bytes(nodes: int, ranks_per_node: int) -> Fraction:
    return ranks_per_node * Fraction(nodes - 1, nodes)


def _all_gather(call: CollectiveCall) -> Launch:
    # torch 2.13 deprecates the older name.
    function = getattr(call.dist, "all_gather_single", None) or call.dist.all_gather_into_tensor
    return partial(function, call.output, call.input)


def _reduce_scatter(call: CollectiveCall) -> Launch:
    function = getattr(call.dist, "reduce_scatter_single", None) or call.dist.reduce_scatter_tensor
    return partial(function, call.output, call.input)


def _alltoallv(call: CollectiveCall) -> Launch:
    splits = [call.input.numel() // call.ranks] * call.ranks
    return partial(call.dist.all_to_all_single, call.output, call.input, splits, splits)


def _sendrecv(call: CollectiveCall) -> Launch:
    """Send to the next rank and receive from the previous one."""
    if call.ranks == 1:
        return partial(call.output.copy_, call.input)
    # Receive first: gloo sends once the peer has announced that it is ready. With the other order that
    # announcement waits behind the data, and the two directions take turns (50 % of a link between nodes).
    pair = [
        call.dist.P2POp(call.dist.irecv, call.output, (call.rank - 1) % call.ranks),
        call.dist.P2POp(call.dist.isend, call.input, (call.rank + 1) % call.ranks),
    ]

    def exchange() -> None:
        for work in call.dist.batch_isend_irecv(pair):
            work.wait()

    return exchange


def _sum_of_all(shape: Shape) -> tuple[Segment, ...]:
    return (Segment(start=0, count=shape.count, source=None, offset=0),)


def _copy_of(shape: Shape, source: int) -> tuple[Segment, ...]:
    return (Segment(start=0, count=shape.count, source=source, offset=0),)


def _joined_parts(shape: Shape, offset: int = 0) -> tuple[Segment, ...]:
    """Return one part of each rank's input, from `offset` on."""
    return tuple(
        Segment(start=source * shape.part, count=shape.part, source=source, offset=offset)
        for source in range(shape.ranks)
    )


COLLECTIVES: tuple[Collective, ...] = (
    Collective(
        name="all_reduce",
        sums=True,
        bus=lambda share: 2 * share,
        traffic=_ring_bytes(2),
        fills_network=True,
        call=lambda to: partial(to.dist.all_reduce, to.input),
        result=_sum_of_all,
    ),
    Collective(
        name="all_gather",
        parts=True,
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
        parts=True,
        output=_part,
        sums=True,
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
        sums=True,
        has_root=True,
        call=lambda to: partial(to.dist.reduce, to.input, ROOT),
        result=lambda shape: _sum_of_all(shape) if shape.rank == ROOT else (),
    ),
    Collective(
        name="alltoall",
        parts=True,
        output=_full_size,
        bus=lambda share: share,
        traffic=_alltoall_bytes,
        fills_network=True,
        call=lambda to: partial(to.dist.all_to_all_single, to.output, to.input),
        result=lambda shape: _joined_parts(shape, shape.rank * shape.part),
    ),
    Collective(
        # With explicit, equal splits: the call of expert-parallel programs.
        name="alltoallv",
        parts=True,
        output=_full_size,
        bus=lambda share: share,
        traffic=_alltoall_bytes,
        fills_network=True,
        call=_alltoallv,
        result=lambda shape: _joined_parts(shape, shape.rank * shape.part),
    ),
    Collective(
        # In a ring in node order: only each node's last rank sends to another node.
        name="sendrecv",
        output=_full_size,
        call=_sendrecv,
        result=lambda shape: _copy_of(shape, (shape.rank - 1) % shape.ranks),
    ),
    Collective(
        name="gather",
        parts=True,
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
        parts=True,
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
    """This rank's memory for one operation. If that works in place, `output` is `input`."""

    input: torch.Tensor
    output: torch.Tensor


# Distance of the beginnings of rotated buffers: as if torch had allocated each by itself.
ALIGNED_BYTES = 512


def allocate(
    collective: Collective, count: int, dtype: torch.dtype, ranks: Ranks, copies: int = 1
) -> tuple[Buffers, ...]:
    """Allocate this rank's buffers for `count` elements, `copies` times.

    All memory is written once, because untouched memory is not mapped yet.
    """
    shape = Shape(count=count, ranks=ranks.world_size, rank=ranks.rank)
    inputs = _allocate_tensors(collective.input(shape), dtype, ranks.device, copies)
    outputs = inputs
    if collective.separate:
        outputs = _allocate_tensors(collective.output_elements(shape), dtype, ranks.device, copies)
    return tuple(Buffers(input=source, output=target) for source, target in zip(inputs, outputs, strict=True))


def _allocate_tensors(
    elements: int, dtype: torch.dtype, device: torch.device, copies: int
) -> list[torch.Tensor]:
    """Return `copies` tensors that lie one behind the other in one block of zeros."""
    import torch

    stride = elements
    if copies > 1:
        aligned_elements = ALIGNED_BYTES // torch.empty(0, dtype=dtype).element_size()
        stride = math.ceil(elements / aligned_elements) * aligned_elements
    block = torch.empty(stride * copies, dtype=dtype, device=device).zero_()
    starts = [stride * number for number in range(copies)]
    return [block[start : start + elements] for start in starts]


def bind(collective: Collective, buffers: Buffers, ranks: Ranks) -> Launch:
    """Return the function that runs `collective` once on `buffers`."""
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
    """Return a function that runs the next of `launches` each time, and after the last the first again."""
    cycle = itertools.cycle(launches)
    return lambda: next(cycle)()
