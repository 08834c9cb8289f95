"""The built-in data: generated samples with a pattern that a model can learn, text files, and image folders.

Generated samples depend only on the seed. An image folder has one subfolder per class, as in ImageNet. Pillow
reads the images.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.models import CLASSES, CONTEXT, FEATURES, VOCABULARY
from imgkit_entrypoints.apps.train.order import seed_of
from imgkit_entrypoints.errors import UsageError

# Standard deviation of the noise in the data for regression, which a model cannot learn.
NOISE = 0.01
# One of this many samples of a text is held out for the evaluation.
HELD_OUT = 10


class TensorSamples:
    """Samples that are stored as rows of tensors.

    A batch is made by indexing each tensor once, without a loop over samples in Python.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def size_bytes(self) -> int:
        """Size of all samples together in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the samples with these indices as one batch."""
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


class TextFile:
    """Samples that are windows of CONTEXT bytes of a file.

    The inputs of a sample are the bytes of its window. The target of each byte is the byte that follows it.
    The last tenth of the samples is held out, even if the run does not evaluate.
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
        """Return the windows with the shape (samples, CONTEXT), and the same windows shifted by one byte."""
        starts = (self._windows.start + indices[:, None]) * CONTEXT
        rows = self.bytes[starts + torch.arange(CONTEXT + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def _make_regression(count: int, pattern_generator: Generator, sample_generator: Generator) -> TensorSamples:
    """Return `count` samples for linear regression: y = w.x + b plus a little noise.

    `pattern_generator` generates the pattern (w and b), which is the same for all splits. `sample_generator`
    generates the samples.
    """
    weights = torch.randn(FEATURES, 1, generator=pattern_generator)
    bias = torch.randn(1, generator=pattern_generator)
    inputs = torch.randn(count, FEATURES, generator=sample_generator)
    noise = NOISE * torch.randn(count, 1, generator=sample_generator)
    return TensorSamples(inputs, inputs @ weights + bias + noise)


def _make_classes(count: int, pattern_generator: Generator, sample_generator: Generator) -> TensorSamples:
    """Return `count` samples for classification, whose class is the largest of CLASSES random projections.

    `pattern_generator` generates the projections, which are the same for all splits. `sample_generator`
    generates the samples.
    """
    inputs = torch.randn(count, FEATURES, generator=sample_generator)
    projections = torch.randn(FEATURES, CLASSES, generator=pattern_generator)
    return TensorSamples(inputs, (inputs @ projections).argmax(1))


def _make_images(count: int, pattern_generator: Generator, sample_generator: Generator) -> TensorSamples:
    """Return `count` images of 3x32x32 pixels. All of a class show the same picture with different noise.

    `pattern_generator` generates the pictures, which are the same for all splits. `sample_generator`
    generates the samples.
    """
    labels = torch.randint(CLASSES, (count,), generator=sample_generator)
    pictures = torch.randn(CLASSES, 3, 32, 32, generator=pattern_generator)
    noise = torch.randn(count, 3, 32, 32, generator=sample_generator)
    return TensorSamples(pictures[labels] + noise, labels)


def _make_sequences(count: int, _pattern_generator: Generator, sample_generator: Generator) -> TensorSamples:
    """Return `count` sequences of bytes that count up, each with a random first byte and stride (1 to 8)."""
    first = torch.randint(VOCABULARY, (count, 1), generator=sample_generator)
    stride = torch.randint(1, 9, (count, 1), generator=sample_generator)
    rows = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return TensorSamples(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


class _BuiltInData(NamedTuple):
    """The generated data for a built-in model."""

    default_count: int
    generate: Callable[[int, Generator, Generator], TensorSamples]
    """Returns a number of samples. The two generators are those of the pattern and of the samples."""
    kind: str
    """Kind of data that the model reads: ``numbers``, ``images`` or ``text``."""


_BUILT_IN: Mapping[str, _BuiltInData] = {
    "linear": _BuiltInData(2048, _make_regression, "numbers"),
    "mlp": _BuiltInData(2048, _make_classes, "numbers"),
    "resnet18": _BuiltInData(2048, _make_images, "images"),
    "resnet50": _BuiltInData(2048, _make_images, "images"),
    "gpt": _BuiltInData(4096, _make_sequences, "text"),
}


def load_built_in(config: Config, split: str) -> TensorSamples | TextFile | ImageFolder:
    """Return the data of ``--data`` for a built-in model: generated data, a text file or an image folder.

    The split ``eval`` has the samples that are held out from training.

    Raises
    ------
    UsageError : the model cannot use this data.
    """
    if config.model not in _BUILT_IN:
        raise UsageError(
            f"there is no built-in data for {config.model}", hint="name your own: --data MOD:FN or file.py:FN"
        )
    built_in = _BUILT_IN[config.model]
    if config.data == "builtin":
        # The pattern to learn is the same for all splits, but the samples differ.
        pattern_generator = Generator().manual_seed(config.seed)
        sample_generator = Generator().manual_seed(seed_of(config.seed, split))
        return built_in.generate(
            config.samples or built_in.default_count, pattern_generator, sample_generator
        )
    path = Path(config.data)
    if path.is_dir():
        if built_in.kind != "images":
            raise _make_model_error(config, "images", "resnet18 or resnet50")
        return ImageFolder(path, split, config.image_size)
    if built_in.kind != "text" or not path.is_file():
        raise _make_model_error(config, "a text file", "gpt")
    return TextFile(path, split)


def _make_model_error(config: Config, data: str, models: str) -> UsageError:
    """Return the error for a model that cannot use a kind of data."""
    return UsageError(f"{config.model} cannot read {data}", where=config.data, hint=f"use --model {models}")


def count_classes(config: Config) -> int:
    """Return the number of classes in the data of a built-in model."""
    path = Path(config.data)
    if path.is_dir():
        return len(list_classes(path))
    return CLASSES


# Files with these endings are images. All other files are ignored.
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# Names of the folder for each split, of which the first that exists is used. Without a folder named train,
# all images are for training.
SPLITS = {"train": ("train",), "eval": ("val", "eval", "test")}
# Mean and standard deviation of ImageNet's channels, which published weights and learning rates assume.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# A training sample shows a random square of the image. This is its smallest size, as a share of the shorter
# side.
MIN_SHARE = 0.35


def find_split_folder(data: Path, split: str) -> Path:
    """Return the folder that contains the classes of a split, such as ``data/val`` for ``eval``.

    Raises
    ------
    UsageError : there is no folder for the split ``eval``.
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
    """Return the names of the classes, which are the subfolders. The number of a class is its position.

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
    """Samples that are images in a folder: the pixels with the shape (3, size, size), and the class's number.

    Training samples are cropped and mirrored at random. The random numbers come from torch, whose seed is set
    for each sample. So a sample depends only on the run's seed, the epoch and the index.
    """

    def __init__(self, data: Path, split: str, size: int) -> None:
        folder = find_split_folder(data, split)
        names = list_classes(data)
        self._size = size
        self._is_random = split == "train"
        self._files: list[tuple[Path, int]] = []
        for class_number, name in enumerate(names):
            paths = sorted((folder / name).rglob("*"))
            self._files += [(path, class_number) for path in paths if path.suffix.lower() in ENDINGS]
        if not self._files:
            raise UsageError(
                "the folder holds no images", where=str(folder), hint=f"files must end in {' '.join(ENDINGS)}"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pillow = importlib.import_module("PIL.Image")  # Pillow is only needed for images
        path, class_number = self._files[index]
        with pillow.open(path) as image_file:
            image = image_file.convert("RGB")
            box = self._choose_box(*image.size)
            image = image.resize((self._size, self._size), pillow.Resampling.BILINEAR, box=box)
        if self._is_random and torch.rand(()) < 0.5:
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        return _normalize(image), class_number

    def _choose_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the corners of the square to crop from an image.

        For training, the size and the position are random. Otherwise, it is the largest square in the middle.
        """
        size_share, x_share, y_share = 1.0, 0.5, 0.5
        if self._is_random:
            size_share, x_share, y_share = torch.rand(3).tolist()
        side = min(width, height) * (MIN_SHARE + (1 - MIN_SHARE) * size_share)
        left_edge = (width - side) * x_share
        top = (height - side) * y_share
        return left_edge, top, left_edge + side, top + side


def _normalize(image: Any) -> Tensor:
    """Convert an image to a tensor, in which the channels of ImageNet have the mean 0 and the deviation 1."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    channels_last = pixels.view(image.height, image.width, 3)
    colours = channels_last.permute(2, 0, 1).float() / 255
    mean = torch.tensor(MEAN)[:, None, None]
    deviation = torch.tensor(DEVIATION)[:, None, None]
    return (colours - mean) / deviation
