"""What one word on the command line means: a recipe, its file, an archive, or an image and its tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from imgkit_builder.engine import default_tag
from imgkit_builder.recipe import targets
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_entrypoints.system import SystemFacts

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
RECIPE_SUFFIXES = (".yaml", ".yml")


def image_name(target: str) -> str:
    """The image called `target`; a recipe's file stands for the image that imgkit build makes of it."""
    if not target.endswith(RECIPE_SUFFIXES):
        return target

    return default_tag(targets.load_target(target))


def name_stem(image: str) -> str:
    """``mn5`` of ``dir/mn5.tar.gz``, ``mn5.yaml``, ``mn5:latest``; ``mine-1`` of ``host:5000/grp/mine:1``."""
    last = image.rstrip("/").rpartition("/")[2]
    for suffix in (*ARCHIVE_SUFFIXES, *RECIPE_SUFFIXES):
        if last.endswith(suffix):
            return last.removesuffix(suffix)
    name, _, version = last.partition("@")[0].partition(":")
    return name if version in ("", "latest") else f"{name}-{version}"


def system_of(image: str) -> SystemFacts | None:
    """The system of the recipe `image`, or of the shipped recipe with the image's name."""
    if image.endswith(RECIPE_SUFFIXES):
        return targets.load_target(image).system
    name = image.rpartition("/")[2].partition(":")[0]
    return targets.load_target(name).system if name in recipe_names() else None


def module_line(system: SystemFacts | None) -> str | None:
    """``module load ...`` of the system's runtime; None if it needs no module."""
    return (targets.module_line(system) or None) if system else None
