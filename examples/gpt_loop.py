"""A small GPT on the bytes of a file, in the shape of many GPT trainers: a loop that counts iterations.

Batches are drawn at random from the file, and the next one is fetched while the model works on this one.
`diff` shows what gpt_loop_run.py adds.
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

data_file = os.environ.get("GPT_DATA", __file__)
out_dir = os.environ.get("GPT_OUT", "out")
max_iters = int(os.environ.get("GPT_ITERS", "200"))
eval_interval, eval_iters, log_interval = 20, 4, 10
accumulate, batch_size, block_size = 2, 8, 32
layers, heads, width, dropout = 2, 2, 32, 0.1
learning_rate, min_lr, warmup_iters, weight_decay, grad_clip = 1e-3, 1e-4, 10, 0.1, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied
        self.register_buffer(
            "mask", torch.ones(block_size, block_size, dtype=torch.bool).triu(1), persistent=False
        )

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def get_batch(split):
    data = np.memmap(data_file, dtype=np.uint8, mode="r")
    cut = len(data) * 9 // 10
    part = data[:cut] if split == "train" else data[cut:]
    starts = torch.randint(len(part) - block_size, (batch_size,))
    windows = [torch.from_numpy(part[one : one + block_size + 1].astype(np.int64)) for one in starts.tolist()]
    both = torch.stack(windows).to(device, non_blocking=True)
    return both[:, :-1], both[:, 1:]


def get_lr(iteration):
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    share = min(1.0, (iteration - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * share)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    means = {
        split: torch.stack([model(*get_batch(split)) for _ in range(eval_iters)]).mean().item()
        for split in ("train", "val")
    }
    model.train()
    return means


ddp = "RANK" in os.environ
rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def main():
    torch.manual_seed(1337 + rank)
    model = GPT().to(device)
    matrices = [one for one in model.parameters() if one.dim() >= 2]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    autocast = torch.autocast(device.type, torch.float16) if device.type == "cuda" else nullcontext()
    raw_model = model
    if ddp:
        model = DistributedDataParallel(model)
    iter_num, best_val_loss = 0, 1e9
    X, Y = get_batch("train")
    while True:
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iter_num % eval_interval == 0 and rank == 0:
            losses = estimate_loss(raw_model)
            print(f"iteration {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
                Path(out_dir).mkdir(parents=True, exist_ok=True)
                torch.save({"model": raw_model.state_dict(), "val_loss": best_val_loss}, f"{out_dir}/best.pt")
        for micro_step in range(accumulate):
            if ddp:
                model.require_backward_grad_sync = micro_step == accumulate - 1
            with autocast:
                loss = model(X, Y) / accumulate
            X, Y = get_batch("train")  # while the device works
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % log_interval == 0 and rank == 0:
            print(f"iteration {iter_num}: loss {loss.item() * accumulate:.4f}", flush=True)
        iter_num += 1
        if iter_num > max_iters:
            break


if __name__ == "__main__":
    if ddp:
        dist.init_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    main()
    if ddp:
        dist.destroy_process_group()
