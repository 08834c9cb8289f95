"""The place of a run in its data, and what the ranks must agree on before they go on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import random_state, resumable, snapshots
from imgkit_entrypoints.run.random_state import SentState
from imgkit_entrypoints.run.ranks import Ranks, told
from imgkit_entrypoints.run.snapshots import FoundSnapshot

RANDOM, PASS = "random.pt", "pass.pt"
"""Parts of a snapshot: the random states of all ranks, now and at the start of the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """The place that a snapshot keeps; equal on all ranks."""

    step: int = 0
    epoch: int = 0
    """Passes over the loader that are done."""
    batch: int = 0
    """Batches that each rank has had in the pass after them."""
    batch_size: int | None = None
    """Samples in each of these batches; None: unknown."""

    def batches_of(self, batch_size: int | None) -> int:
        """The same place in batches of another size."""
        if batch_size and self.batch_size and batch_size != self.batch_size:
            return self.batch * self.batch_size // batch_size
        return self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """What `Run.steps` was called with on one rank."""

    batches: int
    """Length of the loader; -1: unknown."""
    save_every: int
    accumulate: int
    step: int
    tracked: str
    """Names of the objects that `Run.track` got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resumed:
    """Random states of a snapshot, for the first pass after it."""

    pass_drawn: Mapping[str, Any]
    drawn: Mapping[str, Any]


class LivePlace:
    """The place of a running loop, with the random numbers that belong to it."""

    def __init__(self) -> None:
        self.step = self.epoch = 0
        self.loader: Any = None
        """What the pass that is under way iterates over."""
        self._batch, self._length = 0, -1
        self._batch_size: int | None = None
        self._has_passes = False
        self._pass_drawn: Mapping[str, Any] | None = None
        self._resumed: _Resumed | None = None

    def position(self) -> RunPosition:
        """The place as a snapshot keeps it."""
        return RunPosition(step=self.step, epoch=self.epoch, batch=self._batch, batch_size=self._batch_size)

    def passes(self) -> float:
        """Passes over the loader so far, with the part of the one that is under way."""
        return self.epoch + (self._batch / self._length if self._length > 0 else 0.0)

    def count(self) -> None:
        """A step is done."""
        self.step, self._batch = self.step + 1, self._batch + (self.loader is not None)

    def between_updates(self, accumulate: int) -> bool:
        """Whether the weights are updated after every `accumulate` batches, and were after this one."""
        return self._batch % accumulate == 0 or self._batch == self._length

    def drawn(self) -> dict[str, SentState]:
        """This rank's random states, by the part of a snapshot that keeps them."""
        now = random_state.current(resumable.generators(self.loader))
        states: dict[str, Mapping[str, Any]] = {RANDOM: now}
        if self._has_passes:
            states[PASS] = now if self._pass_drawn is None else self._pass_drawn
        return {name: SentState.of(state) for name, state in states.items()}

    def take_over(
        self, position: RunPosition, found: FoundSnapshot, here: Ranks, say: Callable[[str], None]
    ) -> None:
        """Go on from the `position` in a snapshot, with its random numbers; a collective call."""
        drawn = found.tensors(RANDOM)
        pass_drawn = found.tensors(PASS) if PASS in found.parts else drawn
        self.step, self.epoch, self._batch = position.step, position.epoch, position.batch
        self._batch_size = position.batch_size
        if len(drawn) == here.world_size:
            own = drawn[here.rank]
            random_state.restore(own)
        else:
            own = self._of_other_ranks(len(drawn), drawn[0], here, say)
        self._resumed = _Resumed(pass_drawn=pass_drawn[here.rank % len(pass_drawn)], drawn=own)

    def _of_other_ranks(
        self, ranks: int, drawn: Mapping[str, Any], here: Ranks, say: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Convert the place of each of `ranks` ranks, and draw new random numbers for every rank."""
        batches = self._batch * ranks
        self._batch = batches // here.world_size
        if batches % here.world_size:
            say(f"{here.world_size} ranks instead of {ranks}: some samples of this epoch come again")
        random_state.restore(drawn)
        random_state.seed_everything(int(torch.randint(1 << 62, ()).item()) + here.rank)
        return random_state.current()

    def open(self, loader: Any, length: int) -> Iterator[Any]:
        """Begin a pass over `loader`, or go on where the snapshot was taken, and iterate over its batches."""
        self.loader, self._length, self._has_passes = loader, length, True
        resumed, self._resumed = self._resumed, None
        more, size = resumable.generators(loader), resumable.batch_size(loader)
        if resumed is None or not self._batch:
            self._batch_size, self._pass_drawn = size, random_state.current(more)
            return iter(loader)
        self._batch = self.position().batches_of(size)
        self._batch_size, self._pass_drawn = size, resumed.pass_drawn
        return resumable.rest(
            loader,
            self._batch,
            rewind=lambda: random_state.restore(resumed.pass_drawn, more),
            wind=lambda: random_state.restore(resumed.drawn, more),
        )

    def close(self) -> None:
        """The pass is done."""
        self.epoch, self._batch, self.loader, self._pass_drawn = self.epoch + 1, 0, None, None


def position_in(found: FoundSnapshot) -> RunPosition:
    """Read the position from a snapshot; a collective call.

    Raises
    ------
    UsageError : another program has written it.
    """
    try:
        position: RunPosition = json_text.read(RunPosition, found.values(snapshots.STATE)["run"], "run")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"this snapshot is of another program: its position is missing or wrong ({error})",
            where=str(found.where / snapshots.STATE),
            hint="name another folder in Run.start(FOLDER); dist-train's snapshots are for dist-train",
        ) from None
    return position


def refuse_different(every: Sequence[PassOptions]) -> None:
    """Raise UsageError, on every rank, if the options of the ranks differ; names the ranks."""
    for name, meaning in (
        ("step", "the ranks have taken different numbers of steps"),
        ("batches", "the loaders of the ranks have different lengths"),
        ("save_every", "the ranks have different values of save_every"),
        ("accumulate", "the ranks have different values of accumulate"),
        ("tracked", "the ranks track different objects"),
    ):
        values = [getattr(one, name) for one in every]
        if len(set(values)) > 1:
            raise UsageError(
                f"{meaning}: {told(values)}",
                where="run.steps",
                hint="all ranks must do the same; DistributedSampler gives them equal loaders",
            )
