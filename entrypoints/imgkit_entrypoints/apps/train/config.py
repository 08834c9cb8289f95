"""The options of one training run, and what follows from them: steps, lines, learning rate.

Checkpoints keep them, and a later start is compared with them. The learning rate is a function of the step
alone, so that no checkpoint has to keep it.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
"""Options that define a run. A start with another value cannot resume it."""
TUNED = ("lr", "momentum", "weight_decay", "schedule", "warmup_steps", "clip", "compile", "deterministic")
"""Options that may change between two starts of a run; each change is reported."""
LINE_EVERY_S = 5
"""Longest time between two lines of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The options of dist-train with defaults filled in; plug-ins get it as `config`."""

    model: str
    data: str
    step: str
    samples: int | None
    image_size: int
    steps: int | None
    epochs: int | None
    batch_size: int | None
    global_batch: int | None
    lr: float
    optimizer: str
    momentum: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    clip: float | None
    dtype: str
    amp: str
    seed: int
    workers: int
    compile: bool
    deterministic: bool
    run_dir: Path | None
    save_every: str
    keep: int
    resume: str
    stop_after_s: int | None
    eval_every: str
    profile: str | None
    on_nan: str
    log_every: int
    """0: chosen once the number of steps is known."""
    log_to: str | None = None
    """Loggers beside metrics.jsonl, with commas between them."""

    def profiled(self) -> range:
        """The steps to trace."""
        if self.profile is None:
            return range(0)
        start, steps = map(int, self.profile.split(":"))
        return range(start + 1, start + steps + 1)

    def values(self) -> dict[str, Any]:
        """The options in plain values, as checkpoints keep them."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }

    def to_json(self) -> str:
        """The JSON form in the run's folder; ``--config`` reads it."""
        return json.dumps(self.values(), indent=2) + "\n"


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run: `steps` or `epochs`, whichever ends first."""
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None:
        limits.append(config.epochs * steps_per_epoch)
    return min(limits)


def steps_a_line(steps: int) -> int:
    """Default of ``--log-every``: a round number of steps, at most a tenth of the run and 1000."""
    round_ones = (digit * 10**zeros for zeros in range(3) for digit in (1, 2, 5))
    return max((number for number in (*round_ones, 1000) if number * 10 <= steps), default=1)


def every(text: str, steps_per_epoch: int) -> int:
    """Parse an interval of saves or evaluations into steps: ``500`` steps, ``2e`` epochs; 0 is never."""
    return int(text[:-1]) * steps_per_epoch if text.endswith("e") else int(text)


def due(step: int, interval: int, steps: int) -> bool:
    """Whether something that happens every `interval` steps and after the last step is due after `step`."""
    return step == steps or (interval > 0 and step % interval == 0)


def resumed(config: Config, saved: Mapping[str, Any], where: Path) -> tuple[Config, tuple[str, ...]]:
    """Return `config` with the saved global batch, and one line for each changed option.

    Raises
    ------
    UsageError : `config` contradicts the saved run; names every contradiction.
    """
    options = dataclasses.asdict(config)
    wrong = [
        f"{key} is {options[key]!r}, the checkpoint has {saved[key]!r}"
        for key in COURSE
        if key in saved
        and options[key] != saved[key]
        and not (key == "global_batch" and options[key] is None)
    ]
    if wrong:
        raise UsageError(
            "these options contradict the saved run: " + "; ".join(wrong),
            where=str(where),
            hint="give the same options to resume, or start a new run: --resume never --run-dir OTHER",
        )
    changed = tuple(
        f"{key} was {saved[key]}, now {options[key]}"
        for key in TUNED
        if key in saved and options[key] != saved[key]
    )
    return dataclasses.replace(config, global_batch=saved["global_batch"]), changed


SHAPES = ("constant", "linear", "cosine")


def factor(shape: str, step: int, steps: int, warmup: int = 0) -> float:
    """Factor of the learning rate at `step` (from 0).

    It rises over `warmup` steps, then stays (constant) or falls to 0 at `steps`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - share if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate at `step` (from 0) of `steps`."""
    return config.lr * factor(config.schedule, step, steps, config.warmup_steps)
