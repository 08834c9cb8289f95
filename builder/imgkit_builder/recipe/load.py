"""Loads a recipe by name or file; reports all its problems at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder.recipe import rules, systems
from imgkit_builder.recipe.check import check, check_system, normalise, walk
from imgkit_builder.recipe.extends import locate, resolve
from imgkit_builder.recipe.model import Image, PipStep, Recipe
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, Problem, RecipeErrors
from imgkit_builder.recipe.requirements import PYPROJECT
from imgkit_builder.recipe.typecheck import Document, typecheck
from imgkit_builder.recipe.uv_lock import UV_LOCK
from imgkit_entrypoints import files
from imgkit_recipes import FOLDER


def load(ref: str | Path) -> Recipe:
    """Load the recipe `ref`: a shipped name, or a path (with a ``/``, or ending in ``.yaml`` or ``.yml``).

    Raises
    ------
    RecipeErrors : the recipe has problems; lists all of them, and those of its parents.
    UsageError : there is no such recipe.
    """
    file = locate(str(ref.absolute()) if isinstance(ref, Path) else ref, Path.cwd())
    found = Collector(shows=(file.parent.resolve(), FOLDER.resolve()))
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
        sha256=_sha256(file.stem, dataclasses.replace(document, description=description), image, found),
        positions=positions,
        sources=dict(found.digests),
        warnings=tuple(found.warnings),
    )


def _check_name(file: Path, found: Collector) -> None:
    """The file's name is the recipe's name; images and .sif files get it too."""
    for what, hint in rules.recipe_name(file.stem):
        found.error(Position(file=file, line=1, column=1), (), what, hint)


def _order(problem: Problem, asked: Path) -> tuple[bool, str, int, int]:
    """Sort the requested file first, and each file from top to bottom."""
    place = problem.position
    return place.file != asked, str(place.file), place.line, place.column


def _absolute(image: Image, positions: Mapping[KeyPath, Position]) -> Image:
    """Make the paths of `image` absolute; each starts at the folder of the file that states it."""

    def place(path: Path, *where: str | int) -> Path:
        return positions[where].file.parent / path

    def placed(step: PipStep, index: int) -> PipStep:
        where = ("image", "pip", index)
        return dataclasses.replace(
            step,
            requirements=step.requirements and place(step.requirements, *where, "requirements"),
            project=step.project and place(step.project, *where, "project"),
        )

    uv = image.uv and dataclasses.replace(image.uv, project=place(image.uv.project, "image", "uv", "project"))
    pip = tuple(placed(step, index) for index, step in enumerate(image.pip))
    copy = tuple(
        dataclasses.replace(step, source=place(step.source, "image", "copy", index, "source"))
        for index, step in enumerate(image.copy)
    )
    ca = tuple(place(file, "image", "ca", index) for index, file in enumerate(image.ca))
    # A file of this machine may be anywhere: "/" and "~" do not start at the recipe.
    secrets = tuple(
        dataclasses.replace(
            one, file=one.file and place(one.file.expanduser(), "image", "secrets", index, "file")
        )
        for index, one in enumerate(image.secrets)
    )
    return dataclasses.replace(image, ca=ca, secrets=secrets, uv=uv, pip=pip, copy=copy)


def _sha256(name: str, document: Document, image: Image, found: Collector) -> str:
    """Digest of the recipe's content: paths as written, the bytes of requirements files, locks, certificates.

    `found` receives the digests of these files, and of what projects state.
    """
    content = {"name": name, **dataclasses.asdict(document)}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    locks = (image.uv.project / UV_LOCK,) if image.uv else ()
    requirements = (step.requirements for step in image.pip if step.requirements is not None)
    for file in (*image.ca, *requirements, *locks):
        one = hashlib.sha256(files.read_bytes(file))
        found.digests[file] = one.hexdigest()
        digest.update(one.digest())
    projects = [step.project for step in image.pip] + [image.uv.project if image.uv else None]
    for project in filter(None, projects):
        stated = project / PYPROJECT
        found.digests[stated] = hashlib.sha256(files.read_bytes(stated)).hexdigest()
    return digest.hexdigest()
