"""Read and write the lock of a recipe, and check that it still fits the recipe.

A lock is a TOML file with one short line per value, so that a diff shows what an upgrade has changed.
`attach_lock` adds the lock file beside a recipe to the loaded recipe. It refuses a lock that was made for
another recipe, base or platform.
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
from imgkit_recipes import FOLDER as SHIPPED_FOLDER

SUFFIX = ".lock"
KEPT_SUFFIX = ".files"
"""``mine.lock.files`` is the folder in which ``imgkit lock --keep-files`` stores the packages of a lock."""
_HEADER = "# Made by imgkit lock, which also changes it. Keep it beside its recipe, under version control.\n"
# A package takes a few hundred bytes, so no real lock is larger.
_MOST_BYTES = 16 << 20


def lock_path(recipe: Recipe) -> Path:
    """Return the path of the lock of `recipe`, for example ``mine.lock`` beside ``mine.yaml``.

    The file of a shipped recipe is inside the installed package, so its lock is in the working directory.
    """
    if recipe.file.parent == SHIPPED_FOLDER:
        return Path.cwd() / f"{recipe.name}{SUFFIX}"
    return recipe.file.with_suffix(SUFFIX)


def render_lock(lock: Lock) -> str:
    """Return the content of the lock file. Equal locks give equal text."""
    return _HEADER + _render_table(lock, "")


def _render_table(table: Any, path: str) -> str:
    """Return the TOML text of a dataclass: first its plain values, then the tables in it.

    TOML requires that order, because a value after a table heading would belong to that table. Values that
    are equal to their default are left out.

    Parameters
    ----------
    table : the dataclass, such as a `Lock`.
    path : the dotted key of the table, such as ``platforms.base``. It is empty for the lock itself.
    """
    values = ""
    tables = ""
    for field in dataclasses.fields(table):
        field_value = getattr(table, field.name)
        key = f"{path}.{field.name}".removeprefix(".")
        if dataclasses.is_dataclass(field_value):
            content = _render_table(field_value, key)
            if content:  # a table without values would add nothing
                tables += _render_heading(f"[{key}]", content)
        elif isinstance(field_value, tuple) and field_value and dataclasses.is_dataclass(field_value[0]):
            for item in field_value:
                # Write an item even if all its values are defaults, since the number of items matters.
                tables += _render_heading(f"[[{key}]]", _render_table(item, key))
        # The schema is always written. A reader needs it to know how to read the other keys.
        elif field.name == "schema" or field_value != field.default:
            values += f"{field.name} = {_render_value(field_value)}\n"
    return values + tables


def _render_heading(heading: str, content: str) -> str:
    """Return a TOML table: its `heading` and its `content`.

    If the table has no plain values, `content` begins with the heading of another table, after an empty line.
    """
    if content.startswith("\n"):
        return f"\n{heading}{content}"
    return f"\n{heading}\n{content}"


def _render_value(value: str | bool | int | tuple[str, ...]) -> str:
    """Return `value` as TOML. A list of several items has one item per line."""
    if isinstance(value, tuple):
        item_texts = [_render_value(item) for item in value]
        if len(item_texts) < 2:
            return f"[{', '.join(item_texts)}]"
        return "[\n    " + ",\n    ".join(item_texts) + ",\n]"
    if isinstance(value, str):
        # A TOML string is written like a JSON string, except that TOML also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def read_lock(file: Path) -> Lock:
    """Read the lock file `file`.

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
    """Parse a lock file. `content` is its text. `file` is its path, for error messages.

    Raises
    ------
    UsageError : the text is not a valid lock. The error lists all mistakes.
    """
    # The lock beside a recipe of unknown origin may be a symbolic link to a private file, such as an SSH key.
    # So messages quote only files in the folder of the lock.
    problems = Collector(visible_folders=(file.parent.resolve(),))
    # Editors on Windows may have changed the line endings.
    values = parse_toml_file(content.replace("\r\n", "\n"), file, problems, LOCK_HINT)
    lock, mistakes = _validate_lock(values)
    for mistake in mistakes:
        message = mistake.message.replace("a mapping", "a table")  # the word of TOML
        package_name = _find_package_name(mistake.path, values)
        package_text = f" (package {package_name})" if package_name else ""
        message_with_key = f"{key_text(mistake.path)}: {message}{package_text}"
        problems.error(Position(file=file, line=0, column=0), (), message_with_key, mistake.hint or LOCK_HINT)
    if lock is None or mistakes:
        raise RecipeErrors(problems.errors, of=file.name)
    return lock


