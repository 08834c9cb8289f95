"""Decide which samples belong to each step, and which rank computes them. This module does not need torch.

In each epoch, the data has a random order that depends only on the seed and the epoch. A position in the data
is the number of samples that were trained on. Samples that were only loaded do not count, so a position does
not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from imgkit_entrypoints.apps.share import share
from imgkit_entrypoints.errors import UsageError


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on all `parts`.

    It is the same on every platform and with every version of Python, unlike the result of hash().
    """
    text = "\0".join(map(str, parts)).encode()
    # The shift leaves 63 bits, so that the seed fits into a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The progress of a run, which is the position in its data."""

    step: int = 0
    """Number of optimizer steps that are done."""
    epoch: int = 0
    consumed: int = 0
    """Number of samples in this epoch that were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSlice:
    """The samples that a rank computes at once: samples `first` to `end` (exclusive) of a step."""

    first: int
    end: int
    weight: float
    """Factor for the mean loss of these samples.

    DDP averages gradients over ranks. With these weights, the result is the average over all samples of the
    step, no matter how the samples are divided among ranks and micro-batches. If a rank has no samples, the
    weight is 0. The rank then computes a sample of another rank, in order to take part in the collectives.
    """
    last: bool
    """True if this is the last micro-batch of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How epochs are divided into steps, and steps among the ranks."""

    size: int
    """Number of samples in the data."""
    global_batch: int
    """Number of samples in a step over all ranks. The last step of an epoch may have fewer."""
    world_size: int
    batch_size: int
    """Largest number of samples that a rank computes at once."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, including the last step, which may have fewer samples."""
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

        A micro-batch is a set of samples that a rank computes at once. All ranks have the same number of
        micro-batches, because they take part in the same collectives. For example, with 5 samples, 2 ranks
        and a `batch_size` of 2, rank 0 has the micro-batches (0) and (1), and rank 1 has (2) and (3, 4).
        """
        # The rank with most samples determines how many micro-batches all ranks have.
        most_samples_of_rank = math.ceil(samples / self.world_size)
        count = math.ceil(most_samples_of_rank / self.batch_size)
        rank_start, rank_end = share(samples, rank, self.world_size)
        slices = []
        for index in range(count):
            start_in_rank, end_in_rank = share(rank_end - rank_start, index, count)
            size = end_in_rank - start_in_rank
            first = rank_start + start_in_rank
            if size == 0:  # the rank has no sample left, so it computes the step's first sample
                first = 0
            slices.append(
                MicroBatchSlice(
                    first=first,
                    end=first + max(1, size),
                    # The share of the step's samples that this micro-batch has. DDP divides the sum of the
                    # gradients by world_size, which this factor cancels.
                    weight=size * self.world_size / samples,
                    last=index == count - 1,
                )
            )
        return tuple(slices)


def plan_order(size: int, world_size: int, batch_size: int | None, global_batch: int | None) -> Order:
    """Return how the data is divided into steps and among ranks, by the options of the run.

    Parameters
    ----------
    size : number of samples in the data.
    batch_size : largest number of samples that a rank computes at once, or None for the default.
    global_batch : number of samples in a step over all ranks, or None for one batch of each rank. If it is
        larger than that, each rank computes several micro-batches in a step.

    Raises
    ------
    UsageError : `global_batch` cannot be divided equally among the ranks, or there are no samples.
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
    # By default, a rank computes its whole share of a step at once.
    batch_size = batch_size or global_batch // world_size
    return Order(size=size, global_batch=global_batch, world_size=world_size, batch_size=batch_size)


def _suggest_sizes(world_size: int, global_batch: int) -> str:
    """Return a hint with the nearest numbers of ranks and of samples that can be divided equally.

    For example, for 3 ranks and 32 samples, the hint suggests 2 or 4 ranks, or 30 or 33 samples.
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
