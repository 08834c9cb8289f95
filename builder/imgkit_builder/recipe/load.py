"""From a recipe's name or file to a checked `Recipe`, or to everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder.recipe import systems
from imgkit_builder.recipe.check import check, check_system, normalise, walk
from imgkit_builder.recipe.extends import locate, resolve
from imgkit_builder.recipe.model import Image, Recipe
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, Problem, RecipeErrors
from imgkit_builder.recipe.typecheck import Document, typecheck

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


def load(ref: str | Path) -> Recipe:
    """The recipe `ref`: a shipped name, or a path (it holds ``/``, or ends in ``.yaml`` or ``.yml``).

    Raises
    ------
    RecipeErrors : the recipe is wrong; holds every problem of it and of what it extends.
    UsageError : there is no such recipe.
    """
    file = locate(str(ref.absolute()) if isinstance(ref, Path) else ref, Path.cwd())
    found = Collector()
    _check_name(file, found)
    resolved = resolve(file, found)
    if resolved.tree is None:
        raise RecipeErrors(found.errors)
    tree = normalise(resolved.tree, found)
    document = typecheck(tree, check(tree, found), found, whole=resolved.whole)
    if document is not None and systems.is_known(document.system.scheduler):
        check_system(document.system, tree, found)
    if document is None or found.errors:
        raise RecipeErrors(sorted(found.errors, key=lambda problem: _order(problem, file)))
    positions = {path: node.position for path, node, _ in walk(tree)}
    image = _absolute(document.image, positions)
    description = document.description.strip()
    return Recipe(
        name=file.stem,
        description=description,
        image=image,
        system=document.system,
        file=file,
        sha256=_sha256(file.stem, dataclasses.replace(document, description=description), image),
        positions=positions,
        warnings=tuple(found.warnings),
    )


def _check_name(file: Path, found: Collector) -> None:
    """The file's name is the recipe's, and becomes an image's tag and a .sif's name."""
    if not _NAME.fullmatch(file.stem):
        better = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-") or "recipe"
        what = f"the name {file.stem!r} cannot become an image's name"
        found.error(Position(file=file, line=1, column=1), (), what, f"rename the file to {better}.yaml")


def _order(problem: Problem, asked: Path) -> tuple[bool, str, int, int]:
    """The file that was asked for first, each file from top to bottom."""
    place = problem.position
    return place.file != asked, str(place.file), place.line, place.column


def _absolute(image: Image, positions: Mapping[KeyPath, Position]) -> Image:
    """`image` with its paths taken from the folder of the file that states each."""

    def place(path: Path, *where: str | int) -> Path:
        return positions[where].file.parent / path

    pip = tuple(
        dataclasses.replace(
            step, requirements=place(step.requirements, "image", "pip", index, "requirements")
        )
        if step.requirements is not None
        else step
        for index, step in enumerate(image.pip)
    )
    copy = tuple(
        dataclasses.replace(step, source=place(step.source, "image", "copy", index, "source"))
        for index, step in enumerate(image.copy)
    )
    return dataclasses.replace(image, pip=pip, copy=copy)


def _sha256(name: str, document: Document, image: Image) -> str:
    """Of what the recipe says: paths as they are written, and the requirements files' contents."""
    content = {"name": name, **dataclasses.asdict(document)}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    for step in image.pip:
        if step.requirements is not None:
            digest.update(hashlib.sha256(step.requirements.read_bytes()).digest())
    return digest.hexdigest()
