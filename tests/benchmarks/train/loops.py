"""Hand-written loops: a minimal one with DDP, and one that loads data like the tutorial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from imgkit_entrypoints.apps.train import models

BATCH, SAMPLES = 32, 65536

Batches = Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]
"""The samples of one epoch for this rank."""


def training(how: str, count: int) -> Iterator[None]:
    """Train `count` steps per turn with the loop ``minimal`` or ``tutorial``."""
    torch.manual_seed(0)
    model = DistributedDataParallel(models.BUILT_IN["linear"](models.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(SAMPLES, models.FEATURES)
    targets = inputs.sum(1, keepdim=True)
    batches = {"minimal": sliced, "tutorial": one_by_one}[how](inputs, targets, BATCH)
    step = 0
    for epoch in itertools.count():
        for batch, labels in batches(epoch):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % count == 0:
                yield


def sliced(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> Batches:
    """Make a batch with one indexing."""

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        for chosen in order[dist.get_rank() :: dist.get_world_size()].split(size):
            yield inputs[chosen], targets[chosen]

    return batches


class Samples(Dataset):  # type: ignore[misc]
    """The tutorial's data set: a list of single samples."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.samples = list(zip(inputs, targets, strict=True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index]


def one_by_one(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> Batches:
    """The default DataLoader."""
    samples = Samples(inputs, targets)
    sampler = DistributedSampler(samples)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sampler.set_epoch(epoch)
        return iter(DataLoader(samples, batch_size=size, shuffle=False, sampler=sampler))

    return batches
