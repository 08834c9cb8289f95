"""The part ``course`` of dist-train's snapshots: the place in the data, and the options that led there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.order import Position
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.checkpoints import FoundCheckpoint

PART = "course.pt"


@dataclass(slots=True, kw_only=True)
class Course:
    """What a snapshot keeps beside model and optimizer; it is needed before these exist."""

    position: Position = field(default_factory=Position)
    first_loss: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    """The options, as JSON has them."""

    def state_dict(self) -> dict[str, Any]:
        """The values in a snapshot."""
        return {**dataclasses.asdict(self), "config": dict(self.config)}

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        """Do nothing: `course_of` has read it."""


def find(config: Config, run: Run) -> FoundCheckpoint | None:
    """Find the snapshot that ``--resume`` selects; a collective call.

    Raises
    ------
    UsageError : the path of ``--resume`` holds no valid snapshot on any node, or ``--resume never`` would
        replace the snapshots of another run.
    """
    if config.resume == "never":
        try:
            run.refuse_older()
        except UsageError as error:
            hint = "give another --run-dir, or --resume auto"
            raise UsageError(error.what, where=error.where, hint=hint) from None
        return None
    if config.resume == "auto":
        found = run.find()
    elif (found := run.find(config.resume)) is None:
        raise UsageError(
            "no valid snapshot found",
            where=str(Path(config.resume)),
            hint="--resume auto, or --resume never to start over",
        )
    return found


def course_of(found: FoundCheckpoint) -> Course:
    """Read the course that a snapshot keeps; a collective call.

    Raises
    ------
    UsageError : another program has written it.
    """
    try:
        if PART not in found.parts:
            raise ValueError("there is none")
        values = found.tensors(PART)
        position: Position = json_text.read(Position, values["position"], "position")
        return Course(
            position=position, first_loss=float(values["first_loss"]), config=dict(values["config"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"this snapshot is of another program: its course is missing or wrong ({error})",
            where=str(found.where / PART),
            hint="name another folder by --run-dir",
        ) from None
