"""Interpret the argument IMAGE of a verb: a recipe, its file, an archive, or the name of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from imgkit_builder.base.suffixes import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_builder.recipe import targets
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_entrypoints.system import SystemFacts


def default_tag(recipe_name: str) -> str:
    """Return the tag that a build gives its image by default: ``mn5`` -> ``mn5:latest``."""
    return f"{recipe_name}:latest"


def image_name(target: str) -> str:
    """Return the name of the image in the engine that the argument `target` stands for.

    The file of a recipe stands for the image that ``imgkit build`` makes from it: ``mine.yaml`` ->
    ``mine:latest``.
    """
    if not target.endswith(RECIPE_SUFFIXES):
        return target
    return default_tag(targets.load_target(target).name)


def name_stem(image: str) -> str:
    """Return the stem for names of files that are made from `image`, such as ``mn5`` for ``mn5.sif``.

    ``dir/mn5.tar.gz``, ``mn5.yaml`` and ``mn5:latest`` -> ``mn5``; ``host:5000/grp/mine:1`` -> ``mine-1``.
    """
    last_part = image.rstrip("/").rpartition("/")[2]
    for suffix in (*ARCHIVE_SUFFIXES, *RECIPE_SUFFIXES):
        if last_part.endswith(suffix):
            return last_part.removesuffix(suffix)
    # A digest after "@" is left out. The tag "latest" is left out as well, since it is the default.
    name_and_tag = last_part.partition("@")[0]
    name, _, tag = name_and_tag.partition(":")
    if tag in ("", "latest"):
        return name
    return f"{name}-{tag}"


def system_of(image: str) -> SystemFacts | None:
    """Return the system of the recipe `image`, or None if there is no such recipe.

    The name of an image stands for the shipped recipe with the same name: ``mn5``, ``mn5:latest`` and
    ``registry/mn5:1`` stand for the recipe mn5.
    """
    if image.endswith(RECIPE_SUFFIXES):
        return targets.load_target(image).system
    last_part = image.rpartition("/")[2]
    name = last_part.partition(":")[0]
    if name not in recipe_names():
        return None
    return targets.load_target(name).system


def module_line(system: SystemFacts | None) -> str:
    """Return the line ``module load ...`` for the runtime of `system`, or "" if it needs no module."""
    if system is None:
        return ""
    return targets.module_line(system)
