"""A model, and data whose reading fails as FAULT requests: ``once HOW RANK INDEX``; runs in the image."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

PAUSE_S = float(os.environ.get("PAUSE", "0.01"))
if os.environ.get("RANK") == "0" and os.environ.get("IMGKIT_ATTEMPT") == "2":
    time.sleep(1.5)  # ranks that are earlier must not find this rank's address from the first attempt


def fail(how: str) -> None:
    """Fail in the given way."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


class Data(torch.utils.data.Dataset):
    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope
        self.batches = 0

    def __len__(self) -> int:
        return 44

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches += 1
        time.sleep(PAUSE_S)
        _, how, rank, at = (os.environ.get("FAULT") or "no fault -1 0").split()
        if os.environ["RANK"] == rank and self.batches == int(at):
            mark = Path(f"{how}-was-done")
            if not mark.exists():
                mark.touch()
                fail(how)
        inputs = indices.float()[:, None] / 44
        return inputs, inputs.square() * self.slope


def data(config, split):
    return Data()


def steep(config, split):
    """Gradients that overflow in half precision, until the scaler has found its scale."""
    return Data(slope=4000.0)


def model(config):
    return torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