_IGNORE_HINT = "to ignore the lock: --no-lock"


def _validate_lock(values: dict[str, Any]) -> tuple[Lock | None, Sequence[Mistake]]:
    """Convert the parsed `values` of a lock file to a `Lock`, and return what is wrong with them.

    If a value has a wrong key or type, the lock is None. If the values only contradict each other, the result
    is the lock together with the mistakes.
    """
    # Check the schema first. A lock with a later schema may have other keys, and each would be reported as
    # unknown.
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


def _find_package_name(path: KeyPath, values: Any) -> str:
    """Return the name of the package that the key `path` belongs to, such as ``zsh``, for a message.

    A path such as ``platforms[0].apt[17].sha256`` does not tell the user which package is meant. If the key
    does not belong to a package with a name, return an empty text. `values` are those of the lock file.
    """
    name = ""
    node = values
    for key in path:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):  # the key is missing, or its parent has another type
            break
        # A table in a list is a platform or, further inside, a package. A platform has no name.
        is_list_item = isinstance(key, int)
        if is_list_item and isinstance(node, dict):
            name = str(node.get("name", ""))[:60]
    return name


def _find_contradictions(lock: Lock) -> Iterator[Mistake]:
    """Yield a mistake for each value of a lock that contradicts another one.

    Each mistake has the key of the value that is probably wrong. For example, a wheel must belong to a pip
    step that existed when the lock was made. The request in a lock is what the recipe required at that time.
    """
    platforms = set()
    for index, locked in enumerate(lock.platforms):
        path: KeyPath = ("platforms", index)
        if locked.platform in platforms:
            yield _make_mistake(*path, "platform", message=f"{locked.platform} occurs twice")
        platforms.add(locked.platform)
        yield from _find_wrong_base(path, locked)
        yield from _find_wrong_wheels(path, locked)


def _find_wrong_base(path: KeyPath, locked: LockedPlatform) -> Iterator[Mistake]:
    """Yield a mistake if the base of a platform is not that of the request, or cannot be identified.

    `path` is the key of the platform.
    """
    base = locked.base
    if base.name != locked.request.base:
        message = f"{base.name!r} must be {locked.request.base!r}, the base in the request"
        yield _make_mistake(*path, "base", "name", message=message)
    if not (base.digest or base.id):
        yield _make_mistake(*path, "base", message="must have a digest or an id")


def _find_wrong_wheels(path: KeyPath, locked: LockedPlatform) -> Iterator[Mistake]:
    """Yield a mistake for each wheel of a platform that no pip step installs, or that has no source.

    `path` is the key of the platform.
    """
    # Each wheel has the index of the pip step that installs it. Wheels of a uv project have the number
    # `UV_STEP` (-1) instead, because the project is not in the list of pip steps.
    step_numbers = set(range(len(locked.request.pip)))
    if locked.request.uv:
        step_numbers.add(UV_STEP)
    for index, wheel in enumerate(locked.pip):
        if wheel.step not in step_numbers:
            message = f"there is no pip step {wheel.step} in the request"
            yield _make_mistake(*path, "pip", index, "step", message=message)
        # A wheel is either downloaded, or kept: a file in the folder beside the lock.
        if not (wheel.url or wheel.kept):
            message = "is missing, and the wheel is not a kept one"
            yield _make_mistake(*path, "pip", index, "url", message=message)


