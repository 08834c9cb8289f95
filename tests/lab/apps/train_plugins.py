"""A model and data sets for the tests of dist-train; runs in the image."""

from __future__ import annotations

import os
import time

import torch


class Noisy(torch.utils.data.Dataset):
    """Samples that are random at every read, with some ways to fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 17 and self.fails == "raises":
            raise ValueError("spoiled")
        if index == 17 and self.fails == "dies":
            os._exit(3)
        inputs = torch.linspace(0, 1 + index, 6)
        return inputs + torch.randn(6), inputs[-1:] / 10


def data(config, split):
    return Noisy()


def raises(config, split):
    return Noisy("raises")


def dies(config, split):
    return Noisy("dies")


def exact(config, split):
    values = torch.linspace(0, 1, 22 * 6, dtype=torch.float64).sin().view(22, 6)
    return torch.utils.data.TensorDataset(values, values[:, :1])


def rows(config, split):
    values = torch.linspace(0, 9, 200 * 6, dtype=torch.float64).sin().view(200, 6)
    return torch.utils.data.TensorDataset(values, values[:, :1])


class Singly(torch.utils.data.Dataset):
    """The same samples, which can only be read one by one."""

    def __init__(self, of) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int):
        return self.of[index]


def singly(config, split):
    return Singly(rows(config, split))


def model(config):
    layers = torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.2)
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))


def plain(config):
    return torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def shaken(model, batch):
    """A loss that draws random numbers itself."""
    return torch.nn.functional.mse_loss(model(batch[0] + 0.1 * torch.randn(6)), batch[1])


calls = 0


def breaks(model, batch):
    """The loss of one step is not a number, on one rank."""
    global calls
    calls += 1
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return loss * float("nan") if calls == 6 and torch.distributed.get_rank() == 1 else loss


def slept(model, batch, ms):
    time.sleep(ms / 1000)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def even(model, batch):
    return slept(model, batch, 30)


def lagging(model, batch):
    """One rank takes longer to compute."""
    return slept(model, batch, 70 if torch.distributed.get_rank() == 1 else 30)


class Fetched(Noisy):
    """Rank 0 waits long for its samples."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        time.sleep(0.012 if torch.distributed.get_rank() == 0 else 0)
        return torch.ones(6), torch.ones(1)


def fetched(config, split):
    return Fetched()


def numbers(model, batch):
    """More numbers beside the loss: one as a tensor, one that differs between the ranks."""
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return loss, {"half": loss / 2, "rank": torch.distributed.get_rank()}


def renamed(model, batch):
    """Other numbers after some calls."""
    global calls
    calls += 1
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1]), {f"number{calls // 4}": 1.0}


def wide(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1]), {"all": batch[1]}


def vector(model, batch):
    return (model(batch[0]) - batch[1]).square()
