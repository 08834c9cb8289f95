"""Which samples each step takes, and which rank takes them: pure arithmetic, no torch.

An epoch is a permutation of the data that depends on (seed, epoch) alone. A position in it counts samples
that were trained on, not samples that were fetched ahead, so it means the same for every number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from imgkit_entrypoints.apps.share import share
from imgkit_entrypoints.errors import UsageError


def seed_of(*parts: int | str) -> int:
    """A number below 2**63 that depends on all `parts`; equal on every platform and Python version."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    consumed: int = 0
    """Samples of `epoch` trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSlice:
    """One micro-batch of one rank: samples `first` up to `end` of those of the step."""

    first: int
    end: int
    weight: float
    """Factor of its mean loss.

    DDP averages gradients over ranks; weighed so, the average is that of the step's samples, whichever rank
    and micro-batch they are in. 0: the rank has no sample, and computes on one of the others' for company.
    """
    last: bool
    """The last one of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How steps cut the epochs, and ranks the steps."""

    size: int
    """Samples in the data."""
    global_batch: int
    """Samples a step, over all ranks; the last step of an epoch takes what is left."""
    world_size: int
    batch_size: int
    """Most samples that a rank computes at once."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps from one epoch's start to the next."""
        return math.ceil(self.size / self.global_batch)

    def count(self, position: Position) -> int:
        """Samples of the step that begins at `position`."""
        return min(self.global_batch, self.size - position.consumed)

    def after(self, position: Position, steps: int = 1) -> Position:
        """Where the step that begins at `position` ends, or the last of several of equal size."""
        consumed = position.consumed + steps * self.count(position)
        if consumed < self.size:
            return Position(step=position.step + steps, epoch=position.epoch, consumed=consumed)
        return Position(step=position.step + steps, epoch=position.epoch + 1)

    def parts(self, count: int, rank: int) -> tuple[MicroBatchSlice, ...]:
        """The micro-batches of `rank` in a step of `count` samples; all ranks have as many."""
        rounds = math.ceil(math.ceil(count / self.world_size) / self.batch_size)
        first, end = share(count, rank, self.world_size)
        parts = []
        for turn in range(rounds):
            start, stop = (first + cut for cut in share(end - first, turn, rounds))
            weight = (stop - start) * self.world_size / count
            start, stop = (start, stop) if stop > start else (0, 1)
            parts.append(MicroBatchSlice(first=start, end=stop, weight=weight, last=turn == rounds - 1))
        return tuple(parts)


def arrange(
    *,
    size: int,
    world_size: int,
    batch_size: int | None,
    accumulate: int | None,
    global_batch: int | None,
) -> Order:
    """The order for what was asked; a global batch is kept by accumulation whatever the number of ranks.

    Raises
    ------
    UsageError : `global_batch` cannot be shared equally, or there are no samples.
    """
    if size < 1:
        raise UsageError("the data is empty", hint="a data set of at least one sample; see --data")
    if global_batch is None:
        batch_size = 32 if batch_size is None else batch_size
        global_batch = batch_size * (accumulate or 1) * world_size
    elif global_batch % world_size:
        less = global_batch // world_size * world_size
        sizes = [str(near) for near in (less, less + world_size) if near]
        raise UsageError(
            f"a global batch of {global_batch} samples cannot be shared equally by {world_size} ranks",
            hint=f"nearest that work: {_ranks_near(global_batch, world_size)} ranks, "
            f"or in a new run --global-batch {' or '.join(sizes)}",
        )
    elif batch_size is None:
        batch_size = math.ceil(global_batch // world_size / (accumulate or 1))
    return Order(size=size, global_batch=global_batch, world_size=world_size, batch_size=batch_size)


def _ranks_near(global_batch: int, world_size: int) -> str:
    fewer = next(count for count in range(world_size - 1, 0, -1) if global_batch % count == 0)
    more = next((n for n in range(world_size + 1, global_batch + 1) if global_batch % n == 0), None)
    return f"{fewer}" if more is None else f"{fewer} or {more}"
