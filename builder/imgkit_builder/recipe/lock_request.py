"""What a recipe asks of a lock, and where it asks for something else than the lock's recipe did."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imgkit_builder.recipe import requirements
from imgkit_builder.recipe.lock import LockedStep, LockRequest
from imgkit_builder.recipe.model import PipStep, Recipe, UvProject
from imgkit_builder.recipe.problems import KeyPath
from imgkit_builder.recipe.uv_lock import UV_LOCK
from imgkit_entrypoints import files, secret_patterns

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value of a recipe that its lock does not know."""

    path: KeyPath
    """The recipe's value, or the list that lacks one."""
    what: str


def of(recipe: Recipe, *, base: str | None = None) -> LockRequest:
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
