"""The learning rate as a function of the step alone: nothing of it has to be saved."""

from __future__ import annotations

import math

SHAPES = ("constant", "linear", "cosine")


def factor(shape: str, step: int, steps: int, warmup: int = 0) -> float:
    """What the learning rate of `step` (from 0) is multiplied by: rises over `warmup` steps, then falls to 0
    at `steps`, or stays.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
