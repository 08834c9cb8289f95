"""The build context that asks a base: a recipe's apt and pip steps, each as a question."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder import __version__
from imgkit_builder.image import context, install, layers, members, render
from imgkit_builder.image.context import BuildContext
from imgkit_builder.image.instructions import INSIDE, NEXT
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe import lock_follow
from imgkit_builder.recipe.model import LockedPlatform, LockRequest, Recipe
from imgkit_builder.recipe.requirements import canonical
from imgkit_entrypoints import files
from imgkit_recipes import FOLDER

PLACE = f"{INSIDE}/lock"
"""The folder of the questions and answers in the base."""
OUT = f"{PLACE}/out"
APT_JSON, UV_JSON, FAILED_JSON = "apt.json", "uv.json", "failed.json"
_MEMBER = "imgkit/lock"
_SCRIPTS = ("inside_apt.py", "inside_pip.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a lock should be like, beside what the recipe says."""

    keep: bool = False
    """Whether the files are stored too, and wheels are built where there are none."""
    upgrade: bool = False
    packages: tuple[str, ...] = ()
    """The only packages that `upgrade` is about; empty for all."""


def report_member(number: int) -> str:
    """Name of the report of pip step `number` (from 0) in `OUT`."""
    return f"pip-{number}.json"


def pack(
    recipe: Recipe,
    request: LockRequest,
    base: BaseImage,
    *,
    old: LockedPlatform | None,
    wishes: Wishes,
    kept: Mapping[str, Path],
) -> BuildContext:
    """The context whose build leaves the answers in `OUT`.

    Parameters
    ----------
    old : the lock that there is: its versions stay unless `wishes` upgrades them.
    kept : the files of wheels that were built for `old`.

    Raises
    ------
    UsageError : a value of the recipe does not fit on one line, or a file cannot be read.
    """
    made = layers.layers(recipe, base=base.name, platform=base.platform)
    packages = "".join(f"{NEXT}    {shlex.quote(one)}" for one in recipe.image.apt)
    made = dataclasses.replace(
        made,
        uv=install.uv_question(recipe, f"{OUT}/{UV_JSON}", keep=f"{OUT}/files" if wishes.keep else ""),
        apt=made.apt and dataclasses.replace(made.apt, text=f"python3 {PLACE}/{_SCRIPTS[0]}{packages}"),
        pip=tuple(
            install.pip_command(recipe, number, step, pip=f"python3 {PLACE}/{_SCRIPTS[1]} {number}")
            for number, step in enumerate(recipe.image.pip)
        ),
    )
    packed = [
        members.folder("imgkit"),
        members.folder(_MEMBER),
        members.file(f"{_MEMBER}/order.json", _order(recipe, request, old, wishes, bool(kept)).encode()),
        *(members.file(f"{_MEMBER}/{name}", _script(name)) for name in _SCRIPTS),
        *context.certificates(recipe),
        *context.requirements_files(recipe),
        *(members.file(name, data) for name, data in install.uv_files(recipe)),
    ]
    if kept:
        packed.append(members.folder(f"{_MEMBER}/kept"))
        packed += [
            members.file(f"{_MEMBER}/kept/{name}", files.read_bytes(file, most_bytes=file.stat().st_size))
            for name, file in kept.items()
        ]
    if recipe.image.used_secrets:
        script = (FOLDER / "templates/with-secrets.sh").read_bytes()
        packed.append(members.file(install.WITH_SECRETS, script))
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=base,
        platform=base.platform,
        wheel_sha256="",
    )
    return context.sealed(packed, render.resolver(made, folder=PLACE), manifest)


def _order(
    recipe: Recipe, request: LockRequest, old: LockedPlatform | None, wishes: Wishes, has_kept: bool
) -> str:
    """What the scripts read."""
    wanted = {canonical(name) for name in wishes.packages}

    def stays(name: str) -> bool:
        return not wishes.upgrade or (bool(wanted) and canonical(name) not in wanted)

    return json.dumps(
        {
            "keep": wishes.keep,
            "kept": has_kept,
            "has_pip": bool(request.pip),
            "debs": [(one.name, one.version) for one in old.apt if stays(one.name)] if old else [],
            # The same package in two steps may have two versions: the pins of each step are its own.
            "wheels": [
                {
                    canonical(one.name): one.version
                    for one in old.pip
                    if one.step == number and stays(one.name)
                }
                if old
                else {}
                for number in range(len(request.pip))
            ],
            "steps": [
                {"packages": one.requirements, "options": lock_follow.options_of(step)}
                for one, step in zip(request.pip, recipe.image.pip, strict=True)
            ],
        }
    )


def _script(name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath(name).read_bytes()
