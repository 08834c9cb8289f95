"""plain_ddp.py, made to stop, save and resume: ten lines are new or changed."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from imgkit_entrypoints.run import Run


def main(run):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    frequency = torch.randint(1, 11, (4000,))
    waves = torch.sin(torch.linspace(0, 6.28, 100) * frequency[:, None]) + 0.5 * torch.randn(4000, 100)
    data = TensorDataset(waves, frequency - 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)

    model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(waves[:20].to(device)).sum().backward()  # DDP orders its sums here, also before a resume
    optimizer.zero_grad()
    run.track(model=model, optimizer=optimizer)
    run.restore()

    for epoch in range(run.epoch, 4):
        sampler.set_epoch(epoch)
        for _, (waves, target) in run.steps(loader, save_every=50):
            loss = nn.functional.cross_entropy(model(waves.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            norm = nn.utils.parameters_to_vector(model.parameters()).norm()
            print(f"epoch {epoch + 1}: norm of the weights {norm:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    with Run.start() as run:
        main(run)
    dist.destroy_process_group()
