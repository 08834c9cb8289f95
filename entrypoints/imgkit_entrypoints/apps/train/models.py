"""The built-in models, in plain torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from imgkit_entrypoints.errors import UsageError

# Number of inputs of the models linear and mlp.
FEATURES = 20
# Number of classes in the generated data.
CLASSES = 10
# Tokens are bytes, so that any text file can be used as data.
VOCABULARY = 256
# Number of bytes that the transformer sees at once.
CONTEXT = 64


def mlp(classes: int = CLASSES) -> nn.Module:
    """Return a multilayer perceptron with two hidden layers."""
    width = 256
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


class Residual(nn.Module):  # type: ignore[misc]
    """A block of a ResNet: convolutions with a skip connection.

    A bottleneck block has three convolutions, of which the last has four times as many channels.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            out_channels = 4 * channels
            layers = [*_conv(in_channels, channels, 1), nn.ReLU(), *_conv(channels, channels, 3, stride)]
            layers += [nn.ReLU(), *_conv(channels, out_channels, 1)]
        else:
            out_channels = channels
            layers = [*_conv(in_channels, channels, 3, stride), nn.ReLU(), *_conv(channels, channels, 3)]
        # With zeros here, the block is initially equal to its skip connection, which keeps SGD stable.
        nn.init.zeros_(layers[-1].weight)
        self.body = nn.Sequential(*layers)
        # The skip connection. Checkpoints contain the names of modules, so this name must not change.
        self.way: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.way = nn.Sequential(*_conv(in_channels, out_channels, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the block to a tensor with the shape (batch, channels, height, width).

        The result has `out_channels` channels, and its height and width are divided by the stride.
        """
        return torch.relu(self.body(inputs) + self.way(inputs))


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution and the batch normalization after it."""
    return [
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    ]


def resnet(name: str, classes: int) -> nn.Module:
    """Return torchvision's ResNet if torchvision is installed, and otherwise `small_resnet`.

    Raises
    ------
    UsageError : the installed torchvision is incompatible with this torch.
    """
    try:
        vision = importlib.import_module("torchvision.models")
    except ImportError:
        return small_resnet(name, classes)
    except RuntimeError as error:  # the operators of this torchvision were built for another torch
        raise UsageError(
            f"the installed torchvision is incompatible with this torch: {error}",
            where=f"--model {name}",
            hint="install a matching torchvision, or remove it: a small ResNet is built in",
        ) from error
    model: nn.Module = getattr(vision, name)(num_classes=classes, zero_init_residual=True)
    return model


def small_resnet(name: str, classes: int) -> nn.Module:
    """Return a ResNet for small images (He et al. 2015, section 4.2). It has no pooling at its beginning."""
    blocks = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name]
    bottleneck = name == "resnet50"
    layers: list[nn.Module] = [*_conv(3, 64, 3), nn.ReLU()]
    in_channels = 64
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(in_channels, channels, stride, bottleneck=bottleneck))
            in_channels = 4 * channels if bottleneck else channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, classes))


class Block(nn.Module):  # type: ignore[misc]
    """A transformer layer: causal self-attention, then two linear layers, each with a skip connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.before_layers = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply the layer to a tensor with the shape (batch, time, width). The shape stays the same."""
        batch, time, width = tokens.shape
        mixed = self.queries_keys_values(self.before_attention(tokens))
        queries, keys, values = mixed.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attention = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=dropout
        )
        tokens = tokens + self.out(attention.transpose(1, 2).reshape(batch, time, width))
        outputs = self.layers(self.before_layers(tokens))
        return tokens + nn.functional.dropout(outputs, self.dropout, self.training)


class Gpt(nn.Module):  # type: ignore[misc]
    """A small decoder-only transformer that predicts the next byte of a text."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.end = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next byte for each position.

        The input has the shape (batch, time), and the result (batch, time, VOCABULARY).
        """
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        outputs = self.blocks(self.tokens(tokens) + positions)
        scores: Tensor = self.out(self.end(outputs))
        return scores


# The constructors of the built-in models. The argument is the number of classes, which some models ignore.
BUILT_IN: Mapping[str, Callable[[int], nn.Module]] = {
    "linear": lambda _: nn.Linear(FEATURES, 1),
    "mlp": mlp,
    "resnet18": functools.partial(resnet, "resnet18"),
    "resnet50": functools.partial(resnet, "resnet50"),
    "gpt": lambda _: Gpt(),
}


def mean_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean loss of a batch (inputs, targets).

    If the targets are integers, this is the cross entropy. Otherwise, it is the squared error.
    """
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs, targets)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
