"""The built-in models, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

FEATURES = 20
CLASSES = 10
VOCABULARY = 256
"""Bytes: any text file is data."""
CONTEXT = 64


def linear() -> nn.Module:
    """The tutorial's regression."""
    return nn.Linear(FEATURES, 1)


def mlp() -> nn.Module:
    """Two hidden layers."""
    width = 256
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


class Residual(nn.Module):  # type: ignore[misc]
    """Convolutions with a way around them; a bottleneck has four times the channels at its end."""

    def __init__(self, inside: int, channels: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outside = channels * (4 if bottleneck else 1)
        if bottleneck:
            layers = [*_conv(inside, channels, 1), nn.ReLU(), *_conv(channels, channels, 3, stride)]
            layers += [nn.ReLU(), *_conv(channels, outside, 1)]
        else:
            layers = [*_conv(inside, channels, 3, stride), nn.ReLU(), *_conv(channels, channels, 3)]
        self.body = nn.Sequential(*layers)
        same = stride == 1 and inside == outside
        self.way = nn.Identity() if same else nn.Sequential(*_conv(inside, outside, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, inside, height, width) to (batch, outside, height / stride, width / stride)."""
        return torch.relu(self.body(inputs) + self.way(inputs))


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outside),
    ]


def resnet(blocks: tuple[int, ...], *, bottleneck: bool) -> nn.Module:
    """ResNet for small images (He et al. 2015, section 4.2): a 3x3 stem, no pooling in front."""
    layers: list[nn.Module] = [*_conv(3, 64, 3), nn.ReLU()]
    inside = 64
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(inside, channels, stride, bottleneck=bottleneck))
            inside = channels * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


class Block(nn.Module):  # type: ignore[misc]
    """Attention to what came before, then two layers, each with a way around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = tokens.shape
        mixed = self.queries_keys_values(self.before_attention(tokens))
        queries, keys, values = mixed.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return tokens + nn.functional.dropout(
            self.layers(self.before_layers(tokens)), self.dropout, self.training
        )


class Gpt(nn.Module):  # type: ignore[misc]
    """A small decoder-only transformer over bytes."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.end, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) to the scores of the next byte, (batch, time, VOCABULARY)."""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        scores: Tensor = self.out(self.end(self.blocks(self.tokens(tokens) + places)))
        return scores


BUILT_IN: Mapping[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "resnet18": lambda: resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "gpt": Gpt,
}


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean over the batch of (inputs, targets): cross entropy for whole-number targets, else squares."""
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs, targets)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
