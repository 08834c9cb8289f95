"""A recipe's lock: TOML text with one short line per value, so that a diff shows what an upgrade changed.

`follow` attaches the lock next to a recipe to it, if that is the lock of this recipe, base and platform.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import problems, requirements, rules
from imgkit_builder.recipe.model import (
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
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, choices, shown
from imgkit_builder.recipe.uv_lock import UV_LOCK
from imgkit_entrypoints import files, json_text, secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.json_text import Fault
from imgkit_recipes import FOLDER

SUFFIX = ".lock"
KEPT_SUFFIX = ".files"
"""Follows the name of a lock: the folder of the packages that ``imgkit lock --keep-files`` stores."""
_HEAD = "# Made by imgkit lock, which also changes it. Keep it beside its recipe, under version control.\n"
_MOST_BYTES = 16 << 20
_AGAIN = "do not edit a lock; make it again: imgkit lock RECIPE"
_URL = r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]+"


def _like(pattern: str, what: str) -> rules.Check:
    """A rule by which the whole text matches `pattern`."""

    def rule(text: str) -> Iterator[rules.Fault]:
        if not re.fullmatch(pattern, text):
            yield f"{text[:60]!r} must be {what}", _AGAIN

    return rule


def _base(text: str) -> Iterator[rules.Fault]:
    """An image reference; one of --base may lack a tag."""
    try:
        rules.parse_reference(text)
    except rules.BadReference as bad:
        yield bad.what, bad.hint


_VERSION = _like(r"[A-Za-z0-9][A-Za-z0-9.+~:_!-]*", "a version")
_DIGEST = _like(r"(sha256:[0-9a-f]{64})?", "sha256: and 64 hex digits")
_TOOL = _like(r"[A-Za-z0-9 ._+-]*", "the version or the options of a program")
_FILE = r"[A-Za-z0-9][A-Za-z0-9.+~%:_!-]*"
_SHA256 = _like(r"[0-9a-f]{64}", "64 hex digits")
_PLAIN_URL = "a URL of http or https, without credentials and special characters"
_TEXT_RULES: Mapping[str, rules.Check] = {
    "recipe": rules.recipe_name,
    "imgkit": _VERSION,
    "platforms.platform": rules.platform,
    "platforms.request.base": _base,
    "platforms.request.apt": rules.apt_package,
    "platforms.request.constraints": rules.pip_name,
    "platforms.request.uv": _like(r"([0-9a-f]{64})?", "64 hex digits"),
    "platforms.base.digest": _DIGEST,
    "platforms.base.id": _DIGEST,
    "platforms.tools.mksquashfs": _TOOL,
    "platforms.tools.compressor": _TOOL,
    "platforms.apt.name": _like(r"[a-z0-9][a-z0-9+.-]+", "the name of a Debian package"),
    "platforms.apt.version": _VERSION,
    "platforms.apt.architecture": _like(r"[a-z0-9][a-z0-9-]*", "an architecture"),
    "platforms.apt.file": _like(rf"{_FILE}\.deb", "the name of a .deb, without a folder"),
    "platforms.apt.url": _like(_URL, _PLAIN_URL),
    "platforms.apt.sha256": _SHA256,
    "platforms.pip.name": rules.pip_name,
    "platforms.pip.version": _VERSION,
    "platforms.pip.file": _like(rf"{_FILE}\.whl", "the name of a .whl, without a folder"),
    "platforms.pip.url": _like(rf"({_URL})?", _PLAIN_URL),
    "platforms.pip.sha256": _SHA256,
}
"""What a text must be, by its key. Any other text equals one of the recipe, and has to be printable only."""


def beside(recipe: Recipe) -> Path:
    """Where the lock of `recipe` lies: next to its file; for a shipped recipe in the working folder."""
    if recipe.file.parent == FOLDER:
        return Path.cwd() / f"{recipe.name}{SUFFIX}"
    return recipe.file.with_suffix(SUFFIX)


def text(lock: Lock) -> str:
    """The content of the file; the same lock gives the same bytes."""
    return _HEAD + "".join(_table(lock, ""))


def section(lock: Lock, part: LockedPlatform) -> str:
    """The content of a file with `part` alone."""
    return text(dataclasses.replace(lock, platforms=(part,)))


def _table(value: Any, above: str) -> Iterator[str]:
    """Yield the lines of a dataclass: plain values first, as TOML wants, then the tables below it."""
    tables = []
    for known in dataclasses.fields(value):
        found = getattr(value, known.name)
        key = f"{above}.{known.name}" if above else known.name
        if dataclasses.is_dataclass(found):
            tables += [(f"[{key}]", key, found)]
        elif isinstance(found, tuple) and found and dataclasses.is_dataclass(found[0]):
            tables += [(f"[[{key}]]", key, one) for one in found]
        elif known.name == "schema" or found != known.default:
            yield f"{known.name} = {_plain(found)}\n"
    for head, key, found in tables:
        lines = "".join(_table(found, key))
        if lines or head.startswith("[["):
            yield f"\n{head}\n{lines}" if not lines.startswith("\n") else f"\n{head}{lines}"


def _plain(value: str | bool | int | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        items = [_plain(one) for one in value]
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
        value; lists all faults with their lines.
    """
    try:
        data = files.read_bytes(file, most_bytes=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(error, file) from error
    return parse(data, file)


def _unreadable(error: Exception, file: Path) -> UsageError:
    return UsageError(f"the lock cannot be read: {error}", where=str(file), hint=_AGAIN)


def parse(data: str | bytes, file: Path) -> Lock:
    """The lock in `data`, the content of `file`.

    Raises
    ------
    UsageError : as `read`.
    """
    try:
        content = (data if isinstance(data, str) else data.decode()).replace("\r\n", "\n")
    except ValueError as error:
        raise _unreadable(error, file) from error
    found = _Faults(file, content)
    values = _parsed(content, found)
    schema = values.get("schema", LOCK_SCHEMA)
    if not found.problems.errors and schema != LOCK_SCHEMA:
        later = isinstance(schema, int) and schema > LOCK_SCHEMA
        hint = "use that imgkit, or make the lock again: imgkit lock RECIPE" if later else _AGAIN
        what = (
            f"schema {schema} is that of a later imgkit" if later else f"{schema!r} is not a schema of a lock"
        )
        found.add(("schema",), what, hint)
    if not found.problems.errors:
        lock, faults = json_text.checked(Lock, values, closed=True)
        for fault in faults:
            found.add(fault.path, *_explained(fault))
        if not faults:
            _check_values(lock, found)
    if found.problems.errors:
        raise RecipeErrors(found.problems.errors, of=file.name)
    made: Lock = lock
    return made


def _explained(fault: Fault) -> tuple[str, str]:
    """What is wrong with a value, and the hint."""
    if fault.kind == "missing":
        return "is missing", _AGAIN
    if fault.kind == "unknown":
        return "unknown key", choices(str(fault.path[-1]), fault.expected)
    if fault.kind == "type" and dataclasses.is_dataclass(fault.expected):
        return "must be a table", _AGAIN
    if fault.kind == "type" and not isinstance(fault.value, str | int | list | dict):
        return "must not be a date, a time or a number with a point", _AGAIN
    return fault.text("").partition(" ")[2], _AGAIN


class _Faults:
    """Collects the faults of a file, each with its key and, below a package, with the package's name."""

    def __init__(self, file: Path, content: str) -> None:
        self.problems = Collector(lines={file: content.split("\n")}, shows=(file.parent.resolve(),))
        self.values: Any = {}
        self._file = file

    def add(self, path: KeyPath, what: str, hint: str = _AGAIN) -> None:
        """Add a fault of the value at `path`."""
        key, value = "", self.values
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                value = None
            key += f"[{part}]" if isinstance(part, int) else f".{part}"
            if isinstance(part, int) and isinstance(value, dict) and isinstance(value.get("name"), str):
                key += f" ({value['name'][:60]})"
        self.at(0, 0, f"{key.lstrip('.')}: {what}", hint)

    def at(self, line: int, column: int, what: str, hint: str = _AGAIN) -> None:
        """Add a fault in a line; 0: the file as a whole."""
        self.problems.error(Position(file=self._file, line=line, column=column), (), what, hint)


def _parsed(content: str, found: _Faults) -> dict[str, Any]:
    try:
        found.values = problems.parse_toml(content)
    except problems.NotToml as error:
        found.at(error.line, error.column, error.what)
    values: dict[str, Any] = found.values
    return values


def _check_values(lock: Lock, found: _Faults) -> None:
    for path, value in _texts(lock, ()):
        key = ".".join(one for one in path if isinstance(one, str))
        faults = list(rules.printable(value)) or list(_TEXT_RULES.get(key, rules.printable)(value))
        for what, _ in faults:
            found.add(path, what)
    seen: set[str] = set()
    for number, part in enumerate(lock.platforms):
        path = ("platforms", number)
        if part.platform in seen:
            found.add((*path, "platform"), f"{part.platform} occurs twice")
        seen.add(part.platform)
        if not 0 <= part.source_date_epoch < 1 << 32:
            found.add((*path, "source_date_epoch"), "must be seconds since 1970, and fit into 32 bits")
        if part.base.name != part.request.base:
            what = f"{part.base.name!r} must be {part.request.base!r}, the base in the request"
            found.add((*path, "base", "name"), what)
        if not (part.base.digest or part.base.id):
            found.add((*path, "base"), "must have a digest or an id")
        for index, deb in enumerate(part.apt):
            if deb.size_bytes < 0:
                found.add((*path, "apt", index, "size_bytes"), "must be a size")
        for index, wheel in enumerate(part.pip):
            first = UV_STEP if part.request.uv else 0
            if not first <= wheel.step < len(part.request.pip):
                found.add((*path, "pip", index, "step"), f"there is no pip step {wheel.step} in the request")
            if not (wheel.url or wheel.kept):
                found.add((*path, "pip", index, "url"), "is missing, and the wheel is not a kept one")


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in a value of a lock, with its place."""
    if isinstance(value, str):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _texts(one, (*path, number))


def follow(recipe: Recipe, *, platform: str, base: str | None = None, required: bool = False) -> Recipe:
    """`recipe` with the lock that lies next to it; unchanged where there is none.

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
            raise UsageError(
                f"{recipe.name} has no lock", where=str(shown(file)), hint=f"make it: {command(recipe)}"
            )
        # A lock that appears later changes what a build makes.
        return dataclasses.replace(recipe, sources={**recipe.sources, file: ""})
    lock = read(file)
    return attached(recipe, lock, file, platform=platform, base=base)


def attached(recipe: Recipe, lock: Lock, file: Path, *, platform: str, base: str | None = None) -> Recipe:
    """`recipe` with the part of `lock`, which `file` holds, for `platform`. Raises as `follow` does."""
    again = f"{command(recipe)}; to ignore the lock: --no-lock"
    place = str(shown(file))
    if lock.recipe != recipe.name:
        what = f"it is the lock of the recipe {lock.recipe!r}, and not of {recipe.name!r}"
        raise UsageError(what, where=place, hint=f"rename or remove it, or: {again}")
    part = lock.of(platform)
    if part is None:
        has = ", ".join(one.platform for one in lock.platforms) or "none"
        hint = f"{command(recipe)} --platform {platform}; to ignore the lock: --no-lock"
        raise UsageError(f"the lock is not for {platform}; it has: {has}", where=place, hint=hint)
    try:
        asked = request_of(recipe, base=base)
    except (OSError, ValueError) as error:
        what = f"a file of the recipe cannot be read: {error}"
        raise UsageError(what, where=recipe.where("image", "pip"), hint=f"restore it, or: {again}") from error
    stale = difference(asked, part.request)
    if stale:
        where = "--base" if base and stale.path == ("image", "base") else recipe.where(*stale.path)
        raise UsageError(f"the lock {file.name} is stale: {stale.what}", where=where, hint=again)
    kept = _kept(part, kept_folder(file))
    for wheel in part.pip:
        if wheel.kept and wheel.file not in kept:
            raise UsageError(
                f"{wheel.file} is missing, which was built when the lock was made",
                where=str(shown(kept_folder(file))),
                hint=f"copy that folder to this machine too, or: {command(recipe)} --keep-files",
            )
    digest = hashlib.sha256(files.read_bytes(file)).hexdigest() if file.is_file() else ""
    return dataclasses.replace(
        recipe,
        lock=part,
        lock_text=section(lock, part),
        kept=kept,
        sources={**recipe.sources, file: digest},
    )


def kept_folder(file: Path) -> Path:
    """The folder of the packages that ``imgkit lock --keep-files`` stores for the lock `file`."""
    return file.with_name(file.name + KEPT_SUFFIX)


def _kept(part: LockedPlatform, folder: Path) -> Mapping[str, Path]:
    names = (*(one.file for one in part.apt), *(one.file for one in part.pip))
    return {name: folder / name for name in names if (folder / name).is_file()}


def command(recipe: Recipe) -> str:
    """The command that makes the lock of `recipe`."""
    shipped = recipe.file.parent == FOLDER
    return f"imgkit lock {recipe.name if shipped else shlex.quote(str(shown(recipe.file)))}"


_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value of a recipe that its lock does not know."""

    path: KeyPath
    """The recipe's value, or the list that lacks one."""
    what: str


def request_of(recipe: Recipe, *, base: str | None = None) -> LockRequest:
    """What `recipe` asks for, on `base` (default: the recipe's).

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
        pip=tuple(_step(one) for one in image.pip),
    )


def _uv(uv: UvProject) -> str:
    """The digest of what a lock takes from a uv project."""
    lock = uv.project / UV_LOCK
    # A recipe out of an image comes without the files that it names; its lock is whole without them.
    content = files.read_bytes(lock) if lock.is_file() else None
    words = "\0".join(("extras", *sorted(uv.extras), "groups", *sorted(uv.groups)))
    return _UNKNOWN if content is None else hashlib.sha256(content + words.encode()).hexdigest()


def options_of(step: PipStep) -> tuple[str, ...]:
    """The options of a pip step, then those that its requirements file states; URLs may hold credentials.

    Raises
    ------
    OSError : the requirements file cannot be read.
    """
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    return (*step.options, *(word for line in lines if line.startswith("-") for word in shlex.split(line)))


def _step(step: PipStep) -> LockedStep:
    lines = requirements.of_file(step.requirements) if step.requirements else ()
    project = requirements.of_project(step.project) if step.project else ()
    stated = [line for line in lines if not line.startswith("-")]
    return LockedStep(
        requirements=_public((*step.packages, *stated, *project)),
        options=_public(options_of(step)),
        env=_public(f"{name}={value}" for name, value in sorted(step.env.items())),
    )


def _public(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(public, texts))


def public(text: str) -> str:
    """`text` without credentials in URLs, and with stars for other secrets: others read locks and images."""
    return secret_patterns.masked(re.sub(r"://[^/@\s]*@", "://", text))


def difference(now: LockRequest, locked: LockRequest) -> Difference | None:
    """The first value in which the request `now` of a recipe differs from the one that was `locked`."""
    if now.base != locked.base:
        return Difference(path=("image", "base"), what=f"the base is {now.base}, and was {locked.base}")
    if found := _of_list(now.apt, locked.apt, ("image", "apt"), "the apt packages"):
        return found
    if now.constraints != locked.constraints:
        words = (" ".join(one.constraints) for one in (now, locked))
        return Difference(path=("image", "constraints"), what="constraints: {}, and was {}".format(*words))
    if now.uv not in (locked.uv, _UNKNOWN):
        said = (
            "uv.lock, or the chosen extras and groups, have changed" if now.uv else "there is no uv project"
        )
        return Difference(path=("image", "uv"), what=said)
    for number, (new, old) in enumerate(zip(now.pip, locked.pip, strict=False)):
        path: KeyPath = ("image", "pip", number)
        found = (
            _of_list(new.requirements, old.requirements, (*path, "packages"), "the packages of this pip step")
            or _of_list(new.options, old.options, (*path, "options"), "the options of this pip step")
            or _of_list(new.env, old.env, (*path, "env"), "the variables of this pip step")
        )
        if found:
            return found
    if len(now.pip) != len(locked.pip):
        last = ("image", "pip", len(locked.pip)) if len(now.pip) > len(locked.pip) else ("image", "pip")
        return Difference(path=last, what=f"there are {len(now.pip)} pip steps, and were {len(locked.pip)}")
    return None


def _of_list(now: Sequence[str], locked: Sequence[str], path: KeyPath, what: str) -> Difference | None:
    if now == locked:
        return None
    added = next((number for number, one in enumerate(now) if one not in locked), None)
    if added is not None:
        return Difference(
            path=(*path, added), what=f"{what} have {now[added]!r}, which the lock does not know"
        )
    gone = next((one for one in locked if one not in now), None)
    if gone is not None:
        return Difference(path=path, what=f"{what} no longer have {gone!r}")
    return Difference(path=path, what=f"{what} have another order")
