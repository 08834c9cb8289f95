"""One training run as it was asked for: what a snapshot keeps and a later start is held against."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints.errors import UsageError

COURSE = (
    "model",
    "data",
    "step",
    "samples",
    "image_size",
    "seed",
    "dtype",
    "amp",
    "optimizer",
    "global_batch",
)
"""Another value of one of these is another run: going on with it is refused."""
TUNED = ("lr", "momentum", "weight_decay", "schedule", "warmup", "clip", "compile", "deterministic")
"""These may change between two starts of a run; it is told."""
LINE_EVERY_S = 5
"""A line of progress comes so often at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of dist-train, with the defaults filled in; plug-ins get it as their `config`."""

    model: str
    data: str
    step: str
    samples: int | None
    image_size: int
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
    compile: bool
    activation_checkpointing: bool
    deterministic: bool
    run_dir: Path | None
    save_every: str
    keep: int
    resume: str
    stop_after_s: int | None
    eval_every: str
    export: Path | None
    profile: str | None
    on_nan: str
    log_every: int
    """0 until the number of steps is known."""

    def profiled(self) -> range:
        """Steps of the run whose traces are wanted."""
        if self.profile is None:
            return range(0)
        start, steps = map(int, self.profile.split(":"))
        return range(start + 1, start + steps + 1)

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


def steps_a_line(steps: int) -> int:
    """A round tenth of the run, at most 1000: how often there is news where nothing else is wanted."""
    round_ones = (digit * 10**zeros for zeros in range(3) for digit in (1, 2, 5))
    return max((number for number in (*round_ones, 1000) if number * 10 <= steps), default=1)


def every(text: str, steps_per_epoch: int) -> int:
    """Steps between two saves, or two looks at held-out data: ``500`` steps, ``2e`` epochs; 0 is never."""
    return int(text[:-1]) * steps_per_epoch if text.endswith("e") else int(text)


def due(step: int, interval: int, steps: int) -> bool:
    """Whether what comes every `interval` steps, and after the last one, comes after `step`."""
    return step == steps or (interval > 0 and step % interval == 0)


def resumed(config: Config, saved: Mapping[str, Any], where: Path) -> tuple[Config, tuple[str, ...]]:
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
