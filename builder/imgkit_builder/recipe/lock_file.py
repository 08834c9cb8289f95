"""A recipe's lock: TOML text with one short line per value, so that a diff shows what an upgrade changed.

`attach_lock` attaches the lock next to a recipe to it, if that is the lock of this recipe, base and platform.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_builder.recipe import requirements
from imgkit_builder.recipe.model import (
    LOCK_HINT,
    LOCK_SCHEMA,
    UV_STEP,
    Lock,
    LockedPlatform,
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
    shorten_path,
)
from imgkit_builder.recipe.validation import Mistake, validate
from imgkit_entrypoints import files, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

SUFFIX = ".lock"
KEPT_SUFFIX = ".files"
"""``mine.lock.files`` is the folder in which ``imgkit lock --keep-files`` stores the packages of a lock."""
_HEADER = "# Made by imgkit lock, which also changes it. Keep it beside its recipe, under version control.\n"
# One package takes some hundred bytes: no lock is larger.
_MOST_BYTES = 16 << 20


def lock_path(recipe: Recipe) -> Path:
    """Return the path of the lock of `recipe`: ``mine.lock`` next to ``mine.yaml``.

    A shipped recipe lies in a folder of imgkit, so its lock is in the working folder.
    """
    if recipe.file.parent == FOLDER:
        return Path.cwd() / f"{recipe.name}{SUFFIX}"
    return recipe.file.with_suffix(SUFFIX)


def render_lock(lock: Lock) -> str:
    """Return the content of the file. The same lock gives the same bytes."""
    return _HEADER + _render_table(lock, "")


def _render_table(table: Any, path: str) -> str:
    """Return the TOML text of a dataclass: first its plain values, then the tables below it.

    TOML requires that order. `path` is the dotted key of the table, such as ``platforms.base``, and empty for
    the lock itself. Values that equal their default are left out.
    """
    values = ""
    tables = ""
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        key = f"{path}.{field.name}".removeprefix(".")
        if dataclasses.is_dataclass(value):
            content = _render_table(value, key)
            if content:  # a table without values would say nothing
                tables += _render_heading(f"[{key}]", content)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for item in value:
                # An item without values must stay: the number of items counts.
                tables += _render_heading(f"[[{key}]]", _render_table(item, key))
        elif field.name == "schema" or value != field.default:
            values += f"{field.name} = {_render_value(value)}\n"
    return values + tables


def _render_heading(heading: str, content: str) -> str:
    """Return a table of TOML: its heading and its content, which may begin with another table."""
    if content.startswith("\n"):
        return f"\n{heading}{content}"
    return f"\n{heading}\n{content}"


def _render_value(value: str | bool | int | tuple[str, ...]) -> str:
    """Return `value` as TOML. A list of several items has each on its own line."""
    if isinstance(value, tuple):
        items = [_render_value(item) for item in value]
        if len(items) < 2:
            return f"[{', '.join(items)}]"
        return "[\n    " + ",\n    ".join(items) + ",\n]"
    if isinstance(value, str):
        # A text of TOML is one of JSON, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def read_lock(file: Path) -> Lock:
    """Return the lock in `file`.

    Raises
    ------
    UsageError : the file cannot be read, is not TOML, was written by a later imgkit, or has unknown, missing
        or wrong values. The error lists all faults with their keys and packages.
    """
    try:
        content = files.read_bytes(file, most_bytes=_MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"the lock cannot be read: {error}", where=str(file), hint=LOCK_HINT) from error
    return parse_lock(content, file)


def parse_lock(content: str, file: Path) -> Lock:
    """Return the lock that `content`, the text of `file`, states.

    Raises
    ------
    UsageError : as in `read_lock`.
    """
    # The lock beside a recipe of unknown origin may be a link to any file of this machine, such as a private
    # key. Messages quote only files in the lock's own folder.
    problems = Collector(shows=(file.parent.resolve(),))
    # An editor of Windows may have changed the line ends.
    values = parse_toml_file(content.replace("\r\n", "\n"), file, problems, LOCK_HINT)
    lock, mistakes = _validate(values)
    for mistake in mistakes:
        message = mistake.message.replace("a mapping", "a table")  # the word of TOML
        text = f"{key_text(mistake.path)}: {message}{_describe_package(mistake.path, values)}"
        problems.error(Position(file=file, line=0, column=0), (), text, mistake.hint or LOCK_HINT)
    if lock is None or mistakes:
        raise RecipeErrors(problems.errors, of=file.name)
    return lock


_IGNORE_HINT = "to ignore the lock: --no-lock"


def _validate(values: dict[str, Any]) -> tuple[Lock | None, Sequence[Mistake]]:
    """Return the lock that the parsed `values` state, and what is wrong with them.

    The lock may be None if something is wrong.
    """
    # The schema first: a later one may have other keys, and each of them would be reported as unknown.
    schema = values.get("schema", LOCK_SCHEMA)
    if isinstance(schema, int) and schema > LOCK_SCHEMA:
        hint = "use that imgkit, or make the lock again: imgkit lock RECIPE"
        return None, [
            _make_mistake("schema", message=f"schema {schema} is that of a later imgkit", hint=hint)
        ]
    if schema != LOCK_SCHEMA:
        return None, [_make_mistake("schema", message=f"{schema!r} is not a schema of a lock")]
    lock, mistakes = validate(Lock, values)
    if lock is None:
        return None, mistakes
    return lock, list(_find_contradictions(lock))


def _make_mistake(*path: str | int, message: str, hint: str = "") -> Mistake:
    return Mistake(path=path, kind="rule", message=message, hint=hint)


def _describe_package(path: KeyPath, values: Any) -> str:
    """Return `` (package zsh)`` if the key `path` lies in the table of that package, else an empty text.

    A path such as ``platforms[0].apt[17].sha256`` does not tell the user which package is meant.
    """
    name = ""
    table = values
    for key in path:
        try:
            table = table[key]
        except (KeyError, IndexError, TypeError):
            break
        # An item of a list of tables: a platform or a package. The innermost counts.
        if isinstance(key, int) and isinstance(table, dict):
            name = str(table.get("name", ""))[:60]
    if not name:
        return ""
    return f" (package {name})"


def _find_contradictions(lock: Lock) -> Iterator[Mistake]:
    """Yield contradictions between values of a lock, each with the key of the value to change.

    For example, a wheel must belong to a pip step that the lock's request has.
    """
    platforms = set()
    for number, locked in enumerate(lock.platforms):
        path = ("platforms", number)
        if locked.platform in platforms:
            yield _make_mistake(*path, "platform", message=f"{locked.platform} occurs twice")
        platforms.add(locked.platform)
        base = locked.base
        if base.name != locked.request.base:
            message = f"{base.name!r} must be {locked.request.base!r}, the base in the request"
            yield _make_mistake(*path, "base", "name", message=message)
        if not (base.digest or base.id):
            yield _make_mistake(*path, "base", message="must have a digest or an id")
        steps = set(range(len(locked.request.pip)))
        if locked.request.uv:
            steps.add(UV_STEP)
        for index, wheel in enumerate(locked.pip):
            if wheel.step not in steps:
                message = f"there is no pip step {wheel.step} in the request"
                yield _make_mistake(*path, "pip", index, "step", message=message)
            if not (wheel.url or wheel.kept):
                message = "is missing, and the wheel is not a kept one"
                yield _make_mistake(*path, "pip", index, "url", message=message)


def attach_lock(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """Return `recipe` with the lock that lies next to it, so that a build installs the locked packages.

    Parameters
    ----------
    platform : the platform of the image, such as ``linux/arm64``. A lock has packages for each.
    base : the base image, if it is not that of the recipe.
    required : whether a missing lock is an error. Otherwise the recipe is returned without a lock.

    Raises
    ------
    UsageError : the lock cannot be read, belongs to another recipe, or lacks the platform or a stored
        package. It may also be stale, which means that the recipe has changed since; the error then names the
        line of the recipe that the lock does not know.
    """
    file = lock_path(recipe)
    if not file.exists():
        if required:
            hint = f"make it: {lock_command(recipe)}"
            raise UsageError(f"{recipe.name} has no lock", where=str(shorten_path(file)), hint=hint)
        # "" notes that there was no lock. A lock that appears later changes the image.
        return dataclasses.replace(recipe, sources={**recipe.sources, file: ""})
    lock = read_lock(file)
    locked = _select_platform(lock, recipe, platform, file)
    _refuse_stale(recipe, locked.request, file, base)
    folder = kept_folder(file)
    kept_files = {name: folder / name for name in locked.digests if (folder / name).is_file()}
    for wheel in locked.pip:
        if wheel.kept and wheel.file not in kept_files:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shorten_path(folder)),
                hint=f"copy that folder to this machine too, or: {lock_command(recipe)} --keep-files",
            )
    sources = {**recipe.sources, file: hashlib.sha256(files.read_bytes(file)).hexdigest()}
    # The image stores what the lock has for its own platform only.
    lock_text = render_lock(dataclasses.replace(lock, platforms=(locked,)))
    return dataclasses.replace(recipe, lock=locked, lock_text=lock_text, kept=kept_files, sources=sources)


def _select_platform(lock: Lock, recipe: Recipe, platform: str, file: Path) -> LockedPlatform:
    """Return what `lock` has for `platform`. `file` is the path of the lock, for messages.

    Raises
    ------
    UsageError : the lock is not for this platform, or belongs to another recipe.
    """
    where = str(shorten_path(file))
    if lock.recipe != recipe.name:
        message = f"it is the lock of the recipe {lock.recipe!r}, and not of {recipe.name!r}"
        hint = f"rename or remove it, or: {lock_command(recipe)}; {_IGNORE_HINT}"
        raise UsageError(message, where=where, hint=hint)
    locked = lock.for_platform(platform)
    if locked is None:
        platforms = ", ".join(item.platform for item in lock.platforms) or "none"
        message = f"the lock is not for {platform}; it has: {platforms}"
        hint = f"{lock_command(recipe)} --platform {platform}; {_IGNORE_HINT}"
        raise UsageError(message, where=where, hint=hint)
    return locked


def _refuse_stale(recipe: Recipe, locked: LockRequest, file: Path, base: str | None) -> None:
    """Refuse a stale lock: the recipe now asks for other packages, options or another base.

    Without this, a build would install what the recipe asked for when the lock was made.

    Parameters
    ----------
    locked : what the recipe asked for when the lock was made.
    file : the path of the lock, for messages.
    base : the base image, if it is not that of the recipe.

    Raises
    ------
    UsageError : the lock is stale, or a requirements file of the recipe cannot be read.
    """
    hint = f"{lock_command(recipe)}; {_IGNORE_HINT}"
    try:
        request = make_request(recipe, base=base)
    except (OSError, ValueError) as error:
        message = f"a file of the recipe cannot be read: {error}"
        where = recipe.where("image", "pip")
        raise UsageError(message, where=where, hint=f"restore it, or: {hint}") from error
    difference = first_difference(request, locked)
    if difference is None:
        return
    where = recipe.where(*difference.path)
    if base and difference.path == ("image", "base"):
        where = "--base"
    raise UsageError(f"the lock {file.name} is stale: {difference.change}", where=where, hint=hint)


def kept_folder(file: Path) -> Path:
    """Return the folder of the packages that ``imgkit lock --keep-files`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def lock_command(recipe: Recipe) -> str:
    """Return the command that makes the lock of `recipe`: ``imgkit lock mn5``, ``imgkit lock mine.yaml``."""
    if recipe.file.parent == FOLDER:
        return f"imgkit lock {recipe.name}"
    return f"imgkit lock {shlex.quote(str(shorten_path(recipe.file)))}"


_STEP_FIELDS = {
    "requirements": ("packages", "packages"),
    "options": ("options", "options"),
    "env": ("env", "variables"),
}
"""Fields of a `LockedStep` -> their key in a recipe, and the noun for messages."""


class Difference(NamedTuple):
    """How a recipe differs from what it was when it was locked."""

    path: KeyPath
    """The changed value, or the list that lacks one."""
    change: str


def make_request(recipe: Recipe, *, base: str | None = None) -> LockRequest:
    """Return what `recipe` asks for: its base, packages and options. A lock stores it to notice a change.

    `base` replaces the recipe's base.

    Raises
    ------
    OSError : a requirements file or a project's pyproject.toml cannot be read.
    ValueError : a project's pyproject.toml is not TOML.
    """
    image = recipe.image
    uv_sha256 = ""
    if image.uv:
        uv_sha256 = _hash_uv_project(image.uv)
    return LockRequest(
        base=base or image.base,
        apt=image.apt,
        constraints=(image.constraints.policy, *image.constraints.drop),
        uv=uv_sha256,
        pip=tuple(_lock_step(step) for step in image.pip),
    )


def _hash_uv_project(uv: UvProject) -> str:
    """Return the digest of what a lock takes from a uv project: its uv.lock, extras and groups."""
    selection = "\0".join(("extras", *sorted(uv.extras), "groups", *sorted(uv.groups)))
    lock = files.read_bytes(uv.project / requirements.UV_LOCK)
    return hashlib.sha256(lock + selection.encode()).hexdigest()


def collect_pip_options(step: PipStep) -> tuple[str, ...]:
    """Return the options of a pip step, and those in its requirements file: ``("--index-url", "https://...")``.

    URLs among them may hold credentials.

    Raises
    ------
    OSError : the requirements file cannot be read.
    """
    options = list(step.options)
    if step.requirements:
        for line in requirements.read_requirements(step.requirements):
            if line.startswith("-"):
                options += shlex.split(line)
    return tuple(options)


def _lock_step(step: PipStep) -> LockedStep:
    """Return what a pip step asks for, as a lock states it: requirements, options and variables.

    Credentials are removed, because a lock is meant for version control.
    """
    packages = list(step.packages)
    if step.requirements:
        lines = requirements.read_requirements(step.requirements)
        packages += [line for line in lines if not line.startswith("-")]
    if step.project is not None and step.installs_dependencies:
        packages += requirements.read_dependencies(step.project)
    variables = [f"{name}={value}" for name, value in sorted(step.env.items())]
    return LockedStep(
        requirements=tuple(map(hide_secrets, packages)),
        options=tuple(map(hide_secrets, collect_pip_options(step))),
        env=tuple(map(hide_secrets, variables)),
    )


def hide_secrets(text: str) -> str:
    """Return `text` without credentials in URLs, and with stars in place of other secrets.

    ``https://me:token@host/simple`` -> ``https://host/simple``.
    """
    return secret_patterns.mask_secrets(re.sub(r"://[^/@\s]*@", "://", text))


def first_difference(new: LockRequest, locked: LockRequest) -> Difference | None:
    """Return the first change of a recipe since it was locked, or None if there is none.

    `new` is what the recipe asks for now, and `locked` what it asked for when the lock was made.
    """
    if new.base != locked.base:
        return Difference(("image", "base"), f"the base is {new.base}, and was {locked.base}")
    if new.apt != locked.apt:
        return _list_difference(("image", "apt"), "the apt packages", new.apt, locked.apt)
    if new.constraints != locked.constraints:
        message = f"constraints: {' '.join(new.constraints)}, and was {' '.join(locked.constraints)}"
        return Difference(("image", "constraints"), message)
    if new.uv != locked.uv:
        change = "there is no uv project"
        if new.uv:
            change = "uv.lock, or the chosen extras and groups, have changed"
        return Difference(("image", "uv"), change)
    return _step_difference(new.pip, locked.pip)


def _step_difference(new: Sequence[LockedStep], locked: Sequence[LockedStep]) -> Difference | None:
    """Return the first change in the pip steps of a recipe, see `first_difference`."""
    # Compare the steps that both lists have.
    for number, (step, locked_step) in enumerate(zip(new, locked, strict=False)):
        for field, (key, noun) in _STEP_FIELDS.items():
            values = getattr(step, field)
            locked_values = getattr(locked_step, field)
            if values != locked_values:
                path = ("image", "pip", number, key)
                return _list_difference(path, f"the {noun} of this pip step", values, locked_values)
    # Only now compare their number: for an inserted step, the changed steps behind it say more.
    change = f"there are {len(new)} pip steps, and were {len(locked)}"
    if len(new) > len(locked):
        first_new = len(locked)
        return Difference(("image", "pip", first_new), change)
    if len(new) < len(locked):
        return Difference(("image", "pip"), change)
    return None


def _list_difference(path: KeyPath, noun: str, values: Sequence[str], locked: Sequence[str]) -> Difference:
    """Return the first change in a list of a recipe at the key `path`, which differs from the `locked` one.

    For example, ``the apt packages have 'zsh', which the lock does not know``. `noun` is the list's name.
    """
    for index, value in enumerate(values):
        if value not in locked:
            return Difference((*path, index), f"{noun} have {value!r}, which the lock does not know")
    for value in locked:
        if value not in values:
            return Difference(path, f"{noun} no longer have {value!r}")
    return Difference(path, f"{noun} have another order")
