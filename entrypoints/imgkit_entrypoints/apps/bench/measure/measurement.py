"""Measure one collective at one size on all ranks: warm up, agree on the counts, time twice, verify."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.measure import port_counters, timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.counts import Counts, planned
from imgkit_entrypoints.apps.bench.measure.dtypes import Dtype
from imgkit_entrypoints.apps.bench.measure.groups import RankGroup
from imgkit_entrypoints.apps.bench.measure.one_size import OneSize, Stopped, asked_to_stop
from imgkit_entrypoints.apps.bench.measure.operations import Slot, prepared
from imgkit_entrypoints.apps.bench.measure.verify import ExpectedValues, Noise, WrongElement
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.facts import Reader, root_of

if TYPE_CHECKING:
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
    nodes: tuple[Mapping[str, port_counters.Count], ...]
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
        if self.options.warmup:
            run()
        guesses = [timing.batch(run, 1, self.here) for _ in range(max(1, self.options.warmup - 1))]
        counts, watched = self._counts(size_bytes, statistics.median(guesses), before)
        rotated = min(counts.launches, self.rotated_bytes // self.needed_bytes(op, size_bytes))
        if rotated > 1:
            del run  # and with it the memory of the guesses
            slots = self.slots(op, size_bytes, rotated)
        expected = self.expected if op.exact(self.group.size) else None
        one = OneSize(op, counts, slots, here=self.here, noise=self.noise, expected=expected)
        grown: list[Mapping[str, port_counters.Count]] = []
        for batches, singles in counts.turns():
            ports = self._ports()
            one.time_batches(batches)
            grown.append(port_counters.since(ports, self._ports()))
            one.time_singles(singles, watched=watched)
        together = self.together([float(one.wrong), *one.batches, *one.singles])
        slowest = [max(column) for column in zip(*together, strict=True)][1:]
        return Measurement(
            counts=counts,
            batches=tuple(slowest[: counts.batches]),
            times=tuple(slowest[counts.batches :]),
            wrong=sum(int(row[0]) for row in together) if expected else None,
            first=self._first(one.first) if any(row[0] for row in together) else (),
            nodes=self._nodes(port_counters.total(grown)),
        )

    def waits(self) -> list[list[float]]:
        """Seconds that every rank waited in each of many tiny collectives; a collective call."""
        buffer = torch.zeros(PROBE_BYTES // 4, device=self.here.device)
        waits = []
        for turn in range(-5, PROBE_ITERATIONS):
            found = timing.once(lambda async_op=False: dist.all_reduce(buffer, async_op=async_op), self.here)
            if turn >= 0:
                waits.append(found.waited)
        return self.together(waits)

    def _counts(self, size_bytes: int, one_s: float, before: Counts | None) -> tuple[Counts, bool]:
        """Agree on the counts, and on whether each single iteration checks for a stop request."""
        fitting = self.options.seconds / max(one_s, 1e-7)
        found = timing.agreed(lambda: (fitting, one_s > _WATCHED_S, asked_to_stop()), 3, self.here)
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

    def _ports(self) -> dict[str, port_counters.Count]:
        return port_counters.read(Reader(root=root_of(os.environ))) if self.counting else {}

    def _nodes(
        self, mine: Mapping[str, port_counters.Count]
    ) -> tuple[Mapping[str, port_counters.Count], ...]:
        if self.nodes == 1:
            return ()
        counts = Mapping[str, port_counters.Count] | None
        found = self.here.gather(mine if self.counting else None, counts)
        return tuple(item for item in found if item is not None)
