"""The collectives: one record each, with everything that dist-bench knows about it, and the memory to run it.

Sizes and bus bandwidths are those of NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu (v2.19). To add a
collective, add its record to `COLLECTIVES`. The command line reads the records, so torch is imported only
where a collective runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.apps.bench.machine import RankGroup

CHUNK_BYTES = 16
"""Chunks are whole multiples of this, as in nccl-tests."""
ROOT = 0
"""Root of broadcast, reduce, gather and scatter; nccl-tests' default too."""
REDOPS = ("sum", "min", "max", "avg")

Launch = Callable[..., Any]
"""``launch()`` runs the collective; ``launch(async_op=True)`` returns a handle to wait on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive output elements, and the input that they come from."""

    start: int
    count: int
    source: int | None
    """Rank whose input the elements are; None: all ranks' inputs, combined."""
    offset: int
    """Position of the first element in that input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The data of one rank, in elements."""

    count: int
    """Elements of the whole size."""
    ranks: int
    rank: int
    splits: tuple[int, ...]
    """Elements that each rank sends to rank 0, 1, ...; equal parts unless the data is skewed."""

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
    group: RankGroup
    redop: Any
    """torch's operation that combines the values."""
    splits: tuple[int, ...]

    @property
    def root(self) -> int:
        """The root's rank among all ranks."""
        return self.group.ranks[ROOT]

    def bind(self, function: Callable[..., Any], *arguments: object) -> Launch:
        """Return `function` of torch, with these arguments, for the ranks of the group."""
        return functools.partial(function, *arguments, group=self.group.torch_group)

    def chunks(self, buffer: torch.Tensor) -> list[torch.Tensor] | None:
        """One chunk of `buffer` per rank, on the root; None on all others."""
        return list(buffer.chunk(self.group.size)) if self.group.rank == ROOT else None


def _whole(shape: Shape) -> int:
    return shape.count


