"""A folder of images with a subfolder for each class, as ImageNet is laid out; read by Pillow."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints.errors import UsageError

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SPLITS = {"train": ("train",), "eval": ("val", "eval", "test")}
"""Folders that hold a split, the first that is there; without one of the first kind, all is for training."""
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's channels: what published weights and learning rates go with."""
LEAST_SHARE = 0.35
"""Of the image's shorter side that a training sample shows."""


def folder_of(data: Path, split: str) -> Path:
    """Where the classes of `split` are.

    Raises
    ------
    UsageError : nothing is held out.
    """
    found = next((data / name for name in SPLITS[split] if (data / name).is_dir()), None)
    if found is None and split == "eval":
        raise UsageError(
            "no images are held out",
            where=str(data),
            hint=f"classes in {data}/train and {data}/val, or no --eval-every",
        )
    return found or data


def classes_of(data: Path) -> list[str]:
    """Names of the classes, in the order of their numbers.

    Raises
    ------
    UsageError : there are not two.
    """
    folder = folder_of(data, "train")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(found) < 2:
        raise UsageError(f"{len(found)} classes", where=str(folder), hint="a subfolder of images for each")
    return found


class ImageFolder:
    """One sample a file: (3, size, size), and the number of its class.

    Training samples are cut out and mirrored by chance; `torch` draws, so each follows from seed, epoch and
    index alone.
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
                "no images are there", where=str(folder), hint=f"files ending {' '.join(ENDINGS)}"
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
        """The square that is shown: one somewhere, or the largest in the middle."""
        share, across, down = torch.rand(3).tolist() if self.by_chance else (1.0, 0.5, 0.5)
        side = min(width, height) * (LEAST_SHARE + (1 - LEAST_SHARE) * share)
        left, top = (width - side) * across, (height - side) * down
        return left, top, left + side, top + side


def _tensor(image: Any) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    colours = pixels.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
    mean, spread = (torch.tensor(values)[:, None, None] for values in (MEAN, SPREAD))
    return (colours - mean) / spread
