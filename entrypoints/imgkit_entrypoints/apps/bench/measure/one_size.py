"""Both timings of one collective at one size on this rank, while they grow; single results are verified."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.measure import timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.counts import Counts
from imgkit_entrypoints.apps.bench.measure.operations import Lane, Slot, rotating
from imgkit_entrypoints.apps.bench.measure.verify import ExpectedValues, Noise, WrongElement
from imgkit_entrypoints.launch import stop_protocol

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks


class Stopped(Exception):
    """The launcher asks the run to save and end."""


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
            self.batches.append(timing.batch(run, self._counts.launches, self._here))

    def time_singles(self, count: int, *, watched: bool) -> None:
        """Time `count` iterations by themselves; each asks for a stop request if `watched`.

        Raises
        ------
        Stopped : on all ranks.
        """
        for _ in range(count):
            if watched and timing.agreed(lambda: (asked_to_stop(),), 1, self._here)[0]:
                raise Stopped
            turn, slot = len(self.singles), self._slots[0]
            numbered = [(turn * len(slot.lanes) + place, lane) for place, lane in enumerate(slot.lanes)]
            if self._expected:
                for number, lane in numbered:
                    self._expected.fill(lane.buffers.input, lane.group.rank, number)
            self.singles.append(timing.once(slot.launch, self._here).took)
            if self._expected:
                for number, lane in numbered:
                    self._verify(self._expected, lane, turn, number)

    def _verify(self, expected: ExpectedValues, lane: Lane, turn: int, number: int) -> None:
        result = self._op.result(lane.count, lane.group.size, lane.group.rank)
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


def asked_to_stop() -> float:
    """1.0 if the launcher has asked this node's workers to stop, else 0.0."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    return float(bool(folder) and (Path(folder or "") / stop_protocol.STOP).exists())
