"""The place of a run in its data, and what the ranks must agree on before they go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import snapshots
from imgkit_entrypoints.run.agreement import told
from imgkit_entrypoints.run.snapshots import FoundSnapshot


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
    ):
        values = [getattr(one, name) for one in every]
        if len(set(values)) > 1:
            raise UsageError(
                f"{meaning}: {told(values)}",
                where="run.steps",
                hint="all ranks must take equally many steps; DistributedSampler gives them equal loaders",
            )
