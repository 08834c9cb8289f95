"""Both timings of one collective at one size on this rank, while they grow; single results are verified."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints.apps.bench.measure import timing
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.counts import Counts
from imgkit_entrypoints.apps.bench.measure.groups import RankGroup
from imgkit_entrypoints.apps.bench.measure.operations import Buffers, launch, rotating
from imgkit_entrypoints.apps.bench.measure.verify import ExpectedValues, Noise, WrongElement
from imgkit_entrypoints.launch import stop_protocol

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.ranks import Ranks


class Stopped(Exception):
    """The launcher asks the run to save and end."""


class OneSize:
    """Times of one size on this rank, in seconds."""

    def __init__(
        self,
        op: Collective,
        counts: Counts,
        buffers: tuple[Buffers, ...],
        *,
        here: Ranks,
        group: RankGroup,
        noise: Noise,
        expected: ExpectedValues | None,
    ) -> None:
        self._op, self._counts, self._buffers = op, counts, buffers
        self._here, self._group, self._noise, self._expected = here, group, noise, expected
        self._launches = [launch(op, one, group) for one in buffers]
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
                for slot, one in enumerate(self._buffers):
                    self._noise.fill(one.input, self._group.rank, slot)
            run = rotating(self._launches)
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
            turn, buffers = len(self.singles), self._buffers[0]
            if self._expected:
                self._expected.fill(buffers.input, self._group.rank, turn)
            self.singles.append(timing.once(self._launches[0], self._here).took)
            if self._expected:
                self._verify(self._expected, buffers, turn)

    def _verify(self, expected: ExpectedValues, buffers: Buffers, turn: int) -> None:
        size_bytes, ranks = self._counts.size_bytes, self._group.size
        result = self._op.result(size_bytes // buffers.input.element_size(), ranks, self._group.rank)
        count, what = expected.wrong(buffers.output, result, turn)
        self.wrong += count
        if what and self.first is None:
            index, must, is_ = what
            self.first = WrongElement(
                op=self._op.name,
                size_bytes=size_bytes,
                iteration=turn,
                rank=self._here.rank,
                index=index,
                expected=must,
                got=is_,
            )


def asked_to_stop() -> float:
    """1.0 if the launcher has asked this node's workers to stop, else 0.0."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    return float(bool(folder) and (Path(folder or "") / stop_protocol.STOP).exists())
