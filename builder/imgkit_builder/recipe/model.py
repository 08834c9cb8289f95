"""What a recipe is: frozen values, checked by pydantic when they are built from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from imgkit_entrypoints.system import SystemFacts

_STRICT = ConfigDict(extra="forbid", strict=True)

Platform = Literal["linux/amd64", "linux/arm64"]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class PipStep:
    """One ``pip install``: `packages` or a `requirements` file, with `options` before them."""

    packages: tuple[str, ...] = ()
    requirements: Path | None = None
    """Absolute after loading."""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Constraints:
    """What becomes of the base's own pip constraint file (NGC's /etc/pip/constraint.txt).

    In YAML: ``keep``, ``ignore`` or ``{drop: [name, ...]}``.
    """

    policy: Literal["keep", "ignore", "drop"] = "keep"
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class CopyStep:
    """User code into the image."""

    source: Path
    """File or folder; absolute after loading, inside the recipe's folder."""
    target: str = "/workspace"
    """Absolute path in the image; a folder's content lands in it, a file lands in it under its name."""
    ignore: tuple[str, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `source`."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Image:
    """The image part of a recipe."""

    base: str
    platforms: tuple[Platform, ...] = ("linux/amd64",)
    """In YAML ``platform``: one or a list; the first that the host has is the default."""
    apt: tuple[str, ...] = ()
    pip: tuple[PipStep, ...] = ()
    constraints: Constraints = Constraints()
    env: Mapping[str, str] = field(default_factory=dict)
    copy: tuple[CopyStep, ...] = ()
    run: tuple[str, ...] = ()
    """Shell commands, each one layer, after pip and before imgkit's own files and `copy`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True))
class Position:
    """Where a value stands; `line` and `column` count from 1."""

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


KeyPath = tuple[str | int, ...]
"""Path of a resolved value, for example ``("image", "pip", 0, "packages", 2)``."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True))
class Recipe:
    """A recipe after ``extends`` was resolved and everything was checked."""

    name: str
    description: str = ""
    image: Image
    system: SystemFacts
    file: Path
    """The file that was asked for, absolute."""
    sha256: str
    """Of the resolved content (canonical JSON and requirements files), not of positions or comments."""
    positions: Mapping[KeyPath, Position]
    """Of every value that a file states; defaults have none."""

    def where(self, *path: str | int) -> str:
        """``file.yaml:12`` of the nearest stated value at or above `path`, for comments and messages."""
        while path and path not in self.positions:
            path = path[:-1]
        found = self.positions.get(path)
        return f"{found.file.name}:{found.line}" if found else self.file.name
