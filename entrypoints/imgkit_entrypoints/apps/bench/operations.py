"""The collectives in torch: their buffers, and the function that launches each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.collectives import ROOT, Collective
from imgkit_entrypoints.apps.bench.machine import RankGroup

Launch = Callable[..., Any]
"""``launch()`` runs the collective; ``launch(async_op=True)`` returns a handle to wait on."""


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


def allocated(
    op: Collective, count: int, dtype: torch.dtype, group: RankGroup, device: torch.device, slots: int = 1
) -> tuple[Buffers, ...]:
    """Allocate buffers for `count` elements, `slots` times.

    All memory is written once, because untouched memory is not mapped yet.
    """

    def cut(elements: int) -> tuple[torch.Tensor, ...]:
        step = ALIGNED_BYTES // torch.empty(0, dtype=dtype).element_size()
        apart = -(-elements // step) * step if slots > 1 else elements
        whole = torch.empty(apart * slots, dtype=dtype, device=device).zero_()
        return tuple(whole[apart * slot : apart * slot + elements] for slot in range(slots))

    given = cut(op.input_elements(count, group.size, group.rank))
    made = cut(op.output_elements(count, group.size, group.rank)) if op.separate else given
    return tuple(Buffers(input=one, output=other) for one, other in zip(given, made, strict=True))


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
        Slot(lanes=lanes, launch=together([launch(op, count, one.buffers, one.group) for one in lanes]))
        for lanes in zip(*columns, strict=True)
    )


def launch(op: Collective, count: int, buffers: Buffers, group: RankGroup) -> Launch:
    """Return the function that runs `op` once on `buffers` for `count` elements."""
    members, given, made = group.torch_group, buffers.input, buffers.output
    if op.copied:
        return _after_copy(op, count, buffers, group)
    root = group.ranks[ROOT]
    redop = getattr(dist.ReduceOp, op.redop.upper())
    if op.name == "all_reduce":
        return lambda async_op=False: dist.all_reduce(given, redop, group=members, async_op=async_op)
    if op.name == "all_gather":
        # torch 2.13 deprecates the older name.
        gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda async_op=False: gather_all(made, given, group=members, async_op=async_op)
    if op.name == "reduce_scatter":
        scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda async_op=False: scatter_sum(made, given, redop, group=members, async_op=async_op)
    if op.name == "broadcast":
        return lambda async_op=False: dist.broadcast(given, root, group=members, async_op=async_op)
    if op.name == "reduce":
        return lambda async_op=False: dist.reduce(given, root, redop, group=members, async_op=async_op)
    if op.name == "alltoall":
        return lambda async_op=False: dist.all_to_all_single(made, given, group=members, async_op=async_op)
    if op.name == "alltoallv":
        sent = list(op.splits(count, group.size))
        received = [sent[group.rank]] * group.size
        return lambda async_op=False: dist.all_to_all_single(
            made, given, received, sent, group=members, async_op=async_op
        )
    if op.name == "gather":
        parts = list(made.chunk(group.size)) if group.rank == ROOT else None
        return lambda async_op=False: dist.gather(given, parts, root, group=members, async_op=async_op)
    if op.name == "scatter":
        parts = list(given.chunk(group.size)) if group.rank == ROOT else None
        return lambda async_op=False: dist.scatter(made, parts, root, group=members, async_op=async_op)
    return _ring(given, made, group)


def rotating(launches: Sequence[Launch]) -> Launch:
    """Return the function that runs the next of `launches` each time, from the first one on."""
    turn = itertools.cycle(launches)
    return lambda async_op=False: next(turn)(async_op=async_op)


def together(launches: Sequence[Launch]) -> Launch:
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


def _after_copy(op: Collective, count: int, buffers: Buffers, group: RankGroup) -> Launch:
    """Copy the input to the output, and run `op` there: what torch's functional collectives do."""
    in_place = dataclasses.replace(op, copied=False, separate=False)
    run = launch(in_place, count, Buffers(input=buffers.output, output=buffers.output), group)

    def copy_and_run(async_op: bool = False) -> Any:
        buffers.output.copy_(buffers.input)
        return run(async_op=async_op)

    return copy_and_run


def _ring(given: torch.Tensor, made: torch.Tensor, group: RankGroup) -> Launch:
    if group.size == 1:
        return lambda async_op=False: Works(()) if made.copy_(given) is made else None
    ranks, size = group.ranks, group.size
    # Receive first: gloo sends once the peer has announced that it is ready. With the other order that
    # announcement waits behind the data, and the two directions take turns (50 % of a link between nodes).
    pair = [
        dist.P2POp(dist.irecv, made, ranks[(group.rank - 1) % size], group.torch_group),
        dist.P2POp(dist.isend, given, ranks[(group.rank + 1) % size], group.torch_group),
    ]

    def run(async_op: bool = False) -> Works | None:
        works = Works(dist.batch_isend_irecv(pair))
        if async_op:
            return works
        works.wait()
        return None

    return run
