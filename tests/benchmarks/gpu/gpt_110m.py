"""A GPT of 110 million parameters for dist-train, and the same model in a bare loop.

dist-train --model gpt_110m.py:model --data gpt_110m.py:data
python3 gpt_110m.py [--compile] [--device cpu] STEPS EVERY
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

SMALL = os.environ.get("IMGKIT_REHEARSE") == "1"
"""A tiny model of the same shape, so that the script can be tried without a GPU."""
WIDTH, HEADS, DEPTH, CONTEXT, VOCABULARY = (64, 4, 2, 64, 512) if SMALL else (768, 12, 12, 1024, 32000)
BATCH = 4 if SMALL else 16
RATE = 3e-4


class Layer(nn.Module):
    """Causal self-attention and two linear layers, each with a skip connection (Vaswani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, WIDTH) to the same shape."""
        batch, time_steps, _ = hidden.shape
        parts = self.qkv(self.first(hidden)).view(batch, time_steps, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, time_steps, WIDTH))
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.second(hidden))))


class Gpt(nn.Module):
    """A decoder-only transformer, 110 million parameters with an output layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        self.end, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) to scores (batch, time, VOCABULARY)."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        scores: Tensor = self.scores(self.end(self.layers(self.tokens(tokens) + positions)))
        return scores


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random texts; the target is the next token."""

    def __len__(self) -> int:
        return 64 if SMALL else 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return drawn[:-1], drawn[1:]


def model(config: Any = None) -> nn.Module:
    """Return the model."""
    return Gpt()


def data(config: Any = None, split: str = "train") -> Texts:
    """Return the texts."""
    return Texts()


def flops_a_token() -> float:
    """FLOP of training one token: 6 for each weight, and attention (PaLM 2022, appendix B)."""
    weights = sum(weight.numel() for weight in Gpt().parameters())
    return 6.0 * weights + 12.0 * DEPTH * WIDTH * CONTEXT


def bare(steps: int, every: int, device: torch.device, *, compiled: bool) -> list[float]:
    """Train without DDP, log or checkpoints; tokens per second of each `every` steps."""
    torch.manual_seed(0)
    model = Gpt().to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    texts = [Texts()[index] for index in range(len(Texts()))]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rates, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        chosen = [texts[(step * BATCH + index) % len(texts)] for index in range(BATCH)]
        inputs, targets = (torch.stack(part).to(device) for part in zip(*chosen, strict=True))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            wait()
            now = time.perf_counter()
            rates.append(BATCH * CONTEXT * every / (now - start))
            start = now
    return rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("steps", type=int)
    parser.add_argument("every", type=int)
    options = parser.parse_args()
    print(
        json.dumps(bare(options.steps, options.every, torch.device(options.device), compiled=options.compile))
    )
