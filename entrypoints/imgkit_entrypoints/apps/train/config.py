"""One training run as it was asked for: what a snapshot keeps and a later start is held against."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints.errors import UsageError

COURSE = ("model", "data", "step", "samples", "seed", "dtype", "amp", "optimizer", "global_batch")
"""Another value of one of these is another run: going on with it is refused."""
TUNED = ("lr", "momentum", "weight_decay", "schedule", "warmup", "clip")
"""These may change between two starts of a run; it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of dist-train, with the defaults filled in; plug-ins get it as their `config`."""

    model: str
    data: str
    step: str
    samples: int | None
    steps: int | None
    epochs: int | None
    batch_size: int | None
    accumulate: int | None
    global_batch: int | None
    lr: float
    optimizer: str
    momentum: float
    weight_decay: float
    schedule: str
    warmup: int
    clip: float | None
    dtype: str
    amp: str
    seed: int
    workers: int
    deterministic: bool
    run_dir: Path | None
    save_every: str
    keep: int
    resume: str
    stop_after_s: int | None
    on_nan: str
    log_every: int

    def to_json(self) -> str:
        """The form kept in the run's folder and in snapshots; ``--config`` reads it."""
        values = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps(values, indent=2) + "\n"


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run: `steps` or `epochs`, whichever ends first."""
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None:
        limits.append(config.epochs * steps_per_epoch)
    return min(limits)


def every(text: str, steps_per_epoch: int) -> int:
    """Steps between two saves: ``500`` counts steps, ``2e`` epochs; 0 is never."""
    return int(text[:-1]) * steps_per_epoch if text.endswith("e") else int(text)


def held_against(config: Config, saved: Mapping[str, Any], where: Path) -> tuple[Config, tuple[str, ...]]:
    """`config` with what the saved run decides, and one line for each value that has changed since.

    Raises
    ------
    UsageError : it contradicts the saved run; every key is named.
    """
    given = dataclasses.asdict(config)
    wrong = [
        f"{key} is {given[key]!r}, the snapshot has {saved[key]!r}"
        for key in COURSE
        if key in saved and given[key] != saved[key] and not (key == "global_batch" and given[key] is None)
    ]
    if wrong:
        raise UsageError(
            "this contradicts the run that is to go on: " + "; ".join(wrong),
            where=str(where),
            hint="the same options, or --resume never with another --run-dir for a new run",
        )
    changed = tuple(
        f"{key} was {saved[key]}, now {given[key]}"
        for key in TUNED
        if key in saved and given[key] != saved[key]
    )
    return dataclasses.replace(config, global_batch=saved["global_batch"]), changed
