"""The step that installs a uv project's locked packages, minus what the base has.

The base decides: ``image/uv_inside.py`` runs in it as a part of the step, so all builders do the same.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Iterator

from imgkit_builder.image import pip_steps
from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, UvCommand
from imgkit_builder.recipe import uv_lock
from imgkit_builder.recipe.model import PipStep, Recipe
from imgkit_builder.recipe.uv_lock import UvLock, canonical
from imgkit_entrypoints.errors import UsageError

LOCK = ContextFile(member="imgkit/uv.json", path=f"{INSIDE}/uv.json")
PROGRAM = ContextFile(member="imgkit/uv-inside.py", path=f"{INSIDE}/uv-inside.py")


def command(recipe: Recipe) -> UvCommand | None:
    """The step of `recipe`; None where it names no uv project."""
    if recipe.image.uv is None:
        return None
    before = f"{pip_steps.PIP}{pip_steps.base_constraint(recipe.image.constraints)}"
    # The base's constraints are part of the choice, and pip would ask for hashes of them.
    install = (
        f"{pip_steps.PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip install --no-cache-dir"
        f" --require-hashes --no-deps --only-binary=:all: --no-index"
        f"{NEXT}    --find-links {INSIDE}/uv.html --requirement {INSIDE}/uv.txt"
    )
    return UvCommand(
        origin=recipe.where("image", "uv"),
        files=(LOCK, PROGRAM),
        command=f"{before}{NEXT}python3 -I -B {PROGRAM.path} {LOCK.path} {INSIDE}{NEXT}&& {install}",
    )


def files(recipe: Recipe) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of the step in the build context.

    Raises
    ------
    UsageError : uv.lock or pyproject.toml cannot be read; it may have changed since the recipe was checked.
    """
    if recipe.image.uv is None:
        return
    try:
        lock = uv_lock.read(recipe.image.uv.project)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the uv project cannot be read: {error}", where=recipe.where("image", "uv")
        ) from error
    yield LOCK.member, as_json(recipe, lock).encode()
    yield PROGRAM.member, importlib.resources.files(__package__).joinpath("uv_inside.py").read_bytes()


def as_json(recipe: Recipe, lock: UvLock) -> str:
    """What the program in the base reads: the lock, and what the recipe wants of it."""
    uv = recipe.image.uv
    assert uv is not None  # noqa: S101 - for the type checker
    own = lock.packages[lock.project]
    needs = [
        *own.needs,
        *(need for extra in uv.extras for need in own.extras.get(canonical(extra), ())),
        *(need for group in uv.groups for need in lock.groups.get(canonical(group), ())),
    ]
    content = {
        "project": lock.project,
        "requires_python": lock.requires_python,
        "environments": lock.environments,
        "needs": [dataclasses.asdict(need) for need in needs],
        "packages": [dataclasses.asdict(package) for package in lock.packages],
        "protected": pip_steps.PROTECTED,
        "left": sorted({name for step in recipe.image.pip for name in _named(step)}),
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _named(step: PipStep) -> Iterator[str]:
    """Normalised names of the packages that a pip step names itself."""
    lines = list(step.packages)
    if step.requirements is not None:
        lines += step.requirements.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        if name := re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            yield canonical(name[1])
