"""The learning rate as a function of the step alone, so that no snapshot has to keep it."""

from __future__ import annotations

import math

from imgkit_entrypoints.apps.train.config import Config

SHAPES = ("constant", "linear", "cosine")


def factor(shape: str, step: int, steps: int, warmup: int = 0) -> float:
    """Factor of the learning rate at `step` (from 0).

    It rises over `warmup` steps, then stays (constant) or falls to 0 at `steps`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate at `step` (from 0) of `steps`."""
    return config.lr * factor(config.schedule, step, steps, config.warmup)
