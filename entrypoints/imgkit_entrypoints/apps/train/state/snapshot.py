"""What dist-train keeps in a snapshot: position, options, weights and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.order import Position
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import random_state, snapshot_files, snapshots
from imgkit_entrypoints.run.random_state import SentState
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.snapshots import Say, SnapshotWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A loaded snapshot, equal on every rank."""

    where: Path
    position: Position
    config: Mapping[str, Any]
    first_loss: float
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    """State of the optimizer and the gradient scaler."""
    random: list[Mapping[str, Any]]
    """Random state of each rank that the run had."""


def save(
    keeper: SnapshotWriter,
    config: Config,
    position: Position,
    first_loss: float,
    state: Callable[[], tuple[Any, Any]],
) -> None:
    """Save the run at `position` in the background; a collective call."""
    keeper.save(
        position.step,
        tensors=lambda: dict(zip(("weights.pt", "optimizer.pt"), state(), strict=True)),
        drawn={"random.pt": SentState.of(random_state.current())},
        about={"position": dataclasses.asdict(position), "first_loss": first_loss},
        texts={"config.json": config.to_json()},
    )


def find(config: Config, here: Ranks, say: Say) -> Snapshot | None:
    """Load the snapshot that ``--resume`` selects, and send it to all ranks; a collective call.

    Raises
    ------
    UsageError : the path of ``--resume`` holds no valid snapshot on any node, or ``--resume never`` would
        replace the snapshots of another run.
    """
    place = config.run_dir if config.resume in ("auto", "never") else Path(config.resume)
    if place is None:
        return None
    if config.resume == "never":
        _refuse_a_used_folder(place / snapshots.FOLDER, here)
        return None
    found = snapshots.newest(place, here, say)
    if found is None:
        if config.resume == "auto":
            return None
        raise UsageError(
            "no valid snapshot found", where=str(place), hint="--resume auto, or --resume never to start over"
        )
    about = found.values(snapshots.STATE)
    return Snapshot(
        where=found.where,
        position=Position(**about["position"]),
        config=found.values("config.json"),
        first_loss=about["first_loss"],
        weights=found.tensors("weights.pt"),
        optimizer=found.tensors("optimizer.pt"),
        random=found.tensors("random.pt"),
    )


def _refuse_a_used_folder(folder: Path, here: Ranks) -> None:
    if any(here.gather(bool(snapshot_files.newest_first(folder)), bool)):
        raise UsageError(
            "this run would replace the snapshots of another run",
            where=str(folder),
            hint="give another --run-dir, or --resume auto",
        )
