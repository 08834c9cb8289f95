"""A build and the lock beside its recipe: whether the build follows it, and the line that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from imgkit_builder.cli.build_options import BuildOptions
from imgkit_entrypoints.errors import CheckFailed

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.oci.manifest import BaseImage
    from imgkit_builder.recipe import Recipe


def followed(recipe: Recipe, platform: str, options: BuildOptions, report: Reporter) -> Recipe:
    """`recipe` with its lock, unless `options` say otherwise or there is none.

    Raises
    ------
    UsageError : as `lock_follow.follow` does.
    """
    from imgkit_builder.recipe import lock_follow

    if options.no_lock or recipe.lock:
        return recipe
    found = lock_follow.follow(recipe, platform=platform, base=options.base, required=options.locked)
    for note in notes(found):
        report.note(note)
    return found


def notes(recipe: Recipe) -> tuple[str, ...]:
    """The line that says which lock the build follows; none for a build without."""
    from imgkit_builder.recipe import lock_file
    from imgkit_builder.recipe.problems import shown

    if recipe.lock is None:
        return ()
    lock = recipe.lock
    what = f"{len(lock.apt)} apt and {len(lock.pip)} pip packages"
    kept = f", {len(recipe.kept)} of them kept here" if recipe.kept else ""
    return (f"locked: {shown(lock_file.beside(recipe))}, {what}{kept} (to ignore it: --no-lock)",)


def base_of(recipe: Recipe, options: BuildOptions) -> str | None:
    """The name of the base instead of the recipe's: the lock's digest, else ``--base``."""
    return recipe.lock.base.exact if recipe.lock and recipe.lock.base.digest else options.base


def check_base(recipe: Recipe, base: BaseImage) -> None:
    """Compare the base with the lock.

    Raises
    ------
    CheckFailed : it is another image.
    """
    if recipe.lock is None or not base.id or not recipe.lock.base.id or base.id == recipe.lock.base.id:
        return
    raise CheckFailed(
        f"the base {base.name} is {base.id}, and the lock has {recipe.lock.base.id}",
        where=recipe.where("image", "base"),
        hint="bring back the image that was locked, or lock the new one: imgkit lock; to build without the "
        "lock: --no-lock",
    )
