"""A recipe's lock: TOML text with one short line per value, so that a diff shows what an upgrade changed.

`follow` attaches the lock next to a recipe to it, if that is the lock of this recipe, base and platform.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import requirements
from imgkit_builder.recipe.model import (
    LOCK_HINT,
    LOCK_SCHEMA,
    UV_STEP,
    Lock,
    LockedStep,
    LockRequest,
    PipStep,
    Recipe,
    UvProject,
)
from imgkit_builder.recipe.problems import (
    Collector,
    KeyPath,
    Position,
    RecipeErrors,
    key_text,
    parse_toml_file,
    shown,
)
from imgkit_builder.recipe.validation import validate
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

SUFFIX = ".lock"
KEPT_SUFFIX = ".files"
"""Follows the name of a lock: the folder of the packages that ``imgkit lock --keep-files`` stores."""
_HEAD = "# Made by imgkit lock, which also changes it. Keep it beside its recipe, under version control.\n"
_MOST_BYTES = 16 << 20


def beside(recipe: Recipe) -> Path:
    """Return where the lock of `recipe` lies: next to its file; for a shipped one in the working folder."""
    if recipe.file.parent == FOLDER:
        return Path.cwd() / f"{recipe.name}{SUFFIX}"
    return recipe.file.with_suffix(SUFFIX)


def text(lock: Lock) -> str:
    """Return the content of the file; the same lock gives the same bytes."""
    return _HEAD + "".join(_table(lock, ""))


def _table(table: Any, path: str) -> Iterator[str]:
    """Yield the lines of a dataclass: plain values first, as TOML requires, then the tables below it."""
    tables = []
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        key = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            tables.append((f"[{key}]", key, value))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            tables += [(f"[[{key}]]", key, item) for item in value]
        elif field.name == "schema" or value != field.default:
            yield f"{field.name} = {_plain(value)}\n"
    for heading, key, value in tables:
        lines = "".join(_table(value, key))
        if lines or heading.startswith("[["):
            yield f"\n{heading}\n{lines}" if not lines.startswith("\n") else f"\n{heading}{lines}"


def _plain(value: str | bool | int | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        items = [_plain(item) for item in value]
        return f"[{', '.join(items)}]" if len(items) < 2 else "[\n    " + ",\n    ".join(items) + ",\n]"
    if isinstance(value, str):
        # A text of TOML is one of JSON, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def read(file: Path) -> Lock:
    """Read `file`.

    Raises
    ------
    UsageError : it cannot be read, is not TOML, has a later schema, an unknown key, or a missing or wrong
        value; lists all faults with their keys and packages.
    """
    try:
        content = files.read_bytes(file, most_bytes=_MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"the lock cannot be read: {error}", where=str(file), hint=LOCK_HINT) from error
    return parse(content, file)


def parse(content: str, file: Path) -> Lock:
    """Return the lock that `content` of `file` states. Raises as `read`."""
    problems = Collector(shows=(file.parent.resolve(),))
    values = parse_toml_file(content.replace("\r\n", "\n"), file, problems, LOCK_HINT)
    lock, faults = _checked(values)
    for path, message, hint in faults:
        text = f"{key_text(path)}: {message}{_package(path, values)}"
        problems.error(Position(file=file, line=0, column=0), (), text, hint)
    if lock is None or faults:
        raise RecipeErrors(problems.errors, of=file.name)
    return lock


_Fault = tuple[KeyPath, str, str]
"""The path of a value, what is wrong with it, and a hint."""


def _checked(values: dict[str, Any]) -> tuple[Lock | None, list[_Fault]]:
    # First: a later imgkit may have other keys, and each would be reported as unknown.
    schema = values.get("schema", LOCK_SCHEMA)
    if isinstance(schema, int) and schema > LOCK_SCHEMA:
        hint = "use that imgkit, or make the lock again: imgkit lock RECIPE"
        return None, [(("schema",), f"schema {schema} is that of a later imgkit", hint)]
    if schema != LOCK_SCHEMA:
        return None, [(("schema",), f"{schema!r} is not a schema of a lock", LOCK_HINT)]
    lock, mistakes = validate(Lock, values)
    faults: list[_Fault] = []
    for mistake in mistakes:
        message = mistake.message.replace("a mapping", "a table")
        faults.append((mistake.path, message, mistake.hint or LOCK_HINT))
    if lock is not None:
        faults = [(path, message, LOCK_HINT) for path, message in _contradictions(lock)]
    return lock, faults


def _package(path: KeyPath, values: Any) -> str:
    """Return `` (package zsh)`` where `path` leads into a package of `values`, else an empty text."""
    name = ""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            break
        if isinstance(part, int) and isinstance(values, dict):
            name = str(values.get("name", ""))[:60]
    return f" (package {name})" if name else ""


def _contradictions(lock: Lock) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with several values together."""
    platforms: set[str] = set()
    for number, part in enumerate(lock.platforms):
        path = ("platforms", number)
        if part.platform in platforms:
            yield (*path, "platform"), f"{part.platform} occurs twice"
        platforms.add(part.platform)
        if part.base.name != part.request.base:
            message = f"{part.base.name!r} must be {part.request.base!r}, the base in the request"
            yield (*path, "base", "name"), message
        if not (part.base.digest or part.base.id):
            yield (*path, "base"), "must have a digest or an id"
        first = UV_STEP if part.request.uv else 0
        for index, wheel in enumerate(part.pip):
            if not first <= wheel.step < len(part.request.pip):
                yield (*path, "pip", index, "step"), f"there is no pip step {wheel.step} in the request"
            if not (wheel.url or wheel.kept):
                yield (*path, "pip", index, "url"), "is missing, and the wheel is not a kept one"


