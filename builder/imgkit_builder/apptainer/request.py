"""What a build without an engine gets, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.checks import Check
from imgkit_builder.image.instructions import Definition
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif.conversion import Options, Stage
from imgkit_builder.sif.image import ImgkitRecord

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

Pack = Callable[[BaseImage], "BuildContext"]
"""Makes the build context for a base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifRequest:
    """What to build from, and where to."""

    recipe: Recipe
    target: Path
    options: Options
    base: str | None = None
    """Name of the base instead of the recipe's."""
    base_from: str | None = None
    """A file, an OCI folder, or ``registry``, which is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSif:
    """A whole and tested .sif."""

    path: Path
    size_bytes: int
    arch: str
    base: BaseImage
    record: ImgkitRecord
    labels: Mapping[str, str]
    checks: tuple[Check, ...]
    up_to_date: bool
    stages: tuple[Stage, ...] = ()
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What one build runs."""

    context: BuildContext
    definition: Definition
    labels: Mapping[str, str]
    """Those that only a build knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would run."""

    context: BuildContext
    definition: str
    base: BaseImage
    command: str
