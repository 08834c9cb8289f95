"""Your own model and data, trained by dist-train as it is: many ranks, exact resume, checkpoints.

dist-train --model own_model.py:model --data own_model.py:data --epochs 3 --run-dir runs/mine
"""

from __future__ import annotations

import torch
from torch import nn


class Waves(torch.utils.data.Dataset):
    """Noisy sine waves; the target is the frequency."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = 1 + index % 10
        wave = torch.sin(torch.linspace(0, 6.28 * frequency, 100))
        # imgkit seeds each sample by epoch and index: it is the same after a restart, on any number of ranks.
        return wave + 0.1 * torch.randn(100), torch.tensor(frequency - 1)


def data(config, split: str) -> Waves:
    """Return the samples; `split` is "train" here."""
    return Waves()


def model(config) -> nn.Module:
    """Return the model. Whole-number targets get cross entropy; --step names another loss."""
    return nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 10))
