"""A training program to copy: your model, data, evaluation and export go where the comments say.

    imgkit run                              in a folder that `imgkit init` made
    imgkit run mn5 -A bsc98 --qos acc_debug --time 2h --nodes 2 -- dist-run train.py --epochs 20
    torchrun --nproc-per-node 4 train.py    also without dist-run
    python3 train.py                        one process

It saves when the job's time ends or somebody stops it. Started again, it resumes at the next sample.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from imgkit_entrypoints.run import Run


class Waves(Dataset):
    """Your data: noisy sine waves, and the frequency of each. A sample depends on its index alone."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        frequency = torch.randint(1, 11, (), generator=draw)
        wave = torch.sin(torch.linspace(0, 6.28, 100) * frequency)
        return wave + 0.5 * torch.randn(100, generator=draw), frequency - 1


class Net(nn.Module):
    """Your model."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(100, width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.layers(waves)


def loader_of(data: Dataset, batch_size: int, *, shuffle: bool) -> DataLoader:
    """Divide the samples among the ranks; all get equally many batches."""
    sampler = DistributedSampler(data, num_replicas=WORLD, rank=RANK, shuffle=shuffle)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, pin_memory=DEVICE.type == "cuda")


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Your evaluation: the share of right answers over all ranks."""
    model.eval()
    right = torch.zeros(2, device=DEVICE)
    for waves, target in loader:
        answer = model(waves.to(DEVICE)).argmax(1)
        right += torch.stack([(answer == target.to(DEVICE)).sum(), torch.tensor(len(target), device=DEVICE)])
    model.train()
    if WORLD > 1:
        dist.all_reduce(right)
    return float(right[0] / right[1])


def export(run: Run, model: nn.Module, accuracy: float) -> None:
    """Your export: the weights alone, for use elsewhere. A resume needs checkpoints/ as well."""
    part = run.folder / "weights.part"
    torch.save({"model": model.state_dict(), "accuracy": accuracy}, part)
    part.replace(run.folder / "weights.pt")  # a killed job leaves the older file


def train(run: Run, options: argparse.Namespace) -> None:
    """Train for all epochs, or until a request to stop."""
    torch.manual_seed(options.seed)
    plain = Net().to(DEVICE)
    model = DistributedDataParallel(plain) if WORLD > 1 else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    loader = loader_of(Waves(0, options.samples), options.batch_size, shuffle=True)
    held_out = loader_of(Waves(1_000_000, 500), options.batch_size, shuffle=False)
    torch.manual_seed(options.seed + 1 + RANK)  # ranks differ from here on: dropout

    model(torch.zeros(2, 100, device=DEVICE)).sum().backward()  # DDP orders its sums before a resume
    optimizer.zero_grad()
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    run.restore()
    for epoch in range(run.epoch, options.epochs):
        loader.sampler.set_epoch(epoch)
        for _, (waves, target) in run.steps(loader, save_every=options.save_every):
            loss = nn.functional.cross_entropy(model(waves.to(DEVICE)), target.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        schedule.step()
        accuracy = evaluate(plain, held_out)
        if RANK == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  accuracy {accuracy:.1%}", flush=True)
            export(run, plain, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", help="go on in the folder of an earlier job, such as runs/mine-4711")
    options = parser.parse_args()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    with Run.start(options.run_dir) as run:  # first: from now on a request to stop is heard
        if WORLD > 1:
            dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
        train(run, options)
    if WORLD > 1:
        dist.destroy_process_group()


RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

if __name__ == "__main__":
    main()