def _part(shape: Shape) -> int:
    return shape.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective. The fields of a record are in the order of its life: sizes, figures, call, result."""

    name: str
    parts: bool = False
    """The size counts one chunk per rank; otherwise it is the size of each rank's buffer."""
    input: Callable[[Shape], int] = _whole
    """Elements of a rank's input."""
    output: Callable[[Shape], int] | None = None
    """Elements of a rank's separate output; None: input and output are one buffer."""
    sums: bool = False
    """The values of all ranks are combined."""
    bus: Callable[[Fraction], Fraction] = lambda _: Fraction(1)
    """busbw / algbw: bytes that the links must carry for each byte, from (ranks - 1) / ranks."""
    leaves_node: Callable[[float, Sequence[float]], float] = lambda _share, _weights: 1.0
    """Bytes that must leave (or enter) the busiest node for each byte of the size.

    From (nodes - 1) / nodes, and for each rank of that node its data as a share of rank 0's. The least that a
    hierarchical algorithm sends.
    """
    rings: bool = False
    """A flat ring over all ranks sends as much as `bus` says, and may be what runs."""
    fills_network: bool = False
    """All nodes send and receive all the time, so that a low share of the line rate means a problem."""
    call: Callable[[CollectiveCall], Launch]
    """Return the function that runs it once on its buffers."""
    result: Callable[[Shape], tuple[Segment, ...]]
    """The expected output of a rank; empty if the operation leaves it undefined."""
    in_all: bool = True
    """``dist-bench all`` runs it."""

    # The variant, from the command line.
    redop: str = "sum"
    """How the values of all ranks are combined: one of `REDOPS`."""
    copied: bool = False
    """The input is copied into the output first: torch runs this operation in place only."""
    skew: float = 0.0
    """alltoallv: rank k receives (1 + k)^-skew of what rank 0 receives, as from popular experts."""

    @property
    def separate(self) -> bool:
        """Input and output are two buffers; otherwise one."""
        return self.output is not None

    @property
    def variant(self) -> str:
        """What differs from the plain operation, in words; empty for the plain one."""
        parts = (
            self.redop if self.redop != "sum" else "",
            "out of place" if self.copied else "",
            f"skew {self.skew:g}" if self.name == SKEWED else "",
        )
        return ", ".join(part for part in parts if part)

    def exact(self, ranks: int) -> bool:
        """True if the result does not depend on rounding: averages of 2, 4, 8, ... ranks do not."""
        return self.redop != "avg" or ranks & (ranks - 1) == 0

    def factor(self, ranks: int) -> float:
        """busbw / algbw, by nccl-tests' definition."""
        return float(self.bus(Fraction(ranks - 1, ranks)))

    def busbw_GBps(self, size_bytes: int, seconds: float, ranks: int) -> float:
        """The bus bandwidth of one operation that takes `seconds`."""
        return self.factor(ranks) * size_bytes / seconds / 1e9

    def elements(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Elements of the whole size; whole chunks of 16 bytes per rank if the size is cut into parts."""
        count = size_bytes // item_bytes
        if not self.parts:
            return max(1, count)
        least = CHUNK_BYTES // item_bytes
        return max(least, count // ranks // least * least) * ranks

    def shape(self, count: int, ranks: int, rank: int) -> Shape:
        """The data of `rank`; `count` is the whole size in elements."""
        return Shape(count=count, ranks=ranks, rank=rank, splits=self._splits(count, ranks))

    def _splits(self, count: int, ranks: int) -> tuple[int, ...]:
        """Elements that each rank sends to rank 0, 1, ... in an alltoallv; rank 0 receives `count`."""
        part = count // ranks
        if not self.skew:
            return (part,) * ranks
        least = min(part, CHUNK_BYTES)  # of any type a multiple of 16 bytes
        cut = (int(part * self._weight(rank)) // CHUNK_BYTES * CHUNK_BYTES for rank in range(1, ranks))
        return (part, *(max(least, elements) for elements in cut))

    def _weight(self, rank: int) -> float:
        """Bytes for `rank` as a share of those for rank 0."""
        return float((1 + rank) ** -self.skew)

    def input_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of the input buffer of `rank`; `count` is the whole size in elements."""
        return self.input(self.shape(count, ranks, rank))

    def output_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of the separate output buffer of `rank`."""
        return self.output(self.shape(count, ranks, rank)) if self.output else 0

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Bytes of all buffers of the rank that needs most."""
        return sum(
            kind(size_bytes, ranks, ROOT) for kind in (self.input_elements, self.output_elements)
        )  # both are linear in the count, so they take bytes as well

    def least_traffic(self, nodes: int, per_node: int) -> float:
        """Bytes that must leave (or enter) the busiest of `nodes` nodes for each byte of the size.

        A hierarchical algorithm sends this much; 0 on one node.
        """
        if nodes == 1:
            return 0.0
        return self.leaves_node((nodes - 1) / nodes, [self._weight(rank) for rank in range(per_node)])

    def ring_traffic(self, nodes: int, per_node: int) -> float:
        """The same for one flat ring over all ranks; never below `least_traffic`."""
        if nodes == 1:
            return 0.0
        ring = self.factor(nodes * per_node) if self.rings else 0.0
        return max(ring, self.least_traffic(nodes, per_node))


def _gather_all(call: CollectiveCall) -> Launch:
    # torch 2.13 deprecates the older name.
    function = getattr(call.dist, "all_gather_single", None) or call.dist.all_gather_into_tensor
    return call.bind(function, call.output, call.input)


def _scatter_sums(call: CollectiveCall) -> Launch:
    function = getattr(call.dist, "reduce_scatter_single", None) or call.dist.reduce_scatter_tensor
    return call.bind(function, call.output, call.input, call.redop)


def _ring(call: CollectiveCall) -> Launch:
    """Send to the next rank and receive from the one before."""
    group = call.group
    if group.size == 1:
        return lambda async_op=False: Works(()) if call.output.copy_(call.input) is call.output else None
    # Receive first: gloo sends once the peer has announced that it is ready. With the other order that
    # announcement waits behind the data, and the two directions take turns (50 % of a link between nodes).
    receive, send = call.dist.irecv, call.dist.isend
    before, after = group.ranks[(group.rank - 1) % group.size], group.ranks[(group.rank + 1) % group.size]
    pair = [
        call.dist.P2POp(receive, call.output, before, group.torch_group),
        call.dist.P2POp(send, call.input, after, group.torch_group),
    ]

    def run(async_op: bool = False) -> Works | None:
        works = Works(call.dist.batch_isend_irecv(pair))
        if async_op:
            return works
        works.wait()
        return None

    return run


def _combined(shape: Shape) -> tuple[Segment, ...]:
    """All elements, of all ranks together."""
    return (Segment(start=0, count=shape.count, source=None, offset=0),)


def _copied(shape: Shape, source: int) -> tuple[Segment, ...]:
    """All elements, of one rank."""
    return (Segment(start=0, count=shape.count, source=source, offset=0),)


def _joined(shape: Shape, count: int, offset: int = 0) -> tuple[Segment, ...]:
    """`count` elements of each rank, from `offset` of its input on."""
    return tuple(
        Segment(start=source * count, count=count, source=source, offset=offset)
        for source in range(shape.ranks)
    )


COLLECTIVES: tuple[Collective, ...] = (
    Collective(
        name="all_reduce",
        sums=True,
        bus=lambda share: 2 * share,
        leaves_node=lambda share, _: 2 * share,
        rings=True,
        fills_network=True,
        call=lambda to: to.bind(to.dist.all_reduce, to.input, to.redop),
        result=_combined,
    ),
    Collective(
        name="all_gather",
        parts=True,
        input=_part,
        output=_whole,
        bus=lambda share: share,
        leaves_node=lambda share, _: share,
        rings=True,
        fills_network=True,
        call=_gather_all,
        result=lambda shape: _joined(shape, shape.part),
    ),
    Collective(
        name="reduce_scatter",
        parts=True,
        output=_part,
        sums=True,
        bus=lambda share: share,
        leaves_node=lambda share, _: share,
        rings=True,
        fills_network=True,
        call=_scatter_sums,
        result=lambda shape: (
            Segment(start=0, count=shape.part, source=None, offset=shape.rank * shape.part),
        ),
    ),
    Collective(
        name="broadcast",
        call=lambda to: to.bind(to.dist.broadcast, to.input, to.root),
        result=lambda shape: _copied(shape, ROOT),
    ),
    Collective(
        name="reduce",
        sums=True,
        call=lambda to: to.bind(to.dist.reduce, to.input, to.root, to.redop),
        result=lambda shape: _combined(shape) if shape.rank == ROOT else (),
    ),
    Collective(
        name="alltoall",
        parts=True,
        output=_whole,
        bus=lambda share: share,
        leaves_node=lambda share, weights: len(weights) * share,
        fills_network=True,
        call=lambda to: to.bind(to.dist.all_to_all_single, to.output, to.input),
        result=lambda shape: _joined(shape, shape.part, shape.rank * shape.part),
    ),
    Collective(
        name="alltoallv",
        parts=True,
        input=lambda shape: sum(shape.splits),
        output=lambda shape: shape.splits[shape.rank] * shape.ranks,
        bus=lambda share: share,
        leaves_node=lambda share, weights: share * sum(weights),
        call=lambda to: to.bind(
            to.dist.all_to_all_single,
            to.output,
            to.input,
            [to.splits[to.group.rank]] * to.group.size,
            list(to.splits),
        ),
        result=lambda shape: _joined(shape, shape.splits[shape.rank], sum(shape.splits[: shape.rank])),
        in_all=False,
    ),
    Collective(
        name="sendrecv",  # in a ring in node order: only each node's last rank sends to another node
        output=_whole,
        call=_ring,
        result=lambda shape: _copied(shape, (shape.rank - 1) % shape.ranks),
    ),
    Collective(
        name="gather",
        parts=True,
        input=_part,
        output=lambda shape: shape.count if shape.rank == ROOT else 0,
        bus=lambda share: share,
        leaves_node=lambda share, _: share,
        call=lambda to: to.bind(to.dist.gather, to.input, to.chunks(to.output), to.root),
        result=lambda shape: _joined(shape, shape.part) if shape.rank == ROOT else (),
    ),
    Collective(
        name="scatter",
        parts=True,
        input=lambda shape: shape.count if shape.rank == ROOT else 0,
        output=_part,
        bus=lambda share: share,
        leaves_node=lambda share, _: share,
        call=lambda to: to.bind(to.dist.scatter, to.output, to.chunks(to.input), to.root),
        result=lambda shape: (
            Segment(start=0, count=shape.part, source=ROOT, offset=shape.rank * shape.part),
        ),
    ),
)
SKEWED = "alltoallv"
"""The collective whose parts differ in size."""
NAMES = tuple(item.name for item in COLLECTIVES)
EVERY = tuple(item.name for item in COLLECTIVES if item.in_all)
"""The collectives of ``dist-bench all``."""


def named(name: str) -> Collective:
    """Return the collective with this name."""
    return next(item for item in COLLECTIVES if item.name == name)


def variant(name: str, *, redop: str = "sum", out_of_place: bool = False, skew: float = 0.0) -> Collective:
    """Return the collective with this name, in the variant of the options where it has one."""
    op = named(name)
    if op.sums:
        op = dataclasses.replace(op, redop=redop)
    if out_of_place and not op.separate:
        op = dataclasses.replace(op, output=_whole, copied=True)
    return dataclasses.replace(op, skew=skew) if name == SKEWED else op


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """This rank's memory for one operation; `output` is `input` if the operation works in place."""

    input: torch.Tensor
    output: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The memory of one communicator."""

    group: RankGroup
    count: int
    """Elements of the whole size."""
    buffers: Buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The memory of one launch, and the function that runs it on all communicators at once."""

    lanes: tuple[Lane, ...]
    launch: Launch


class Works:
    """Several asynchronous operations as one handle."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()


ALIGNED_BYTES = 512
"""Distance of the beginnings of rotated buffers: as if torch had allocated each by itself."""


def prepared(
    op: Collective,
    count: int,
    dtype: torch.dtype,
    groups: Sequence[RankGroup],
    device: torch.device,
    slots: int = 1,
) -> tuple[Slot, ...]:
    """Allocate memory for `slots` launches of `op` on `count` elements by all `groups`."""
    columns = [
        [
            Lane(group=group, count=count, buffers=one)
            for one in allocated(op, count, dtype, group, device, slots)
        ]
        for group in groups
    ]
    return tuple(
        Slot(lanes=lanes, launch=_together([launch(op, count, one.buffers, one.group) for one in lanes]))
        for lanes in zip(*columns, strict=True)
    )


def allocated(
    op: Collective, count: int, dtype: torch.dtype, group: RankGroup, device: torch.device, slots: int = 1
) -> tuple[Buffers, ...]:
    """Allocate buffers for `count` elements, `slots` times.

    All memory is written once, because untouched memory is not mapped yet.
    """
    import torch

    def cut(elements: int) -> tuple[torch.Tensor, ...]:
        step = ALIGNED_BYTES // torch.empty(0, dtype=dtype).element_size()
        apart = -(-elements // step) * step if slots > 1 else elements
        whole = torch.empty(apart * slots, dtype=dtype, device=device).zero_()
        return tuple(whole[apart * slot : apart * slot + elements] for slot in range(slots))

    inputs = cut(op.input_elements(count, group.size, group.rank))
    outputs = cut(op.output_elements(count, group.size, group.rank)) if op.separate else inputs
    return tuple(Buffers(input=one, output=other) for one, other in zip(inputs, outputs, strict=True))


def launch(op: Collective, count: int, buffers: Buffers, group: RankGroup) -> Launch:
    """Return the function that runs `op` once on `buffers` for `count` elements."""
    import torch.distributed as dist

    run = op.call(
        CollectiveCall(
            dist=dist,
            input=buffers.output if op.copied else buffers.input,
            output=buffers.output,
            group=group,
            redop=getattr(dist.ReduceOp, op.redop.upper()),
            splits=op.shape(count, group.size, group.rank).splits,
        )
    )
    if not op.copied:
        return run

    def copy_and_run(async_op: bool = False) -> Any:
        """Copy the input to the output, and run there: what torch's functional collectives do."""
        buffers.output.copy_(buffers.input)
        return run(async_op=async_op)

    return copy_and_run


def rotating(launches: Sequence[Launch]) -> Launch:
    """Return the function that runs the next of `launches` each time, from the first one on."""
    turn = itertools.cycle(launches)
    return lambda async_op=False: next(turn)(async_op=async_op)


def _together(launches: Sequence[Launch]) -> Launch:
    """Return the function that runs all `launches` at once, each on a communicator of its own."""
    if len(launches) == 1:
        return launches[0]

    def run(async_op: bool = False) -> Works | None:
        works = Works([one(async_op=True) for one in launches])
        if async_op:
            return works
        works.wait()
        return None

    return run
