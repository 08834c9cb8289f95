"""A recipe as one JSON text that needs no other recipe and names no folder of this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import describe, lock_request
from imgkit_builder.recipe.lock import LockedStep
from imgkit_builder.recipe.model import KeyPath, PipStep, Recipe
from imgkit_entrypoints import json_text


def to_json(recipe: Recipe) -> str:
    """Deterministic text, which `whole.from_json` reads: a recipe with the same digest, without positions.

    The lines of requirements files are packages and options in it. Files that it names beside them, such as
    code and certificates, keep the paths that the recipe states. Passwords that it states are left out.

    Raises
    ------
    OSError : a requirements file cannot be read.
    """
    image = recipe.image
    asked = lock_request.of(recipe).pip
    image = dataclasses.replace(
        image,
        ca=tuple(_stated(recipe, file, "image", "ca", number) for number, file in enumerate(image.ca)),
        secrets=tuple(
            dataclasses.replace(
                one, file=one.file and _stated(recipe, one.file, "image", "secrets", number, "file")
            )
            for number, one in enumerate(image.secrets)
        ),
        uv=image.uv
        and dataclasses.replace(
            image.uv, project=_stated(recipe, image.uv.project, "image", "uv", "project")
        ),
        pip=tuple(_step(recipe, number, one, asked[number]) for number, one in enumerate(image.pip)),
        copy=tuple(
            dataclasses.replace(one, source=_stated(recipe, one.source, "image", "copy", number, "source"))
            for number, one in enumerate(image.copy)
        ),
    )
    content = json_text.parse(describe.to_json(dataclasses.replace(recipe, image=image)))
    content |= {"file": recipe.file.name, "values": [], "warnings": []}
    return json.dumps(_public(content), indent=2, sort_keys=True) + "\n"


def _public(value: Any, name: str = "") -> Any:
    """The value called `name` without secrets in its texts; everybody who has the image reads it."""
    if isinstance(value, dict):
        return {key: _public(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    # The name of a variable says that it holds a secret.
    return lock_request.public(f"{name}={value}").partition("=")[2] if isinstance(value, str) else value


def _step(recipe: Recipe, number: int, step: PipStep, asked: LockedStep) -> PipStep:
    if step.requirements is not None:
        return dataclasses.replace(
            step, requirements=None, packages=asked.requirements, options=asked.options
        )
    if step.project is not None:
        place: KeyPath = ("image", "pip", number, "project")
        return dataclasses.replace(step, project=_stated(recipe, step.project, *place))
    return step


def _stated(recipe: Recipe, path: Path, *where: str | int) -> Path:
    """`path` as a recipe below any folder could state it."""
    position = recipe.positions.get(where)
    folder = position.file.parent if position else recipe.file.parent
    return path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
