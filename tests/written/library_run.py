"""A program on the run library: ``library_run.py STEPS [sharded]``.

First it prints its step and its weights' sum. Its model is wrapped in DDP, or sharded by FSDP2.
"""

import itertools
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from imgkit_entrypoints.run import Run

SHARDED = sys.argv[2:] == ["sharded"]


class Seen:
    """State of each rank alone: the sum of what it has trained on."""

    total = 0.0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def main(run, until):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    layers = torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers)
    if SHARDED:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = Seen()
    run.track(model=model, optimizer=optimizer, loader=loader)
    run.track_per_rank(seen=seen)
    run.restore()
    total = sum((one.full_tensor() if SHARDED else one).double().sum().item() for one in model.parameters())
    print(
        f"rank {dist.get_rank()} begins after step {run.step} with {total:.4f}, {seen.total:.4f}", flush=True
    )
    for epoch in itertools.count(run.epoch):
        sampler.set_epoch(epoch)
        for step, (values,) in run.steps(loader, save_every=3):
            optimizer.zero_grad()
            loss = model(values).square().mean()
            loss.backward()
            optimizer.step()
            seen.total += values.sum().item()
            run.log(loss=loss)
            if step == until:
                return


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with Run.start(keep=1) as run:
        main(run, int(sys.argv[1]))
    dist.destroy_process_group()
