"""A folder of images with one subfolder per class, as in ImageNet; Pillow reads the images."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints.errors import UsageError

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SPLITS = {"train": ("train",), "eval": ("val", "eval", "test")}
"""Folders of each split; the first that exists counts. Without a train folder, all are for training."""
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, which published weights and learning rates assume."""
LEAST_SHARE = 0.35
"""Least share of the image's shorter side that a training sample shows."""


def folder_of(data: Path, split: str) -> Path:
    """Return the folder with the classes of `split`.

    Raises
    ------
    UsageError : no images are held out.
    """
    found = next((data / name for name in SPLITS[split] if (data / name).is_dir()), None)
    if found is None and split == "eval":
        raise UsageError(
            "no images are held out",
            where=str(data),
            hint=f"put the classes into {data}/train and {data}/val, or leave --eval-every out",
        )
    return found or data


def classes_of(data: Path) -> list[str]:
    """Return the names of the classes in the order of their numbers.

    Raises
    ------
    UsageError : there are fewer than two classes.
    """
    folder = folder_of(data, "train")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(found) < 2:
        raise UsageError(
            f"{len(found)} classes, expected two or more",
            where=str(folder),
            hint="put the images of each class into a subfolder of its own",
        )
    return found


class ImageFolder:
    """One sample per file: pixels (3, size, size), and the number of the class.

    Training samples are cropped and mirrored at random. torch draws the numbers, so each sample depends only
    on seed, epoch and index.
    """

    def __init__(self, data: Path, split: str, size: int) -> None:
        folder, names = folder_of(data, split), classes_of(data)
        self.size, self.by_chance = size, split == "train"
        self.files = [
            (path, number)
            for number, name in enumerate(names)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not self.files:
            raise UsageError(
                "the folder holds no images", where=str(folder), hint=f"files must end in {' '.join(ENDINGS)}"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        reader = importlib.import_module("PIL.Image")
        path, number = self.files[index]
        with reader.open(path) as opened:
            image = opened.convert("RGB")
            box = self._box(*image.size)
            image = image.resize((self.size, self.size), reader.Resampling.BILINEAR, box=box)
        if self.by_chance and torch.rand(()) < 0.5:
            image = image.transpose(reader.Transpose.FLIP_LEFT_RIGHT)
        return _tensor(image), number

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The square to crop: a random one in training, else the largest in the middle."""
        share, across, down = torch.rand(3).tolist() if self.by_chance else (1.0, 0.5, 0.5)
        side = min(width, height) * (LEAST_SHARE + (1 - LEAST_SHARE) * share)
        left, top = (width - side) * across, (height - side) * down
        return left, top, left + side, top + side


def _tensor(image: Any) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    colours = pixels.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
    mean, spread = (torch.tensor(values)[:, None, None] for values in (MEAN, SPREAD))
    return (colours - mean) / spread
