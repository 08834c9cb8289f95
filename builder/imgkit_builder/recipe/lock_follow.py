"""Attaches the lock next to a recipe to it, if that is the lock of this recipe, base and platform."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.recipe import lock_file, requirements
from imgkit_builder.recipe.model import (
    Lock,
    LockedPlatform,
    LockedStep,
    LockRequest,
    PipStep,
    Recipe,
    UvProject,
)
from imgkit_builder.recipe.problems import KeyPath, shown
from imgkit_builder.recipe.uv_lock import UV_LOCK
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

KEPT_SUFFIX = ".files"
"""Follows the name of a lock: the folder of the packages that ``imgkit lock --keep-files`` stores."""


def follow(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """`recipe` with the lock that lies next to it; unchanged where there is none.

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
        asked = request_of(recipe, base=base)
    except (OSError, ValueError) as error:
        what = f"a file of the recipe cannot be read: {error}"
        raise UsageError(what, where=recipe.where("image", "pip"), hint=f"restore it, or: {again}") from error
    stale = difference(asked, part.request)
    if stale:
        where = "--base" if base and stale.path == ("image", "base") else recipe.where(*stale.path)
        raise UsageError(f"the lock {file.name} is stale: {stale.what}", where=where, hint=again)
    kept = _kept(part, kept_folder(file))
    for wheel in part.pip:
        if wheel.kept and wheel.file not in kept:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shown(kept_folder(file))),
                hint=f"copy that folder to this machine too, or: {command(recipe)} --keep-files",
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
    """The folder of the packages that ``imgkit lock --keep-files`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def _kept(part: LockedPlatform, folder: Path) -> Mapping[str, Path]:
    names = (*(one.file for one in part.apt), *(one.file for one in part.pip))
    return {name: folder / name for name in names if (folder / name).is_file()}


def command(recipe: Recipe) -> str:
    """The command that makes the lock of `recipe`."""
    shipped = recipe.file.parent == FOLDER
    return f"imgkit lock {recipe.name if shipped else shlex.quote(str(shown(recipe.file)))}"


_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value of a recipe that its lock does not know."""

    path: KeyPath
    """The recipe's value, or the list that lacks one."""
    what: str


def request_of(recipe: Recipe, *, base: str | None = None) -> LockRequest:
    """What `recipe` asks for, on `base` (default: the recipe's).

    Raises
    ------
    OSError : a requirements file or a project's pyproject.toml cannot be read.
    ValueError : a project's pyproject.toml is not TOML.
    """
    image = recipe.image
    return LockRequest(
        base=base or image.base,
        apt=image.apt,
        constraints=(image.constraints.policy, *image.constraints.drop),
        uv=_uv(image.uv) if image.uv else "",
        pip=tuple(_step(one) for one in image.pip),
    )


def _uv(uv: UvProject) -> str:
    """The digest of what a lock takes from a uv project."""
    lock = uv.project / UV_LOCK
    # A recipe out of an image comes without the files that it names; its lock is whole without them.
    content = files.read_bytes(lock) if lock.is_file() else None
    words = "\0".join(("extras", *sorted(uv.extras), "groups", *sorted(uv.groups)))
    return _UNKNOWN if content is None else hashlib.sha256(content + words.encode()).hexdigest()


def options_of(step: PipStep) -> tuple[str, ...]:
    """The options of a pip step, then those that its requirements file states; URLs may hold credentials.

    Raises
    ------
    OSError : the requirements file cannot be read.
    """
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    return (*step.options, *(word for line in lines if line.startswith("-") for word in shlex.split(line)))


def _step(step: PipStep) -> LockedStep:
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    project = requirements.of_project(step.project) if step.project else ()
    stated = [line for line in lines if not line.startswith("-")]
    return LockedStep(
        requirements=_public((*step.packages, *stated, *project)),
        options=_public(options_of(step)),
        env=_public(f"{name}={value}" for name, value in sorted(step.env.items())),
    )


def _public(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(public, texts))


def public(text: str) -> str:
    """`text` without credentials in URLs, and with stars for other secrets: others read locks and images."""
    return secret_patterns.masked(re.sub(r"://[^/@\s]*@", "://", text))


def difference(now: LockRequest, locked: LockRequest) -> Difference | None:
    """The first value in which the request `now` of a recipe differs from the one that was `locked`."""
    if now.base != locked.base:
        return Difference(path=("image", "base"), what=f"the base is {now.base}, and was {locked.base}")
    if found := _of_list(now.apt, locked.apt, ("image", "apt"), "the apt packages"):
        return found
    if now.constraints != locked.constraints:
        words = (" ".join(one.constraints) for one in (now, locked))
        return Difference(path=("image", "constraints"), what="constraints: {}, and was {}".format(*words))
    if now.uv not in (locked.uv, _UNKNOWN):
        said = (
            "uv.lock, or the chosen extras and groups, have changed" if now.uv else "there is no uv project"
        )
        return Difference(path=("image", "uv"), what=said)
    for number, (new, old) in enumerate(zip(now.pip, locked.pip, strict=False)):
        path: KeyPath = ("image", "pip", number)
        found = (
            _of_list(new.requirements, old.requirements, (*path, "packages"), "the packages of this pip step")
            or _of_list(new.options, old.options, (*path, "options"), "the options of this pip step")
            or _of_list(new.env, old.env, (*path, "env"), "the variables of this pip step")
        )
        if found:
            return found
    if len(now.pip) != len(locked.pip):
        last = ("image", "pip", len(locked.pip)) if len(now.pip) > len(locked.pip) else ("image", "pip")
        return Difference(path=last, what=f"there are {len(now.pip)} pip steps, and were {len(locked.pip)}")
    return None


def _of_list(now: Sequence[str], locked: Sequence[str], path: KeyPath, what: str) -> Difference | None:
    if now == locked:
        return None
    added = next((number for number, one in enumerate(now) if one not in locked), None)
    if added is not None:
        return Difference(
            path=(*path, added), what=f"{what} have {now[added]!r}, which the lock does not know"
        )
    gone = next((one for one in locked if one not in now), None)
    if gone is not None:
        return Difference(path=path, what=f"{what} no longer have {gone!r}")
    return Difference(path=path, what=f"{what} have another order")
