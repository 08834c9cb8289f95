"""What people write by hand: the least that trains with DDP, and the tutorial's way of feeding it."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from imgkit_entrypoints.apps.train import models

BATCH = {"linear": 32, "resnet18": 8}


class Samples(Dataset):  # type: ignore[misc]
    """The tutorial's: a list of one sample after the other."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.samples = list(zip(inputs, targets, strict=True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index]


def main(how: str, name: str, steps: int) -> None:
    """Train for `steps`; rank 0 prints samples a second after the first fifth."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(models.BUILT_IN[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "linear":
        inputs = torch.randn(65536, 20)
        targets = inputs.sum(1, keepdim=True)
    else:
        inputs, targets = torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,))
    loss_of = torch.nn.functional.mse_loss if name == "linear" else torch.nn.functional.cross_entropy
    step, began, size = 0, 0.0, BATCH[name]
    epoch = 0
    while step < steps:
        for one, wanted in batches(how, inputs, targets, size, epoch):
            optimizer.zero_grad()
            loss = loss_of(model(one), wanted)
            loss.backward()
            optimizer.step()
            step += 1
            if step == steps // 5:
                dist.barrier()
                began = time.perf_counter()
            if step == steps:
                break
        epoch += 1
    if dist.get_rank() == 0:
        rate = (steps - steps // 5) * size * dist.get_world_size() / (time.perf_counter() - began)
        print(rate, flush=True)
    dist.destroy_process_group()


def batches(how: str, inputs: torch.Tensor, targets: torch.Tensor, size: int, epoch: int):  # type: ignore[no-untyped-def]
    """One epoch of this rank."""
    if how == "tutorial":
        samples = Samples(inputs, targets)
        sampler = DistributedSampler(samples)
        sampler.set_epoch(epoch)
        yield from DataLoader(samples, batch_size=size, shuffle=False, sampler=sampler)
        return
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    for chosen in mine.split(size):
        yield inputs[chosen], targets[chosen]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
