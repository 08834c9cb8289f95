"""One operation at one size, on all ranks: warm up, agree on the counts, both timings, values verified."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.judge import counters, stragglers
from imgkit_entrypoints.apps.bench.measure import timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.dtypes import Dtype
from imgkit_entrypoints.apps.bench.measure.operations import Buffers, Launch, allocated, launch
from imgkit_entrypoints.apps.bench.measure.teams import Team
from imgkit_entrypoints.apps.bench.measure.verify import Truth, Wrong
from imgkit_entrypoints.apps.bench.options import Options
from imgkit_entrypoints.facts import Reader, root_of
from imgkit_entrypoints.launch import stop_protocol

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.ranks import Ranks

LEAST_BATCH, MOST_BATCH = 5, 1000
LEAST_SINGLE, MOST_SINGLE = 20, 200
_WATCHED_S = 0.1
"""Iterations longer than this ask each time if the run shall stop."""


class Stopped(Exception):
    """The launcher asks to save and end."""


class OutOfMemory(Exception):
    """Some rank has no room for the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One size, as all ranks know it; times in seconds."""

    size_bytes: int
    batch_iterations: int
    batch_s: float
    """Of the whole batch, of the slowest rank."""
    times: tuple[float, ...]
    """Of every single iteration the slowest rank's."""
    wrong: int | None
    first: tuple[Wrong, ...]
    """The first wrong element of every rank that had one."""
    nodes: tuple[Mapping[str, counters.Count], ...]
    """What each node's ports counted during the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What stays the same from size to size."""

    options: Options
    here: Ranks
    team: Team
    dtype: Dtype
    truth: Truth | None
    """None: values are not checked."""
    counting: bool
    """This rank reads its node's counters."""
    nodes: int

    def size_bytes(self, op: Collective, asked: int) -> int:
        """The size that `asked` becomes: whole elements, as many for every rank."""
        item = self.dtype.item_bytes
        return op.elements(asked, item, self.team.size) * item

    def buffers(self, op: Collective, size_bytes: int) -> Buffers:
        """Memory for `size_bytes`, on all ranks or on none.

        Raises
        ------
        OutOfMemory : on all ranks, if one of them has too little.
        """
        made, failed = None, torch.zeros(1, device=self.here.device)
        try:
            kind = getattr(torch, self.dtype.torch)
            made = allocated(op, size_bytes // self.dtype.item_bytes, kind, self.team, self.here.device)
        except (
            RuntimeError,
            MemoryError,
        ):  # torch's OutOfMemoryError, and "can't allocate memory" of the CPU
            failed += 1
        dist.all_reduce(failed)
        if made is None or failed.item():
            raise OutOfMemory
        return made

    def measure(self, op: Collective, asked: int) -> Measured:
        """Both timings of `op` at `asked` bytes.

        Raises
        ------
        Stopped : on all ranks; nothing of this size counts. OutOfMemory : on all ranks.
        """
        size_bytes = self.size_bytes(op, asked)
        buffers = self.buffers(op, size_bytes)
        run = launch(op, buffers, self.team)
        if self.options.warmup:
            run()
        rounds = max(1, self.options.warmup - 1)
        one_s = timing.batch(run, rounds, self.here) / rounds
        batches, singles, watched = self._counts(one_s)
        before = self._ports()
        batch_s = timing.batch(run, batches, self.here)
        nodes = self._nodes(counters.since(before, self._ports()))
        took, wrong, first = self._singles(op, size_bytes, buffers, run, singles, watched=watched)
        together = self._together([batch_s, float(wrong), *took])
        return Measured(
            size_bytes=size_bytes,
            batch_iterations=batches,
            batch_s=max(row[0] for row in together),
            times=tuple(max(column) for column in list(zip(*together, strict=True))[2:]),
            wrong=sum(int(row[1]) for row in together) if self.truth else None,
            first=self._first(first) if any(row[1] for row in together) else (),
            nodes=nodes,
        )

    def waits(self) -> list[list[float]]:
        """How long every rank waited in each of many tiny collectives; a collective call."""
        buffer = torch.zeros(stragglers.PROBE_BYTES // 4, device=self.here.device)
        waits = []
        for turn in range(-5, stragglers.PROBE_ITERATIONS):
            found = timing.once(lambda async_op=False: dist.all_reduce(buffer, async_op=async_op), self.here)
            if turn >= 0:
                waits.append(found.waited)
        return self._together(waits)

    def _counts(self, one_s: float) -> tuple[int, int, bool]:
        """Iterations of both timings, and if each asks to go on: agreed, since `one_s` differs by rank."""

        def decide() -> tuple[float, ...]:
            fitting = int(self.options.seconds / max(one_s, 1e-7))
            batches = self.options.iters or min(MOST_BATCH, max(LEAST_BATCH, fitting))
            singles = self.options.iters or min(MOST_SINGLE, fitting)
            # Errors that come and go need iterations to show.
            singles = max(singles, LEAST_SINGLE if self.truth else 1)
            return batches, singles, one_s > _WATCHED_S, asked_to_stop()

        batches, singles, watched, stop = timing.agreed(decide, 4, self.here)
        if stop:
            raise Stopped
        return int(batches), int(singles), bool(watched)

    def _singles(
        self, op: Collective, size_bytes: int, buffers: Buffers, run: Launch, count: int, *, watched: bool
    ) -> tuple[list[float], int, Wrong | None]:
        elements = size_bytes // self.dtype.item_bytes
        expected = op.result(elements, self.team.size, self.team.rank)
        took, wrong = [], 0
        first: Wrong | None = None
        for turn in range(count):
            if watched and timing.agreed(lambda: (asked_to_stop(),), 1, self.here)[0]:
                raise Stopped
            if self.truth:
                self.truth.fill(buffers.input, self.team.rank, turn)
            took.append(timing.once(run, self.here).took)
            if not self.truth:
                continue
            found, what = self.truth.wrong(buffers.output, expected, turn)
            wrong += found
            if what and first is None:
                index, must, is_ = what
                first = Wrong(
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

    def _first(self, mine: Wrong | None) -> tuple[Wrong, ...]:
        found: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(found, mine)
        return tuple(item for item in found if item is not None)

    def _ports(self) -> dict[str, counters.Count]:
        return counters.read(Reader(root=root_of(os.environ))) if self.counting else {}

    def _nodes(self, mine: Mapping[str, counters.Count]) -> tuple[Mapping[str, counters.Count], ...]:
        if self.nodes == 1:
            return ()
        found: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(found, mine if self.counting else None)
        return tuple(item for item in found if item is not None)


def asked_to_stop() -> float:
    """1 where the launcher's stop flag is up (stopping.py), else 0."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    return float(bool(folder) and (Path(folder or "") / stop_protocol.STOP).exists())
