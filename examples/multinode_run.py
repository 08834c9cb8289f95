"""multinode.py, ported to the run library: it resumes at the next batch, not at the last saved epoch.

torchrun --nproc-per-node 2 multinode_run.py 10 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from imgkit_entrypoints.run import Run


class RandomPairs(Dataset):
    def __init__(self, size):
        draw = torch.Generator().manual_seed(1)
        self.pairs = [
            (torch.rand(20, generator=draw), torch.randint(5, (), generator=draw)) for _ in range(size)
        ]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Trainer:
    def __init__(self, model, data, optimizer, save_every, run):
        self.local_rank, self.rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank)
        self.model = model.to(self.device)
        self.data, self.optimizer, self.save_every, self.run = data, optimizer, save_every, run
        self.model = DistributedDataParallel(self.model)
        run.track(model=self.model, optimizer=optimizer, loader=data)
        run.restore()

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        print(f"[rank {self.rank}] epoch {epoch}, {len(self.data)} steps", flush=True)
        self.data.sampler.set_epoch(epoch)
        save_every = self.save_every * len(self.data)
        for _, (source, targets) in self.run.steps(self.data, save_every=save_every):
            self.run_batch(source.to(self.device), targets.to(self.device))

    def train(self, max_epochs):
        for epoch in range(self.run.epoch, max_epochs):
            self.run_epoch(epoch)


def main(run, epochs, save_every, batch_size):
    dist.init_process_group()
    torch.manual_seed(0)
    data = RandomPairs(2048)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, save_every, run).train(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a distributed training job")
    parser.add_argument("epochs", type=int, help="epochs in all")
    parser.add_argument("save_every", type=int, help="epochs between two checkpoints")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each rank and step")
    options = parser.parse_args()
    with Run.start() as run:
        main(run, options.epochs, options.save_every, options.batch_size)
    dist.destroy_process_group()
