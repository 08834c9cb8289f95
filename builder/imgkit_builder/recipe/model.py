"""What a recipe is: frozen values, standard library only; pydantic checks them when they come from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from imgkit_builder.recipe.problems import KeyPath, Position, Problem
from imgkit_entrypoints.system import SystemFacts

__all__ = ["Constraints", "CopyStep", "Image", "KeyPath", "PipStep", "Platform", "Position", "Recipe"]

STRICT: Mapping[str, Any] = {"extra": "forbid", "strict": True}
"""Read by pydantic only: unknown keys are errors, and no value is converted."""

Platform = Literal["linux/amd64", "linux/arm64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipStep:
    """One ``pip install``: `packages` or a `requirements` file, with `options` before them."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    packages: tuple[str, ...] = ()
    """Requirements as pip writes them: ``numpy``, ``deepspeed==0.13.1``."""
    requirements: Path | None = None
    """A requirements file, relative to the recipe's file; absolute after loading."""
    options: tuple[str, ...] = ()
    """Options of this ``pip install``, one word each: ``--no-build-isolation``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What becomes of the base's own pip constraint file (NGC's /etc/pip/constraint.txt).

    In YAML: ``keep``, ``ignore`` or ``{drop: [name, ...]}``.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    policy: Literal["keep", "ignore", "drop"] = "keep"
    drop: tuple[str, ...] = ()
    """Packages that the base no longer holds at its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """User code into the image."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    source: Path
    """File or folder relative to the recipe's file, inside its folder; absolute after loading."""
    target: str = "/workspace"
    """Absolute path in the image; a folder's content lands in it, a file lands in it under its name."""
    ignore: tuple[str, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `source`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image part of a recipe."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    base: str
    """The image to start from, with tag or digest."""
    platforms: tuple[Platform, ...] = ("linux/amd64",)
    """In YAML ``platform``: one or a list; the first that the host has is the default."""
    apt: tuple[str, ...] = ()
    """Debian packages: ``git``, ``git=1:2.39.2-1``."""
    pip: tuple[PipStep, ...] = ()
    """``pip install`` steps, in this order."""
    constraints: Constraints = Constraints()
    """What becomes of the base's own pip constraint file; its torch and NCCL are protected in any case."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables baked into the image; network and thread tuning goes to ``system.env``."""
    copy: tuple[CopyStep, ...] = ()
    """User code into the image, as its last layers."""
    run: tuple[str, ...] = ()
    """Shell commands, each one layer, after pip and before imgkit's own files and `copy`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the image, beside those that imgkit writes."""
    workdir: str = "/workspace"
    """Where commands start; absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    warnings: tuple[Problem, ...] = ()
    """What does not stop a build but should be looked at, for example a secret in ``env``."""

    def where(self, *path: str | int) -> str:
        """``file.yaml:12`` of the nearest stated value at or above `path`, for comments and messages."""
        while path and path not in self.positions:
            path = path[:-1]
        found = self.positions.get(path)
        return f"{found.file.name}:{found.line}" if found else self.file.name
