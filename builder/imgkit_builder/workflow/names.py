"""Interpret the argument IMAGE of a verb: a recipe, its file, an archive, or an image and its tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from imgkit_builder.base.suffixes import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_builder.recipe import targets
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_entrypoints.system import SystemFacts


def default_tag(recipe_name: str) -> str:
    """Return the default of ``--tag``: ``mn5`` -> ``mn5:latest``."""
    return f"{recipe_name}:latest"


def image_name(target: str) -> str:
    """Return the name of the engine's image that `target` stands for.

    The file of a recipe stands for the image that ``imgkit build`` makes of it: ``mine.yaml`` ->
    ``mine:latest``.
    """
    if not target.endswith(RECIPE_SUFFIXES):
        return target
    return default_tag(targets.load_target(target).name)


def name_stem(image: str) -> str:
    """Return the stem for the names of files that are made of `image`, such as the ``mn5`` of ``mn5.sif``.

    ``dir/mn5.tar.gz``, ``mn5.yaml`` and ``mn5:latest`` -> ``mn5``; ``host:5000/grp/mine:1`` -> ``mine-1``.
    """
    last_part = image.rstrip("/").rpartition("/")[2]
    for suffix in (*ARCHIVE_SUFFIXES, *RECIPE_SUFFIXES):
        if last_part.endswith(suffix):
            return last_part.removesuffix(suffix)
    # A digest after @ is left out. Only a tag other than latest tells images of one name apart.
    name_and_tag = last_part.partition("@")[0]
    name, _, tag = name_and_tag.partition(":")
    if tag in ("", "latest"):
        return name
    return f"{name}-{tag}"


def system_of(image: str) -> SystemFacts | None:
    """Return the system of the recipe `image`, or of the shipped recipe that has the image's name.

    ``mn5``, ``mn5:latest`` and ``registry/mn5:1`` stand for the recipe mn5. Return None if there is no such
    recipe.
    """
    if image.endswith(RECIPE_SUFFIXES):
        return targets.load_target(image).system
    last_part = image.rpartition("/")[2]
    name = last_part.partition(":")[0]
    if name not in recipe_names():
        return None
    return targets.load_target(name).system


def module_line(system: SystemFacts | None) -> str:
    """Return ``module load ...`` for the runtime of `system`, or "" if it needs no module."""
    if system is None:
        return ""
    return targets.module_line(system)
