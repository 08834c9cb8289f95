"""Attaches the lock beside a recipe to it, if that is the lock of this recipe, base and platform."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder.recipe import lock_file, lock_request
from imgkit_builder.recipe.lock import Lock, LockedPlatform
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.recipe.problems import shown
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

KEPT_SUFFIX = ".files"
"""Follows the name of a lock: the folder of the packages that ``imgkit lock --keep`` stores."""


def follow(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """`recipe` with the lock that lies beside it; unchanged where there is none.

    Parameters
    ----------
    base : the base instead of the recipe's.
    required : whether a missing lock is an error.

    Raises
    ------
    UsageError : the lock cannot be read, belongs to another recipe, lacks the platform or a kept file, or is
        stale: then it names the recipe's line that the lock does not know.
    """
    file = lock_file.beside(recipe)
    if not file.exists():
        if required:
            raise UsageError(
                f"{recipe.name} has no lock", where=str(shown(file)), hint=f"make it: {command(recipe)}"
            )
        # A lock that appears later changes what a build makes.
        return dataclasses.replace(recipe, sources={**recipe.sources, file: ""})
    lock = lock_file.read(file)
    return attached(recipe, lock, file, platform=platform, base=base)


def attached(recipe: Recipe, lock: Lock, file: Path, *, platform: str, base: str | None = None) -> Recipe:
    """`recipe` with the part of `lock`, which `file` holds, for `platform`. Raises as `follow` does."""
    again = f"{command(recipe)}; to ignore the lock: --no-lock"
    place = str(shown(file))
    if lock.recipe != recipe.name:
        what = f"it is the lock of the recipe {lock.recipe!r}, and not of {recipe.name!r}"
        raise UsageError(what, where=place, hint=f"rename or remove it, or: {again}")
    part = lock.of(platform)
    if part is None:
        has = ", ".join(one.platform for one in lock.platforms) or "none"
        hint = f"{command(recipe)} --platform {platform}; to ignore the lock: --no-lock"
        raise UsageError(f"the lock is not for {platform}; it has: {has}", where=place, hint=hint)
    try:
        asked = lock_request.of(recipe, base=base)
    except (OSError, ValueError) as error:
        what = f"a file of the recipe cannot be read: {error}"
        raise UsageError(
            what, where=recipe.where("image", "pip"), hint=f"bring it back, or: {again}"
        ) from error
    stale = lock_request.difference(asked, part.request)
    if stale:
        where = "--base" if base and stale.path == ("image", "base") else recipe.where(*stale.path)
        raise UsageError(f"the lock {file.name} is stale: {stale.what}", where=where, hint=again)
    kept = _kept(part, kept_folder(file))
    for wheel in part.pip:
        if wheel.kept and wheel.file not in kept:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shown(kept_folder(file))),
                hint=f"copy that folder to this machine too, or: {command(recipe)} --keep",
            )
    digest = hashlib.sha256(files.read_bytes(file)).hexdigest() if file.is_file() else ""
    return dataclasses.replace(
        recipe,
        lock=part,
        lock_text=lock_file.section(lock, part),
        kept=kept,
        sources={**recipe.sources, file: digest},
    )


def kept_folder(file: Path) -> Path:
    """The folder of the packages that ``imgkit lock --keep`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def _kept(part: LockedPlatform, folder: Path) -> Mapping[str, Path]:
    names = (*(one.file for one in part.apt), *(one.file for one in part.pip))
    return {name: folder / name for name in names if (folder / name).is_file()}


def command(recipe: Recipe) -> str:
    """The command that makes the lock of `recipe`."""
    shipped = recipe.file.parent == FOLDER
    return f"imgkit lock {recipe.name if shipped else shlex.quote(str(shown(recipe.file)))}"