def attach_lock(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """Return `recipe` with the lock file beside it, so that a build installs the locked packages.

    Parameters
    ----------
    platform : the platform of the image, such as ``linux/arm64``. A lock lists packages for each platform.
    base : the base image, if it differs from the base in the recipe.
    required : whether a missing lock is an error. If False, a recipe without a lock is returned as it is.

    Raises
    ------
    UsageError : the lock cannot be read, belongs to another recipe, has no packages for `platform`, or refers
        to a stored package that is missing. A stale lock is refused, too: the recipe has changed since the
        lock was made, and the error names the changed line of the recipe.
    """
    file = lock_path(recipe)
    if not file.exists():
        if required:
            hint = f"make it: {lock_command(recipe)}"
            raise UsageError(f"{recipe.name} has no lock", where=str(shorten_path(file)), hint=hint)
        # The empty digest records that there was no lock. If a lock is added later, the digest differs, and
        # the image is built again.
        return dataclasses.replace(recipe, sources={**recipe.sources, file: ""})
    lock = read_lock(file)
    locked = _select_platform(lock, recipe, platform, file)
    _refuse_stale(recipe, locked.request, file, base)
    kept_files = _find_kept_files(locked, recipe, file)
    sources = {**recipe.sources, file: hashlib.sha256(files.read_bytes(file)).hexdigest()}
    # The image stores only the part of the lock for its own platform.
    lock_text = render_lock(dataclasses.replace(lock, platforms=(locked,)))
    return dataclasses.replace(recipe, lock=locked, lock_text=lock_text, kept=kept_files, sources=sources)


def _find_kept_files(locked: LockedPlatform, recipe: Recipe, file: Path) -> dict[str, Path]:
    """Return the files of packages that are stored beside the lock `file`, by their names.

    Refuse a lock if one of its kept wheels is missing. No index has such a wheel, so a build needs the file.
    """
    folder = kept_folder(file)
    kept_files = {name: folder / name for name in locked.digests if (folder / name).is_file()}
    for wheel in locked.pip:
        if wheel.kept and wheel.file not in kept_files:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shorten_path(folder)),
                hint=f"copy that folder to this machine too, or: {lock_command(recipe)} --keep-files",
            )
    return kept_files


