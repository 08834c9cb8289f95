"""Measure one collective at one size on all ranks: warm up, agree on the counts, time twice, verify."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.measure import port_counters, timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.dtypes import Dtype
from imgkit_entrypoints.apps.bench.measure.groups import RankGroup
from imgkit_entrypoints.apps.bench.measure.operations import Buffers, Launch, allocated, launch
from imgkit_entrypoints.apps.bench.measure.verify import ExpectedValues, WrongElement
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.facts import Reader, root_of
from imgkit_entrypoints.launch import stop_protocol

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.ranks import Ranks

LEAST_BATCH, MOST_BATCH = 5, 1000
LEAST_SINGLE, MOST_SINGLE = 20, 200
_WATCHED_S = 0.1
"""Iterations longer than this check for a stop request each time."""
PROBE_ITERATIONS = 100
PROBE_BYTES = 8
"""So small that no link, however slow, makes a difference; only the processes do."""


class Stopped(Exception):
    """The launcher asks the run to save and end."""


class OutOfMemory(Exception):
    """A rank has no memory for the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one size, over all ranks; times in seconds."""

    size_bytes: int
    batch_iterations: int
    batch_s: float
    """The slowest rank's time for the whole batch."""
    times: tuple[float, ...]
    """The slowest rank's time of every single iteration."""
    wrong: int | None
    first: tuple[WrongElement, ...]
    """The first wrong element of every rank that has one."""
    nodes: tuple[Mapping[str, port_counters.Count], ...]
    """Growth of each node's port counters during the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures one size after the other; the fields stay the same for all sizes."""

    options: BenchOptions
    here: Ranks
    group: RankGroup
    dtype: Dtype
    expected: ExpectedValues | None
    """None: values are not verified."""
    counting: bool
    """True if this rank reads its node's counters."""
    nodes: int

    def size_bytes(self, op: Collective, asked: int) -> int:
        """Round `asked` to whole elements, or to whole chunks for every rank."""
        item = self.dtype.item_bytes
        return op.elements(asked, item, self.group.size) * item

    def buffers(self, op: Collective, size_bytes: int) -> Buffers:
        """Allocate memory for `size_bytes`, on all ranks or on none.

        Raises
        ------
        OutOfMemory : on all ranks, if one of them has too little memory.
        """
        made, failed = None, torch.zeros(1, device=self.here.device)
        try:
            kind = getattr(torch, self.dtype.torch)
            made = allocated(op, size_bytes // self.dtype.item_bytes, kind, self.group, self.here.device)
        except (
            RuntimeError,
            MemoryError,
        ):  # CUDA's OutOfMemoryError and the CPU allocator's error are RuntimeErrors
            failed += 1
        dist.all_reduce(failed)
        if made is None or failed.item():
            raise OutOfMemory
        return made

    def measure(self, op: Collective, asked: int) -> Measurement:
        """Take both timings of `op` at `asked` bytes; a collective call.

        Raises
        ------
        Stopped : on all ranks; the size is not measured. OutOfMemory : on all ranks.
        """
        size_bytes = self.size_bytes(op, asked)
        buffers = self.buffers(op, size_bytes)
        run = launch(op, buffers, self.group)
        if self.options.warmup:
            run()
        rounds = max(1, self.options.warmup - 1)
        one_s = timing.batch(run, rounds, self.here) / rounds
        batches, singles, watched = self._counts(one_s)
        before = self._ports()
        batch_s = timing.batch(run, batches, self.here)
        nodes = self._nodes(port_counters.since(before, self._ports()))
        took, wrong, first = self._singles(op, size_bytes, buffers, run, singles, watched=watched)
        together = self._together([batch_s, float(wrong), *took])
        return Measurement(
            size_bytes=size_bytes,
            batch_iterations=batches,
            batch_s=max(row[0] for row in together),
            times=tuple(max(column) for column in list(zip(*together, strict=True))[2:]),
            wrong=sum(int(row[1]) for row in together) if self.expected else None,
            first=self._first(first) if any(row[1] for row in together) else (),
            nodes=nodes,
        )

    def waits(self) -> list[list[float]]:
        """Seconds that every rank waited in each of many tiny collectives; a collective call."""
        buffer = torch.zeros(PROBE_BYTES // 4, device=self.here.device)
        waits = []
        for turn in range(-5, PROBE_ITERATIONS):
            found = timing.once(lambda async_op=False: dist.all_reduce(buffer, async_op=async_op), self.here)
            if turn >= 0:
                waits.append(found.waited)
        return self._together(waits)

    def _counts(self, one_s: float) -> tuple[int, int, bool]:
        """Agree on the iterations of both timings, and on whether each checks for a stop request."""

        def decide() -> tuple[float, ...]:
            fitting = int(self.options.seconds / max(one_s, 1e-7))
            batches = self.options.iters or min(MOST_BATCH, max(LEAST_BATCH, fitting))
            singles = self.options.iters or min(MOST_SINGLE, fitting)
            # Intermittent errors need iterations to show.
            singles = max(singles, LEAST_SINGLE if self.expected else 1)
            return batches, singles, one_s > _WATCHED_S, asked_to_stop()

        batches, singles, watched, stop = timing.agreed(decide, 4, self.here)
        if stop:
            raise Stopped
        return int(batches), int(singles), bool(watched)

    def _singles(
        self, op: Collective, size_bytes: int, buffers: Buffers, run: Launch, count: int, *, watched: bool
    ) -> tuple[list[float], int, WrongElement | None]:
        elements = size_bytes // self.dtype.item_bytes
        expected = op.result(elements, self.group.size, self.group.rank)
        took, wrong = [], 0
        first: WrongElement | None = None
        for turn in range(count):
            if watched and timing.agreed(lambda: (asked_to_stop(),), 1, self.here)[0]:
                raise Stopped
            if self.expected:
                self.expected.fill(buffers.input, self.group.rank, turn)
            took.append(timing.once(run, self.here).took)
            if not self.expected:
                continue
            found, what = self.expected.wrong(buffers.output, expected, turn)
            wrong += found
            if what and first is None:
                index, must, is_ = what
                first = WrongElement(
                    op=op.name,
                    size_bytes=size_bytes,
                    iteration=turn,
                    rank=self.here.rank,
                    index=index,
                    expected=must,
                    got=is_,
                )
        return took, wrong, first

    def _together(self, mine: list[float]) -> list[list[float]]:
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.here.device)
        rows = [torch.empty_like(numbers) for _ in range(self.here.world_size)]
        dist.all_gather(rows, numbers)
        return [row.tolist() for row in rows]

    def _first(self, mine: WrongElement | None) -> tuple[WrongElement, ...]:
        found: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(found, mine)
        return tuple(item for item in found if item is not None)

    def _ports(self) -> dict[str, port_counters.Count]:
        return port_counters.read(Reader(root=root_of(os.environ))) if self.counting else {}

    def _nodes(
        self, mine: Mapping[str, port_counters.Count]
    ) -> tuple[Mapping[str, port_counters.Count], ...]:
        if self.nodes == 1:
            return ()
        found: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(found, mine if self.counting else None)
        return tuple(item for item in found if item is not None)


def asked_to_stop() -> float:
    """1.0 if the launcher has asked this node's workers to stop, else 0.0."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    return float(bool(folder) and (Path(folder or "") / stop_protocol.STOP).exists())