def follow(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """Return `recipe` with the lock that lies next to it; unchanged where there is none.

    Parameters
    ----------
    base : the base instead of the recipe's.
    required : whether a missing lock is an error.

    Raises
    ------
    UsageError : the lock cannot be read, belongs to another recipe, lacks the platform or a kept file, or is
        stale: then it names the recipe's line that the lock does not know.
    """
    file = beside(recipe)
    if not file.exists():
        if required:
            where, hint = str(shown(file)), f"make it: {command(recipe)}"
            raise UsageError(f"{recipe.name} has no lock", where=where, hint=hint)
        # A lock that appears later changes what a build makes.
        return dataclasses.replace(recipe, sources={**recipe.sources, file: ""})
    lock, where = read(file), str(shown(file))
    again = f"{command(recipe)}; to ignore the lock: --no-lock"
    if lock.recipe != recipe.name:
        message = f"it is the lock of the recipe {lock.recipe!r}, and not of {recipe.name!r}"
        raise UsageError(message, where=where, hint=f"rename or remove it, or: {again}")
    part = lock.of(platform)
    if part is None:
        platforms = ", ".join(locked.platform for locked in lock.platforms) or "none"
        message = f"the lock is not for {platform}; it has: {platforms}"
        hint = f"{command(recipe)} --platform {platform}; to ignore the lock: --no-lock"
        raise UsageError(message, where=where, hint=hint)
    try:
        request = request_of(recipe, base=base)
    except (OSError, ValueError) as error:
        message, where = f"a file of the recipe cannot be read: {error}", recipe.where("image", "pip")
        raise UsageError(message, where=where, hint=f"restore it, or: {again}") from error
    if stale := difference(request, part.request):
        path, change = stale
        where = "--base" if base and path == ("image", "base") else recipe.where(*path)
        raise UsageError(f"the lock {file.name} is stale: {change}", where=where, hint=again)
    folder = kept_folder(file)
    kept_files = {name: folder / name for name in part.digests if (folder / name).is_file()}
    for wheel in part.pip:
        if wheel.kept and wheel.file not in kept_files:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shown(folder)),
                hint=f"copy that folder to this machine too, or: {command(recipe)} --keep-files",
            )
    sources = {**recipe.sources, file: hashlib.sha256(files.read_bytes(file)).hexdigest()}
    lock_text = text(dataclasses.replace(lock, platforms=(part,)))
    return dataclasses.replace(recipe, lock=part, lock_text=lock_text, kept=kept_files, sources=sources)


