"""Measure one collective at one size on all ranks: warm up, agree on the counts, time twice, verify.

The two timings are never mixed: a batch of launches with one wait, and every iteration by itself. GPU times
come from CUDA events, CPU times from the monotonic clock. Both hold for one rank alone; `Measurer` takes the
slowest rank's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import node_state
from imgkit_entrypoints.apps.bench.collectives import Collective, Lane, Slot, prepared, rotating
from imgkit_entrypoints.apps.bench.machine import RankGroup
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.apps.bench.sizes import Counts, planned
from imgkit_entrypoints.apps.bench.verify import Dtype, ExpectedValues, Noise, WrongElement
from imgkit_entrypoints.facts import Reader, root_of
from imgkit_entrypoints.launch import stop_protocol

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.collectives import Launch
    from imgkit_entrypoints.run.ranks import Ranks

ROTATED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Memory through which batches rotate: more than most caches hold."""
_WATCHED_S = 0.1
"""Iterations longer than this check for a stop request each time."""
PROBE_ITERATIONS = 100
PROBE_BYTES = 8
"""So small that no link, however slow, makes a difference; only the processes do."""


class OutOfMemory(Exception):
    """A rank has no memory for the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one size, over all ranks; times in seconds."""

    counts: Counts
    batches: tuple[float, ...]
    """The slowest rank's time of every batch."""
    times: tuple[float, ...]
    """The slowest rank's time of every single iteration."""
    wrong: int | None
    first: tuple[WrongElement, ...]
    """The first wrong element of every rank that has one."""
    nodes: tuple[Mapping[str, node_state.Count], ...]
    """Growth of each node's port counters during the batches."""

    @property
    def size_bytes(self) -> int:
        """The size that was measured."""
        return self.counts.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures one size after the other; the fields stay the same for all sizes."""

    options: BenchOptions
    here: Ranks
    groups: tuple[RankGroup, ...]
    """The communicators that run each operation at once; all have the same ranks."""
    dtype: Dtype
    expected: ExpectedValues | None
    """None: values are not verified."""
    counting: bool
    """True if this rank reads its node's counters."""
    nodes: int
    noise: Noise
    rotated_bytes: int
    """Memory through which batches rotate."""

    @property
    def group(self) -> RankGroup:
        """The ranks that run a collective together with this one."""
        return self.groups[0]

    def size_bytes(self, op: Collective, asked: int) -> int:
        """Round `asked` to whole elements, or to whole chunks for every rank."""
        item = self.dtype.item_bytes
        return op.elements(asked, item, self.group.size) * item

    def slots(self, op: Collective, size_bytes: int, number: int = 1) -> tuple[Slot, ...]:
        """Allocate memory for `number` launches of `size_bytes`, on all ranks or on none.

        Raises
        ------
        OutOfMemory : on all ranks, if one of them has too little memory.
        """
        made: tuple[Slot, ...] = ()
        failed = torch.zeros(1, device=self.here.device)
        try:
            kind, count = getattr(torch, self.dtype.torch), size_bytes // self.dtype.item_bytes
            made = prepared(op, count, kind, self.groups, self.here.device, number)
        except (
            RuntimeError,
            MemoryError,
        ):  # CUDA's OutOfMemoryError and the CPU allocator's error are RuntimeErrors
            failed += 1
        dist.all_reduce(failed)
        if not made or failed.item():
            raise OutOfMemory
        return made

    def once(self, op: Collective, size_bytes: int) -> None:
        """Run `op` once, untimed; a collective call."""
        self.slots(op, size_bytes)[0].launch()
        self.here.synchronize()

    def needed_bytes(self, op: Collective, size_bytes: int) -> int:
        """Memory for one launch, on the rank that needs most."""
        return len(self.groups) * op.buffer_bytes(size_bytes, self.group.size)

    def measure(self, op: Collective, asked: int, before: Counts | None = None) -> Measurement:
        """Take both timings of `op` at `asked` bytes; a collective call. `before` is of the last size.

        Raises
        ------
        Stopped : on all ranks; the size is not measured. OutOfMemory : on all ranks.
        """
        size_bytes = self.size_bytes(op, asked)
        slots = self.slots(op, size_bytes)
        run = slots[0].launch
        if self.options.warmup_iters:
            run()
        guesses = [time_batch(run, 1, self.here) for _ in range(max(1, self.options.warmup_iters - 1))]
        counts, watched = self._counts(size_bytes, statistics.median(guesses), before)
        rotated = min(counts.launches, self.rotated_bytes // self.needed_bytes(op, size_bytes))
        if rotated > 1:
            del run  # and with it the memory of the guesses
            slots = self.slots(op, size_bytes, rotated)
        expected = self.expected if op.exact(self.group.size) else None
        one = OneSize(op, counts, slots, here=self.here, noise=self.noise, expected=expected)
        grown: list[Mapping[str, node_state.Count]] = []
        for batches, singles in counts.turns():
            ports = self._ports()
            one.time_batches(batches)
            grown.append(node_state.since(ports, self._ports()))
            one.time_singles(singles, watched=watched)
        together = self.together([float(one.wrong), *one.batches, *one.singles])
        slowest = [max(column) for column in zip(*together, strict=True)][1:]
        return Measurement(
            counts=counts,
            batches=tuple(slowest[: counts.batches]),
            times=tuple(slowest[counts.batches :]),
            wrong=sum(int(row[0]) for row in together) if expected else None,
            first=self._first(one.first) if any(row[0] for row in together) else (),
            nodes=self._nodes(node_state.total(grown)),
        )

    def waits(self) -> list[list[float]]:
        """Seconds that every rank waited in each of many tiny collectives; a collective call."""
        buffer = torch.zeros(PROBE_BYTES // 4, device=self.here.device)
        waits = []
        for turn in range(-5, PROBE_ITERATIONS):
            found = time_once(lambda async_op=False: dist.all_reduce(buffer, async_op=async_op), self.here)
            if turn >= 0:
                waits.append(found.waited)
        return self.together(waits)

    def _counts(self, size_bytes: int, one_s: float, before: Counts | None) -> tuple[Counts, bool]:
        """Agree on the counts, and on whether each single iteration checks for a stop request."""
        fitting = self.options.seconds / max(one_s, 1e-7)
        found = agreed(lambda: (fitting, one_s > _WATCHED_S, stop_requested()), 3, self.here)
        if found[2]:
            raise Stopped
        counts = planned(
            size_bytes,
            fitting=found[0],
            iters=self.options.iters,
            checked=self.expected is not None,
            before=before,
        )
        return counts, bool(found[1])

    def together(self, mine: list[float]) -> list[list[float]]:
        """Every rank's numbers; a collective call."""
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.here.device)
        rows = [torch.empty_like(numbers) for _ in range(self.here.world_size)]
        dist.all_gather(rows, numbers)
        return [row.tolist() for row in rows]

    def _first(self, mine: WrongElement | None) -> tuple[WrongElement, ...]:
        found = self.here.gather(mine, WrongElement | None)
        return tuple(item for item in found if item is not None)

    def _ports(self) -> dict[str, node_state.Count]:
        return node_state.read_ports(Reader(root=root_of(os.environ))) if self.counting else {}

    def _nodes(self, mine: Mapping[str, node_state.Count]) -> tuple[Mapping[str, node_state.Count], ...]:
        if self.nodes == 1:
            return ()
        counts = Mapping[str, node_state.Count] | None
        found = self.here.gather(mine if self.counting else None, counts)
        return tuple(item for item in found if item is not None)


class Stopped(Exception):
    """The node agent asks the run to save and end."""


class OneSize:
    """Times of one size on this rank, in seconds."""

    def __init__(
        self,
        op: Collective,
        counts: Counts,
        slots: Sequence[Slot],
        *,
        here: Ranks,
        noise: Noise,
        expected: ExpectedValues | None,
    ) -> None:
        self._op, self._counts, self._slots = op, counts, slots
        self._here, self._noise, self._expected = here, noise, expected
        self.batches: list[float] = []
        """Time of each batch."""
        self.singles: list[float] = []
        self.wrong = 0
        """Elements that differ from the expected ones."""
        self.first: WrongElement | None = None

    def time_batches(self, count: int) -> None:
        """Time `count` batches, whose launches rotate through buffers of random data."""
        for turn in range(count):
            if turn == 0 or (self._op.sums and not self._op.separate):  # sums in place grow, up to infinity
                for number, slot in enumerate(self._slots):
                    for lane in slot.lanes:
                        self._noise.fill(lane.buffers.input, lane.group.rank, number)
            run = rotating([slot.launch for slot in self._slots])
            self.batches.append(time_batch(run, self._counts.launches, self._here))

    def time_singles(self, count: int, *, watched: bool) -> None:
        """Time `count` iterations by themselves; each asks for a stop request if `watched`.

        Raises
        ------
        Stopped : on all ranks.
        """
        for _ in range(count):
            if watched and agreed(lambda: (stop_requested(),), 1, self._here)[0]:
                raise Stopped
            turn, slot = len(self.singles), self._slots[0]
            numbered = [(turn * len(slot.lanes) + place, lane) for place, lane in enumerate(slot.lanes)]
            if self._expected:
                for number, lane in numbered:
                    self._expected.fill(lane.buffers.input, lane.group.rank, number)
            self.singles.append(time_once(slot.launch, self._here).took)
            if self._expected:
                for number, lane in numbered:
                    self._verify(self._expected, lane, turn, number)

    def _verify(self, expected: ExpectedValues, lane: Lane, turn: int, number: int) -> None:
        result = self._op.result(self._op.shape(lane.count, lane.group.size, lane.group.rank))
        count, what = expected.wrong(lane.buffers.output, result, number)
        self.wrong += count
        if what and self.first is None:
            index, must, is_ = what
            self.first = WrongElement(
                op=self._op.name,
                size_bytes=self._counts.size_bytes,
                iteration=turn,
                rank=self._here.rank,
                index=index,
                expected=f"{must:g}",
                got=f"{is_:g}",
            )


def stop_requested() -> float:
    """1.0 if the node agent has asked this node's workers to stop, else 0.0."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    return float(bool(folder) and (Path(folder or "") / stop_protocol.STOP).exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """The times of one iteration on this rank, in seconds."""

    took: float
    waited: float
    """Time from the launch to the end: the rank that comes last waits least."""


def meet(here: Ranks) -> None:
    """Let all ranks meet, with no work left on the device."""
    here.synchronize()
    dist.barrier()
    here.synchronize()


def time_batch(launch: Launch, count: int, here: Ranks) -> float:
    """Time `count` launches and one wait for all of them, in seconds."""
    meet(here)
    if here.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            launch()
        ended.record()
        here.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = time.perf_counter()
    for _ in range(count):
        launch()
    return time.perf_counter() - start


def time_once(launch: Launch, here: Ranks, meanwhile: Callable[[], object] | None = None) -> Once:
    """Time one launch and the wait for it, after all ranks have met; `meanwhile` runs between both."""
    meet(here)
    if here.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work = launch(async_op=True)
        if meanwhile:
            meanwhile()
        work.wait()
        ended.record()
        launched = time.perf_counter()
        here.synchronize()
        done = time.perf_counter()
        return Once(took=float(began.elapsed_time(ended)) / 1e3, waited=done - launched)
    start = time.perf_counter()
    work = launch(async_op=True)
    launched = time.perf_counter()
    if meanwhile:
        meanwhile()
    work.wait()
    done = time.perf_counter()
    return Once(took=done - start, waited=done - launched)


def agreed(values: Callable[[], tuple[float, ...]], size: int, here: Ranks) -> tuple[float, ...]:
    """Broadcast the `size` numbers that rank 0 computes. Ranks that decided alone could wait for ever."""
    numbers = torch.zeros(size, dtype=torch.float64)
    if here.rank == 0:
        numbers = torch.tensor(values(), dtype=torch.float64)
    numbers = numbers.to(here.device)
    dist.broadcast(numbers, 0)
    return tuple(numbers.tolist())
