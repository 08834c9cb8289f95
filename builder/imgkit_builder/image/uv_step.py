"""The step that installs a uv project's locked packages, minus what the base has.

The base decides: ``image/uv_inside.py`` runs in it as a part of the step, so all builders do the same.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
from collections.abc import Iterable, Iterator

from imgkit_builder.image import locked_steps, pip_steps, uv_inside
from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile, UvCommand
from imgkit_builder.recipe import uv_lock
from imgkit_builder.recipe.lock import UV_STEP, LockedWheel
from imgkit_builder.recipe.model import PipStep, Recipe
from imgkit_builder.recipe.requirements import canonical
from imgkit_builder.recipe.uv_lock import UvLock
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.files import read_text

LOCK = ContextFile(member="imgkit/uv.json", path=f"{INSIDE}/uv.json")
PROGRAM = ContextFile(member="imgkit/uv-inside.py", path=f"{INSIDE}/uv-inside.py")
LIST = ContextFile(member="imgkit/uv.txt", path=f"{INSIDE}/uv.txt")
LINKS = ContextFile(member="imgkit/uv.html", path=f"{INSIDE}/uv.html")
KEPT = ContextFile(member="imgkit/locked-uv", path=f"{INSIDE}/locked-uv")

_EXACT = f"--no-cache-dir {locked_steps.PIP_OPTIONS} --no-index"


def command(recipe: Recipe) -> UvCommand | None:
    """The step of `recipe`; None where it names no uv project, or where its lock has nothing of it."""
    if recipe.image.uv is None:
        return None
    if recipe.lock is None:
        return _step(recipe, (LOCK, PROGRAM), f"{_choose(recipe)}{NEXT}&& {_pip('install')}")
    if not locked_steps.wheels(recipe, UV_STEP):
        return None
    if kept(recipe):
        return _step(recipe, (LIST,), f"{_pip('install', KEPT)}{NEXT}&& rm -rf {KEPT.path}", KEPT)
    return _step(recipe, (LIST, LINKS), _pip("install"))


def question(recipe: Recipe, answer: str, *, keep: str) -> UvCommand | None:
    """The step that a lock is made with: it writes the wheels to `answer`, and their files to `keep`."""
    if recipe.image.uv is None:
        return None
    commands = [_choose(recipe) + f" {answer}"]
    if keep:
        commands.append(f"{_pip('download')}{NEXT}    --dest {keep}")
    if recipe.image.pip:
        commands.append(_pip("install"))
    return _step(recipe, (LOCK, PROGRAM), f"{NEXT}&& ".join(commands))


def _step(
    recipe: Recipe, files: tuple[ContextFile, ...], command: str, folder: ContextFile | None = None
) -> UvCommand:
    return UvCommand(origin=recipe.where("image", "uv"), files=files, kept=folder, command=command)


def _choose(recipe: Recipe) -> str:
    before = f"{pip_steps.PIP}{pip_steps.base_constraint(recipe.image.constraints)}"
    return f"{before}{NEXT}python3 -I -B {PROGRAM.path} {LOCK.path} {INSIDE}"


def _pip(verb: str, links: ContextFile = LINKS) -> str:
    # The base's constraints are part of the choice.
    return (
        f"{pip_steps.PIP} PIP_CONSTRAINT=''{NEXT}python3 -m pip {verb} {_EXACT}"
        f"{NEXT}    --find-links {links.path} --requirement {LIST.path}"
    )


def kept(recipe: Recipe) -> tuple[LockedWheel, ...]:
    """The wheels of a locked recipe, if all of them lie on this machine."""
    wheels = locked_steps.wheels(recipe, UV_STEP)
    return wheels if all(one.file in recipe.kept for one in wheels) else ()


def files(recipe: Recipe) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of the step in the build context.

    Raises
    ------
    UsageError : uv.lock or pyproject.toml cannot be read; it may have changed since the recipe was checked.
    """
    if recipe.image.uv is None:
        return
    if recipe.lock is not None:
        wheels = [dataclasses.asdict(one) for one in locked_steps.wheels(recipe, UV_STEP)]
        if wheels:
            yield LIST.member, _lines(map(uv_inside.requirement, wheels))
        if wheels and not kept(recipe):
            yield LINKS.member, _lines((uv_inside.PAGE, *map(uv_inside.link, wheels)))
        return
    try:
        lock = uv_lock.read(recipe.image.uv.project)
    except (OSError, ValueError) as error:
        where = recipe.where("image", "uv")
        raise UsageError(f"the uv project cannot be read: {error}", where=where) from error
    yield LOCK.member, as_json(recipe, lock).encode()
    yield PROGRAM.member, importlib.resources.files(__package__).joinpath("uv_inside.py").read_bytes()


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


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
        lines += read_text(step.requirements, errors="replace").splitlines()
    for line in lines:
        if name := re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            yield canonical(name[1])
