"""Which samples each step takes, and which rank computes them. Pure arithmetic, without torch.

An epoch is a permutation of the data that depends only on (seed, epoch). A position counts samples that were
trained on, not samples that were loaded ahead, so its meaning does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from imgkit_entrypoints.apps.share import share
from imgkit_entrypoints.errors import UsageError


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on all `parts`, equal on every platform and Python version."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    consumed: int = 0
    """Samples of `epoch` that were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSlice:
    """One micro-batch of one rank: samples `first` to `end` (exclusive) of the step."""

    first: int
    end: int
    weight: float
    """Factor of its mean loss.

    DDP averages gradients over ranks. With these weights the result is the average over the step's samples,
    however ranks and micro-batches divide them. 0: the rank has no sample, and takes part with another's.
    """
    last: bool
    """Whether it is the last micro-batch of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The division of epochs into steps, and of steps among the ranks."""

    size: int
    """Samples in the data."""
    global_batch: int
    """Samples per step over all ranks; the last step of an epoch takes the rest."""
    world_size: int
    batch_size: int
    """Largest number of samples that a rank computes at once."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the last one with the rest of the samples included."""
        return math.ceil(self.size / self.global_batch)

    def samples_at(self, position: Position) -> int:
        """Return the number of samples in the step that begins at `position`."""
        return min(self.global_batch, self.size - position.consumed)

    def next_position(self, position: Position) -> Position:
        """Return the position after the step that begins at `position`."""
        step = position.step + 1
        consumed = position.consumed + self.samples_at(position)
        if consumed < self.size:
            return Position(step=step, epoch=position.epoch, consumed=consumed)
        return Position(step=step, epoch=position.epoch + 1)

    def micro_batches(self, samples: int, rank: int) -> tuple[MicroBatchSlice, ...]:
        """Return the micro-batches of `rank` in a step that has `samples` samples over all ranks.

        A micro-batch is what a rank computes at once. All ranks have equally many, since they take part in
        the same collectives. For example 5 samples on 2 ranks with a `batch_size` of 2 are the samples 0, 1
        on rank 0, and 2, 3-4 on rank 1.
        """
        most_samples_of_rank = math.ceil(samples / self.world_size)
        count = math.ceil(most_samples_of_rank / self.batch_size)
        rank_start, rank_end = share(samples, rank, self.world_size)
        slices = []
        for number in range(count):
            start, end = share(rank_end - rank_start, number, count)
            weight = (end - start) * self.world_size / samples
            is_last = number == count - 1
            if start < end:
                part = MicroBatchSlice(
                    first=rank_start + start, end=rank_start + end, weight=weight, last=is_last
                )
            else:  # the rank has no sample, and computes the first one of the step without weight
                part = MicroBatchSlice(first=0, end=1, weight=weight, last=is_last)
            slices.append(part)
        return tuple(slices)


def plan_order(size: int, world_size: int, batch_size: int | None, global_batch: int | None) -> Order:
    """Return the division of the data into steps and among ranks that the options ask for.

    The global batch is the samples of one step over all ranks, by default one batch of each rank. If it is
    larger, each rank computes several micro-batches in a step.

    Raises
    ------
    UsageError : the ranks cannot share `global_batch` equally, or there are no samples.
    """
    if size < 1:
        raise UsageError("the data is empty", hint="--data must return at least one sample")
    if global_batch is None:
        batch_size = batch_size or 32
        global_batch = batch_size * world_size
    if global_batch % world_size:
        raise UsageError(
            f"{world_size} ranks cannot share a global batch of {global_batch} samples equally",
            hint=_suggest_sizes(world_size, global_batch),
        )
    batch_size = batch_size or global_batch // world_size
    return Order(size=size, global_batch=global_batch, world_size=world_size, batch_size=batch_size)


def _suggest_sizes(world_size: int, global_batch: int) -> str:
    """Return a hint with the nearest numbers of ranks, and of samples, with which the division works.

    For 3 ranks and 32 samples it names 2 or 4 ranks, and 30 or 33 samples.
    """
    divisors = [count for count in range(1, global_batch + 1) if global_batch % count == 0]
    fewer_ranks = [str(count) for count in divisors if count < world_size]
    more_ranks = [str(count) for count in divisors if count > world_size]
    ranks = " or ".join([*fewer_ranks[-1:], *more_ranks[:1]])
    fewer_samples = global_batch // world_size * world_size
    sizes = str(fewer_samples + world_size)
    if fewer_samples:
        sizes = f"{fewer_samples} or {sizes}"
    return f"use {ranks} ranks, or a new run with --global-batch {sizes}"
