"""A language model whose weights, gradients and optimizer are sharded over all ranks by FSDP2.

    dist-run fsdp2.py --hours 11                # a whole model never exists on one GPU
    dist-run fsdp2.py --replicas 2              # HSDP: sharded within each half of the ranks, equal in both

Each rank writes its own part of a checkpoint, and any number of ranks resumes from it. The run's folder
(--run-dir, IMGKIT_RUN_DIR) has to be on a file system that all nodes share.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from imgkit_entrypoints.run import Run

WORDS, LENGTH = 256, 64


class Block(nn.Module):
    """One layer: attention to the words before, then a small network for each word."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.before_attention(x)).view(batch, length, self.heads, -1).transpose(1, 2)
        found = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Predicts the next word at each position."""

    def __init__(self, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x))


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    """Draw all weights, the same for any number of ranks.

    Every rank draws each parameter whole, one at a time, from one generator on the CPU, and keeps its slice.
    nn.init on the slices themselves may give all ranks the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            whole = torch.zeros(weight.shape, dtype=weight.dtype)
            if isinstance(module, nn.LayerNorm) and name == "weight":
                whole.fill_(1.0)
            elif weight.dim() > 1:
                whole.normal_(std=0.02, generator=generator)
            whole = whole.to(weight.device)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
            weight.copy_(whole)


class Sums(Dataset):
    """Texts in which each word is the sum of the two before. Put your own data here."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        text = [index % WORDS, index // 16 % WORDS]
        while len(text) < LENGTH + 1:
            text.append((text[-1] + text[-2]) % WORDS)
        return torch.tensor(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of an update")
    parser.add_argument("--hours", type=float, default=math.inf, help="save and stop after that time")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    shards = dist.get_world_size() // options.replicas
    shape, names = (
        ((options.replicas, shards), ("replicas", "shards"))
        if options.replicas > 1
        else ((shards,), ("shards",))
    )
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

    with torch.device("meta"):  # no memory yet
        model = Model(width=128, depth=4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # gathered when its turn comes, and freed after it
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    draw(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard

    data = Sums()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    with Run.start(stop_after_s=options.hours * 3600) as run:
        run.track(model=model, optimizer=optimizer)
        run.restore()
        for epoch in range(run.epoch, options.epochs):
            sampler.set_epoch(epoch)
            for step, texts in run.steps(loader, save_every=100):
                updates = step % options.accumulate == 0
                model.set_requires_gradient_sync(updates)  # the ranks add up gradients once in an update
                words = texts.to(device)
                loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
                (loss / options.accumulate).backward()
                if updates:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
                    optimizer.step()
                    optimizer.zero_grad()
                run.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
