"""A recipe as one JSON text that needs no other recipe and names no folder of this machine: written and
read.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import lock_file, rules, targets
from imgkit_builder.recipe.model import Image, KeyPath, LockedStep, PipStep, Recipe
from imgkit_builder.recipe.problems import Position, key_text
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError


def to_json(recipe: Recipe) -> str:
    """Deterministic text, which `from_json` reads: a recipe with the same digest, without positions.

    The lines of requirements files are packages and options in it. Files that it names next to them, such as
    code and certificates, keep the paths that the recipe states. Passwords that it states are left out.

    Raises
    ------
    OSError : a requirements file cannot be read.
    """
    image = recipe.image
    asked = lock_file.request_of(recipe).pip
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
    content = json_text.parse(targets.described_json(dataclasses.replace(recipe, image=image)))
    content |= {"file": recipe.file.name, "values": [], "warnings": []}
    return json.dumps(_public(content), indent=2, sort_keys=True) + "\n"


def _public(value: Any, name: str = "") -> Any:
    """The value called `name` without secrets in its texts; everybody who has the image reads it."""
    if isinstance(value, dict):
        return {key: _public(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    # The name of a variable says that it holds a secret.
    return lock_file.public(f"{name}={value}").partition("=")[2] if isinstance(value, str) else value


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


def from_json(text: str, file: Path) -> Recipe:
    """Read the text of `to_json`, which `file` holds.

    Raises
    ------
    UsageError : as `targets.from_json`, or the image part holds a value that no recipe may have.
    """
    target = targets.from_json(text, file)
    try:
        data: dict[str, Any] = json_text.parse(text)
        part = data["image"]
        part["run"] = [{"command": one} if isinstance(one, str) else one for one in part["run"]]
        image: Image = json_text.read(Image, part, "image")
        sha256, description = str(data["sha256"]), str(data["description"])
        stated = {row["key"]: row for row in data["values"] if row["line"] is not None}
        source = Path(str(data["file"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"its image part cannot be read: {error}", where=str(file), hint=targets.HINT
        ) from error
    faults = [f"description: {what}" for what, _ in rules.printable(description.strip())]
    positions = dict(target.positions)
    for path, value in targets.values_of(image, ("image",)):
        found = (*rules.of_key(path), *(rules.of_text(path, str(value)) if value is not None else ()))
        faults += [f"{key_text(path)}: {what}" for what, _ in found]
        # A step that is one text has a row for itself, and none for its command.
        rows = (stated.get(key_text(path[:end])) for end in range(len(path), 1, -1))
        if row := next(filter(None, rows), None):
            place = Position(file=Path(row["file"]), line=row["line"], column=row["column"])
            for depth in range(len(path), 0, -1):
                positions.setdefault(path[:depth], place)
    if faults:
        raise targets.several(faults, file, targets.HINT)
    return Recipe(
        name=target.name,
        description=description,
        image=image,
        system=target.system,
        file=source if source.is_absolute() else file.absolute().with_name(source.name),
        sha256=sha256,
        positions=positions,
    )
