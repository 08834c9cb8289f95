"""The built-in data: generated from the seed, with a pattern that a model can learn, and folders of images.

An image folder has one subfolder per class, as ImageNet does; Pillow reads the images.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.models import CLASSES, CONTEXT, FEATURES, VOCABULARY
from imgkit_entrypoints.apps.train.order import seed_of
from imgkit_entrypoints.errors import UsageError

# Standard deviation of what regression cannot learn.
NOISE = 0.01
# One in this many windows of a text is held out.
HELD_OUT = 10


class TensorSamples:
    """Samples that are rows of tensors, so that one indexing makes a batch, without a loop in Python."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def size_bytes(self) -> int:
        """Size of all samples."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the samples with these indices as one batch."""
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


class TextFile:
    """The bytes of a file: sample i is the i-th window of CONTEXT bytes, with the byte that follows each.

    The last tenth of the samples is held out, whether it is evaluated or not.
    """

    def __init__(self, path: Path, split: str) -> None:
        size = path.stat().st_size
        self.bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        windows = (size - 1) // CONTEXT
        training_windows = windows - windows // HELD_OUT
        self._windows = range(training_windows)
        needed_windows = 1
        if split != "train":
            self._windows = range(training_windows, windows)
            needed_windows = HELD_OUT
        if not self._windows:
            needed_bytes = CONTEXT * needed_windows + 1
            raise UsageError(
                f"{size} bytes are too few",
                where=str(path),
                hint=f"{split} needs at least {needed_bytes} bytes",
            )

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the windows (samples, CONTEXT), and the same windows one byte later."""
        starts = (self._windows.start + indices[:, None]) * CONTEXT
        rows = self.bytes[starts + torch.arange(CONTEXT + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def _make_regression(samples: int, truth: torch.Generator, draw: torch.Generator) -> TensorSamples:
    """Return data for linear regression: y = w.x + b + a little noise."""
    weights = torch.randn(FEATURES, 1, generator=truth)
    bias = torch.randn(1, generator=truth)
    inputs = torch.randn(samples, FEATURES, generator=draw)
    noise = NOISE * torch.randn(samples, 1, generator=draw)
    return TensorSamples(inputs, inputs @ weights + bias + noise)


def _make_classes(samples: int, truth: torch.Generator, draw: torch.Generator) -> TensorSamples:
    """Return data for classification: the class is the largest of CLASSES random projections."""
    inputs = torch.randn(samples, FEATURES, generator=draw)
    projections = torch.randn(FEATURES, CLASSES, generator=truth)
    return TensorSamples(inputs, (inputs @ projections).argmax(1))


def _make_images(samples: int, truth: torch.Generator, draw: torch.Generator) -> TensorSamples:
    """Return images of 3x32x32: one picture for each class, with noise."""
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    pictures = torch.randn(CLASSES, 3, 32, 32, generator=truth)
    return TensorSamples(pictures[labels] + torch.randn(samples, 3, 32, 32, generator=draw), labels)


def _make_sequences(samples: int, _truth: torch.Generator, draw: torch.Generator) -> TensorSamples:
    """Return bytes that count up by a stride from 1 to 8. Each sample has its own stride and start."""
    first = torch.randint(VOCABULARY, (samples, 1), generator=draw)
    stride = torch.randint(1, 9, (samples, 1), generator=draw)
    rows = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return TensorSamples(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


# Number of samples by default, and the function that makes them, for each built-in model.
_BUILT_IN: Mapping[str, tuple[int, Callable[[int, torch.Generator, torch.Generator], TensorSamples]]] = {
    "linear": (2048, _make_regression),
    "mlp": (2048, _make_classes),
    "resnet18": (2048, _make_images),
    "resnet50": (2048, _make_images),
    "gpt": (4096, _make_sequences),
}


def load_built_in(config: Config, split: str) -> TensorSamples | TextFile | ImageFolder:
    """Return the data for a built-in model; the split ``eval`` is held out.

    Raises
    ------
    UsageError : no data fits the model.
    """
    if config.model not in _BUILT_IN:
        raise UsageError(
            f"there is no built-in data for {config.model}", hint="name your own: --data MOD:FN or file.py:FN"
        )
    default_samples, generate = _BUILT_IN[config.model]
    if config.data == "builtin":
        # All splits share the pattern to learn.
        truth = torch.Generator().manual_seed(config.seed)
        draw = torch.Generator().manual_seed(seed_of(config.seed, split))
        return generate(config.samples or default_samples, truth, draw)
    path = Path(config.data)
    if path.is_dir():
        if generate is not _make_images:
            raise _model_error(config, "images", "resnet18 or resnet50")
        return ImageFolder(path, split, config.image_size)
    if config.model != "gpt" or not path.is_file():
        raise _model_error(config, "a text file", "gpt")
    return TextFile(path, split)


def _model_error(config: Config, data: str, models: str) -> UsageError:
    return UsageError(f"{config.model} cannot read {data}", where=config.data, hint=f"use --model {models}")


def count_classes(config: Config) -> int:
    """Return the number of classes in the data of a built-in model."""
    path = Path(config.data)
    if path.is_dir():
        return len(list_classes(path))
    return CLASSES


# Files with other endings are no samples.
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# Folders of each split; the first that exists counts. Without a train folder, all are for training.
SPLITS = {"train": ("train",), "eval": ("val", "eval", "test")}
# Mean and standard deviation of ImageNet's channels, which published weights and learning rates assume.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Least share of the image's shorter side that a training sample shows.
MIN_SHARE = 0.35


def find_split_folder(data: Path, split: str) -> Path:
    """Return the folder with the classes of `split`: ``data/val`` for ``eval``, if it exists.

    Raises
    ------
    UsageError : no images are held out.
    """
    for name in SPLITS[split]:
        folder = data / name
        if folder.is_dir():
            return folder
    if split == "eval":
        raise UsageError(
            "no images are held out",
            where=str(data),
            hint=f"put the classes into {data}/train and {data}/val, or leave --eval-every out",
        )
    return data


def list_classes(data: Path) -> list[str]:
    """Return the names of the classes in the order of their numbers.

    Raises
    ------
    UsageError : there are fewer than two classes.
    """
    folder = find_split_folder(data, "train")
    names = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            names.append(path.name)
    if len(names) < 2:
        raise UsageError(
            f"{len(names)} classes, expected two or more",
            where=str(folder),
            hint="put the images of each class into a subfolder of its own",
        )
    return names


class ImageFolder:
    """One sample per file: pixels (3, size, size), and the number of the class.

    Training samples are cropped and mirrored at random. torch draws the numbers, so each sample depends only
    on seed, epoch and index.
    """

    def __init__(self, data: Path, split: str, size: int) -> None:
        folder = find_split_folder(data, split)
        names = list_classes(data)
        self._size = size
        self._is_random = split == "train"
        self._files: list[tuple[Path, int]] = []
        for number, name in enumerate(names):
            paths = sorted((folder / name).rglob("*"))
            self._files += [(path, number) for path in paths if path.suffix.lower() in ENDINGS]
        if not self._files:
            raise UsageError(
                "the folder holds no images", where=str(folder), hint=f"files must end in {' '.join(ENDINGS)}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        reader = importlib.import_module("PIL.Image")
        path, number = self._files[index]
        with reader.open(path) as opened:
            image = opened.convert("RGB")
            box = self._choose_box(*image.size)
            image = image.resize((self._size, self._size), reader.Resampling.BILINEAR, box=box)
        if self._is_random and torch.rand(()) < 0.5:
            image = image.transpose(reader.Transpose.FLIP_LEFT_RIGHT)
        return _normalize(image), number

    def _choose_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the square to crop: a random one in training, and otherwise the largest in the middle."""
        size_share, x_share, y_share = 1.0, 0.5, 0.5
        if self._is_random:
            size_share, x_share, y_share = torch.rand(3).tolist()
        side = min(width, height) * (MIN_SHARE + (1 - MIN_SHARE) * size_share)
        left_edge = (width - side) * x_share
        top = (height - side) * y_share
        return left_edge, top, left_edge + side, top + side


def _normalize(image: Any) -> Tensor:
    """Return the pixels of an image in channels with the mean 0 and the standard deviation 1 of ImageNet."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    channels_last = pixels.view(image.height, image.width, 3)
    colours = channels_last.permute(2, 0, 1).float() / 255
    mean = torch.tensor(MEAN)[:, None, None]
    deviation = torch.tensor(DEVIATION)[:, None, None]
    return (colours - mean) / deviation
