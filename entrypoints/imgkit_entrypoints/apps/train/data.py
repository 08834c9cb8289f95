"""The built-in data: small, made up from the seed, and with something in it that can be learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.models import CLASSES, CONTEXT, FEATURES, VOCABULARY
from imgkit_entrypoints.apps.train.order import seed_of
from imgkit_entrypoints.errors import UsageError

NOISE = 0.01


class Sliced:
    """Samples that are rows of tensors: a batch is one indexing, without Python for each sample."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The samples `indices`, stacked."""
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


class Text:
    """A file's bytes: sample i is its i-th window of CONTEXT bytes, with the byte after each."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self.bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        if len(self) < 1:
            raise UsageError(
                f"{size} bytes are too few", where=str(path), hint=f"a sample is {CONTEXT} bytes and one more"
            )

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Windows (samples, CONTEXT) and the same one byte later."""
        rows = self.bytes[indices[:, None] * CONTEXT + torch.arange(CONTEXT + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def _regression(samples: int, truth: torch.Generator, draw: torch.Generator) -> Sliced:
    """y = w.x + b + a little noise."""
    weights, bias = torch.randn(FEATURES, 1, generator=truth), torch.randn(1, generator=truth)
    inputs = torch.randn(samples, FEATURES, generator=draw)
    return Sliced(inputs, inputs @ weights + bias + NOISE * torch.randn(samples, 1, generator=draw))


def _classes(samples: int, truth: torch.Generator, draw: torch.Generator) -> Sliced:
    """The largest of CLASSES random projections."""
    inputs = torch.randn(samples, FEATURES, generator=draw)
    return Sliced(inputs, (inputs @ torch.randn(FEATURES, CLASSES, generator=truth)).argmax(1))


def _images(samples: int, truth: torch.Generator, draw: torch.Generator) -> Sliced:
    """Images 3x32x32: a picture for each class, under noise."""
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    pictures = torch.randn(CLASSES, 3, 32, 32, generator=truth)
    return Sliced(pictures[labels] + torch.randn(samples, 3, 32, 32, generator=draw), labels)


def _sequences(samples: int, _truth: torch.Generator, draw: torch.Generator) -> Sliced:
    """Bytes that count up by a stride from 1 to 8, each sample with its own stride and beginning."""
    first = torch.randint(VOCABULARY, (samples, 1), generator=draw)
    stride = torch.randint(1, 9, (samples, 1), generator=draw)
    rows = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return Sliced(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


_BUILT_IN: Mapping[str, tuple[int, Callable[[int, torch.Generator, torch.Generator], Sliced]]] = {
    "linear": (2048, _regression),
    "mlp": (2048, _classes),
    "resnet18": (2048, _images),
    "resnet50": (2048, _images),
    "gpt": (4096, _sequences),
}


def built_in(config: Config, split: str) -> Sliced | Text:
    """The data that goes with a built-in model.

    Raises
    ------
    UsageError : there is none.
    """
    if config.model not in _BUILT_IN:
        raise UsageError(f"no data is built in for {config.model}", hint="--data MOD:FN or file.py:FN")
    if config.data != "builtin":
        if config.model != "gpt":
            raise UsageError(f"{config.model} cannot read a text file", where=config.data, hint="--model gpt")
        return Text(Path(config.data))
    samples, make = _BUILT_IN[config.model]
    # What is to be learnt is the same in every split.
    truth = torch.Generator().manual_seed(config.seed)
    draw = torch.Generator().manual_seed(seed_of(config.seed, split))
    return make(config.samples or samples, truth, draw)