def kept_folder(file: Path) -> Path:
    """Return the folder of the packages that ``imgkit lock --keep-files`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def command(recipe: Recipe) -> str:
    """Return the command that makes the lock of `recipe`."""
    is_shipped = recipe.file.parent == FOLDER
    return f"imgkit lock {recipe.name if is_shipped else shlex.quote(str(shown(recipe.file)))}"


_Difference = tuple[KeyPath, str]
"""The path of a value in a recipe, or of the list that lacks one, and how it differs from the lock's."""


def request_of(recipe: Recipe, *, base: str | None = None) -> LockRequest:
    """Return what `recipe` asks for, on `base` (default: the recipe's).

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
        pip=tuple(map(_locked_step, image.pip)),
    )


def _uv(uv: UvProject) -> str:
    """Return the digest of what a lock takes from a uv project."""
    selection = "\0".join(("extras", *sorted(uv.extras), "groups", *sorted(uv.groups)))
    return hashlib.sha256(
        files.read_bytes(uv.project / requirements.UV_LOCK) + selection.encode()
    ).hexdigest()


def options_of(step: PipStep) -> tuple[str, ...]:
    """Return the options of a pip step and those in its requirements file; URLs may hold credentials.

    Raises
    ------
    OSError : the requirements file cannot be read.
    """
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    return (*step.options, *(word for line in lines if line.startswith("-") for word in shlex.split(line)))


def _locked_step(step: PipStep) -> LockedStep:
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    project: tuple[str, ...] = ()
    if step.project is not None and step.installs_dependencies:
        project = requirements.of_project(step.project)
    packages = [line for line in lines if not line.startswith("-")]
    variables = (f"{name}={value}" for name, value in sorted(step.env.items()))
    return LockedStep(
        requirements=tuple(map(public, (*step.packages, *packages, *project))),
        options=tuple(map(public, options_of(step))),
        env=tuple(map(public, variables)),
    )


def public(text: str) -> str:
    """Return `text` without credentials in URLs, and with stars for other secrets, as others read it."""
    return secret_patterns.masked(re.sub(r"://[^/@\s]*@", "://", text))


def difference(new: LockRequest, locked: LockRequest) -> _Difference | None:
    """Return the first value in which the request `new` of a recipe differs from the `locked` one."""
    if new.base != locked.base:
        return ("image", "base"), f"the base is {new.base}, and was {locked.base}"
    if change := _list_difference(new.apt, locked.apt):
        return ("image", "apt", *change[0]), f"the apt packages {change[1]}"
    if new.constraints != locked.constraints:
        message = f"constraints: {' '.join(new.constraints)}, and was {' '.join(locked.constraints)}"
        return ("image", "constraints"), message
    if new.uv != locked.uv:
        changed = "uv.lock, or the chosen extras and groups, have changed"
        return ("image", "uv"), changed if new.uv else "there is no uv project"
    for number, (step, locked_step) in enumerate(zip(new.pip, locked.pip, strict=False)):
        for field, key, noun in (
            ("requirements", "packages", "packages"),
            ("options", "options", "options"),
            ("env", "env", "variables"),
        ):
            if change := _list_difference(getattr(step, field), getattr(locked_step, field)):
                path = ("image", "pip", number, key, *change[0])
                return path, f"the {noun} of this pip step {change[1]}"
    # Last: an inserted step changes those after it, whose first difference says more than the number.
    count, locked_count = len(new.pip), len(locked.pip)
    if count == locked_count:
        return None
    first_new = (locked_count,) if count > locked_count else ()
    return ("image", "pip", *first_new), f"there are {count} pip steps, and were {locked_count}"


def _list_difference(values: Sequence[str], locked: Sequence[str]) -> _Difference | None:
    """Return the index of the first value that is not in `locked`, if any, and the change in words."""
    if values == locked:
        return None
    for number, value in enumerate(values):
        if value not in locked:
            return (number,), f"have {value!r}, which the lock does not know"
    removed = next((value for value in locked if value not in values), None)
    return (), "have another order" if removed is None else f"no longer have {removed!r}"
