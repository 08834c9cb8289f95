"""Read a recipe as one JSON text, which needs no other recipe."""

from __future__ import annotations

import atexit
import dataclasses
import importlib.resources
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import rules, targets
from imgkit_builder.recipe.model import Image, Recipe
from imgkit_builder.recipe.problems import Position, key_text
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError


def find(ref: str, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load the recipe `ref`: a shipped name, a JSON file or, outside the single-file imgkit, a recipe's file.

    Raises
    ------
    UsageError : there is no such recipe, it has problems, or the single-file imgkit cannot read it.
    """
    text = targets.as_json(ref)
    if text is not None:
        if build_args:
            raise UsageError(
                "a recipe as JSON has its values already",
                where="--build-arg",
                hint="leave it out, or build from the recipe's YAML file",
            )
        return from_json(text, Path(ref))
    from imgkit_builder.recipe.load import load

    return load(ref, build_args=build_args)


def from_json(text: str, file: Path) -> Recipe:
    """Read the text of ``imgkit show RECIPE --json``, which `file` holds.

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
        image=_with_own_files(image),
        system=target.system,
        file=source if source.is_absolute() else file.absolute().with_name(source.name),
        sha256=sha256,
        positions=positions,
    )


def _with_own_files(image: Image) -> Image:
    """`image` with the requirements files of a shipped recipe, which lie inside the single-file imgkit."""
    shipped = [
        step.requirements for step in image.pip if step.requirements and not step.requirements.is_absolute()
    ]
    if not shipped:
        return image
    folder = Path(tempfile.mkdtemp(prefix="imgkit-recipe-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in shipped:
        (folder / name.name).write_bytes(
            importlib.resources.files("imgkit_recipes").joinpath(name.name).read_bytes()
        )
    return dataclasses.replace(
        image,
        pip=tuple(
            dataclasses.replace(step, requirements=folder / step.requirements.name)
            if step.requirements in shipped and step.requirements
            else step
            for step in image.pip
        ),
    )