def _select_platform(lock: Lock, recipe: Recipe, platform: str, file: Path) -> LockedPlatform:
    """Return the part of `lock` that is for `platform`. `file` is the path of the lock, for messages.

    Raises
    ------
    UsageError : the lock has no part for this platform, or belongs to another recipe.
    """
    where = str(shorten_path(file))
    # A lock is found by its file name, so it may be a renamed copy.
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
    """Refuse a lock that no longer matches the recipe.

    A lock is stale if the recipe now requires other packages, options or another base than when the lock was
    made. A build with a stale lock would silently install the old packages.

    Parameters
    ----------
    locked : what the recipe required when the lock was made.
    file : the path of the lock, for messages.
    base : the base image, if it differs from the base in the recipe.

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
    # The option --base has changed the base, not a line of the recipe.
    if base and difference.path == ("image", "base"):
        where = "--base"
    raise UsageError(f"the lock {file.name} is stale: {difference.change}", where=where, hint=hint)


def kept_folder(file: Path) -> Path:
    """Return the folder of the packages that ``imgkit lock --keep-files`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def lock_command(recipe: Recipe) -> str:
    """Return the command that makes the lock of `recipe`: ``imgkit lock mn5``, ``imgkit lock mine.yaml``."""
    if recipe.file.parent == SHIPPED_FOLDER:
        return f"imgkit lock {recipe.name}"
    return f"imgkit lock {shlex.quote(str(shorten_path(recipe.file)))}"


_STEP_FIELDS = {
    "requirements": ("packages", "packages"),
    "options": ("options", "options"),
    "env": ("env", "variables"),
}
"""Field of a `LockedStep` -> the key in a recipe, and the noun for messages."""


class Difference(NamedTuple):
    """A change in a recipe since its lock was made."""

    path: KeyPath
    """The key of the changed value, or of the list from which a value was removed."""
    change: str


def make_request(recipe: Recipe, *, base: str | None = None) -> LockRequest:
    """Return what `recipe` requires: its base, packages and options.

    A lock stores the result, so that a later change of the recipe is noticed. `base` replaces the base of the
    recipe.

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
        uv=_hash_uv_project(image.uv) if image.uv else "",
        pip=tuple(_make_locked_step(step) for step in image.pip),
    )


def _hash_uv_project(uv: UvProject) -> str:
    """Return the digest of the parts of a uv project that determine its packages.

    These are the file uv.lock and the selected extras and groups.
    """
    # A NUL byte cannot occur in a name, so different selections never give the same text.
    selection = "\0".join(("extras", *sorted(uv.extras), "groups", *sorted(uv.groups)))
    lock = files.read_bytes(uv.project / requirements.UV_LOCK)
    return hashlib.sha256(lock + selection.encode()).hexdigest()


def collect_pip_options(step: PipStep) -> tuple[str, ...]:
    """Return all options of a pip step, for example ``("--index-url", "https://...")``.

    They come from the key ``options`` and from the requirements file of the step. URLs among them may contain
    credentials.

    Raises
    ------
    OSError : the requirements file cannot be read.
    """
    options = list(step.options)
    if step.requirements:
        # A line that begins with "-" has options, possibly several. Any other line is a requirement.
        for line in requirements.read_requirements(step.requirements):
            if line.startswith("-"):
                options += shlex.split(line)
    return tuple(options)


def _make_locked_step(step: PipStep) -> LockedStep:
    """Return the requirements, options and variables of a pip step, as the lock stores them.

    Credentials are removed, because a lock is meant to be kept under version control.
    """
    required_packages = list(step.packages)
    if step.requirements:
        lines = requirements.read_requirements(step.requirements)
        # Lines that begin with "-" are options. `collect_pip_options` returns them below.
        required_packages += [line for line in lines if not line.startswith("-")]
    if step.project is not None and step.installs_dependencies:
        required_packages += requirements.read_dependencies(step.project)
    variables = [f"{name}={value}" for name, value in sorted(step.env.items())]
    return LockedStep(
        requirements=tuple(map(hide_secrets, required_packages)),
        options=tuple(map(hide_secrets, collect_pip_options(step))),
        env=tuple(map(hide_secrets, variables)),
    )


def hide_secrets(text: str) -> str:
    """Return `text` with credentials removed from URLs, and with stars in place of other secrets.

    For example, ``https://me:token@host/simple`` becomes ``https://host/simple``.
    """
    return secret_patterns.mask_secrets(re.sub(r"://[^/@\s]*@", "://", text))


def first_difference(new: LockRequest, locked: LockRequest) -> Difference | None:
    """Return the first change of a recipe since its lock was made, or None if nothing has changed.

    Parameters
    ----------
    new : what the recipe requires now.
    locked : what the recipe required when the lock was made.
    """
    # Report only the first change, in the order of a build. The user makes the lock again in any case.
    if new.base != locked.base:
        return Difference(("image", "base"), f"the base is {new.base}, and was {locked.base}")
    if new.apt != locked.apt:
        return _compare_lists(("image", "apt"), "the apt packages", new.apt, locked.apt)
    if new.constraints != locked.constraints:
        message = f"constraints: {' '.join(new.constraints)}, and was {' '.join(locked.constraints)}"
        return Difference(("image", "constraints"), message)
    if new.uv != locked.uv:
        if not new.uv:
            return Difference(("image", "uv"), "there is no uv project")
        return Difference(("image", "uv"), "uv.lock, or the chosen extras and groups, have changed")
    return _find_step_difference(new.pip, locked.pip)


def _find_step_difference(new: Sequence[LockedStep], locked: Sequence[LockedStep]) -> Difference | None:
    """Return the first change in the pip steps of a recipe since its lock was made, or None.

    Parameters
    ----------
    new : the steps that the recipe has now.
    locked : the steps that it had when the lock was made.
    """
    # Compare the steps that exist in both lists. The lists may differ in length, hence `strict=False`.
    for index, (step, locked_step) in enumerate(zip(new, locked, strict=False)):
        for field, (key, noun) in _STEP_FIELDS.items():
            values = getattr(step, field)
            locked_values = getattr(locked_step, field)
            if values != locked_values:
                path = ("image", "pip", index, key)
                return _compare_lists(path, f"the {noun} of this pip step", values, locked_values)
    # Compare the number of steps last. If a step was inserted, the loop above reports the step that now
    # differs, which tells the user more than the number.
    change = f"there are {len(new)} pip steps, and were {len(locked)}"
    if len(new) > len(locked):
        first_new = len(locked)
        return Difference(("image", "pip", first_new), change)
    if len(new) < len(locked):
        return Difference(("image", "pip"), change)
    return None


def _compare_lists(path: KeyPath, noun: str, values: Sequence[str], locked: Sequence[str]) -> Difference:
    """Return the first change in a list of the recipe at the key `path`.

    Parameters
    ----------
    noun : the name of the list in the message, for example ``the apt packages``.
    values : the list in the recipe. It must differ from `locked`.
    locked : the list that the recipe had when the lock was made.
    """
    for index, value in enumerate(values):
        if value not in locked:
            return Difference((*path, index), f"{noun} have {value!r}, which the lock does not know")
    for value in locked:
        if value not in values:
            return Difference(path, f"{noun} no longer have {value!r}")
    # The lists differ but have the same items.
    return Difference(path, f"{noun} have another order")
