"""A recipe as one JSON text that needs no other recipe and names no folder of this machine: written and
read.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.resources
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import lock_file, rules, targets
from imgkit_builder.recipe.model import Document, Image, KeyPath, LockedStep, PipStep, Recipe
from imgkit_builder.recipe.problems import Position, key_text
from imgkit_builder.recipe.validation import validate
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError


def to_json(recipe: Recipe) -> str:
    """Deterministic text, which `whole.from_json` reads: a recipe with the same digest, without positions.

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
        image: Image = json_text.read(Image, _long_form(data["image"]), "image")
        sha256, description = str(data["sha256"]), str(data["description"])
        stated = {row["key"]: row for row in data["values"] if row["line"] is not None}
        source = Path(str(data["file"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"its image part cannot be read: {error}", where=str(file), hint=targets.HINT
        ) from error
    faults = [f"description: {what}" for what, _ in rules.printable(description.strip())]
    _, mistakes = validate(Document, {"image": _as_in_yaml(image)})
    faults += [f"{key_text(mistake.path)}: {mistake.message}" for mistake in mistakes]
    positions = dict(target.positions)
    for path, value in targets.values_of(image, ("image",)):
        if isinstance(value, str) and len(path) > 2 and path[-2] in ("env", "args"):
            for what, _ in rules.variable(str(path[-1]), value, has_earlier_value=path[1] != "args"):
                faults.append(f"{key_text(path)}: {what}")
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


def _long_form(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "run": [{"command": one} if isinstance(one, str) else one for one in part["run"]]}


def _as_in_yaml(image: Image) -> dict[str, Any]:
    """The values of `image` in the form of a recipe's file."""
    part = targets.stated(image)
    policy, drop = image.constraints.policy, image.constraints.drop
    return {
        **{key: value for key, value in part.items() if key != "platforms"},
        "platform": image.platforms,
        "constraints": {"drop": drop} if policy == "drop" else policy,
        **{key: _texts(part[key]) for key in ("ca", "uv", "secrets", "pip", "copy") if key in part},
    }


def _texts(value: Any) -> Any:
    """`value` with paths as texts."""
    if isinstance(value, dict):
        return {key: _texts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(one) for one in value]
    return str(value) if isinstance(value, Path) else value


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
