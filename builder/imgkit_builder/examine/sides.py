"""What a recipe, a lock or an open image tells to a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from imgkit_builder.delta import opened
from imgkit_builder.delta.opened import OpenedImage
from imgkit_builder.examine.differences import ComparedSide
from imgkit_builder.inventory.lock_entries import pypi_key

if TYPE_CHECKING:
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.recipe.lock import LockedPlatform

ANY = "*"
"""Stands for the version of a package that a recipe names without one."""


def of_image(image: OpenedImage) -> ComparedSide:
    """What an open image tells: everything."""
    listed = opened.inventory(image)
    found = ((one.kind, one.name, one.version) for one in listed.packages)
    return ComparedSide(
        name=image.name,
        kind="image",
        base=listed.base,
        base_digest=listed.base_digest,
        packages=_by_name(found),
        env=dict(image.env),
        image=image,
    )


def of_lock(name: str, part: LockedPlatform) -> ComparedSide:
    """What one platform of a lock tells: base and packages."""
    found = (
        *(("deb", one.name, one.version) for one in part.apt),
        *(("pypi", one.name, one.version) for one in part.pip),
    )
    return ComparedSide(
        name=f"{name} ({part.platform})",
        kind="lock",
        base=part.base.name,
        base_digest=part.base.digest or part.base.id,
        packages=_by_name(found),
        env=None,
    )


def of_recipe(name: str, recipe: Recipe) -> ComparedSide:
    """What a recipe tells: the packages that it asks for, and the variables that it sets.

    Raises
    ------
    OSError : a requirements file cannot be read.
    """
    from imgkit_builder.recipe import lock_request

    request = lock_request.of(recipe)
    asked = (_of_pip(one) for step in request.pip for one in step.requirements)
    found = (*map(_of_apt, request.apt), *(one for one in asked if one))
    return ComparedSide(
        name=name,
        kind="recipe",
        base=request.base,
        packages=_by_name(found),
        env=dict(recipe.image.env),
    )


def _of_apt(text: str) -> tuple[str, str, str]:
    name, equals, version = text.partition("=")
    return "deb", name.partition(":")[0].partition("/")[0], version if equals else ANY


def _of_pip(text: str) -> tuple[str, str, str] | None:
    """Name and wanted versions; None for a file or URL without a name."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except InvalidRequirement:
        return None
    return "pypi", found.name, str(found.specifier) or ANY


def _by_name(found: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], str]:
    """Versions by kind and name; a package that is there in several has them all."""
    versions: dict[tuple[str, str], set[str]] = {}
    for kind, name, version in found:
        key = name if kind == "deb" else pypi_key(name, version)[1]
        versions.setdefault((kind, key), set()).add(version)
    return {key: ", ".join(sorted(each)) for key, each in versions.items()}
