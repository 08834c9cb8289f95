"""The tutorial's regression, with a target that can be learnt: y = w.x + b + a little noise."""

from __future__ import annotations

import torch
from torch import Tensor

FEATURES = 20
NOISE = 0.01


def batch(step: int, *, seed: int, rank: int, world_size: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs (batch_size, FEATURES) and targets (batch_size, 1) of `rank` at `step`.

    Every rank draws the same global batch and takes its own slice, so no two ranks train on the same
    samples, whatever their number.
    """
    truth = torch.Generator().manual_seed(seed)
    weights = torch.randn(FEATURES, 1, generator=truth)
    bias = torch.randn(1, generator=truth)
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step + 1)
    inputs = torch.randn(batch_size * world_size, FEATURES, generator=draw)
    noise = NOISE * torch.randn(batch_size * world_size, 1, generator=draw)
    mine = slice(rank * batch_size, (rank + 1) * batch_size)
    return inputs[mine], (inputs @ weights + bias + noise)[mine]
