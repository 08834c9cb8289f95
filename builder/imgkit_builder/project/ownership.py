"""Refuse an ``imgkit.toml`` that nobody named, and what it names, if other users can change it.

Its values decide where a job runs, what it mounts and what it starts. A path that the user types is consent,
and is not checked.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.project.toml_file import ProjectFile
from imgkit_builder.recipe import load, lock_file, system_files
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

OPTION = "--trust-folder"
_LOOK = f"read it; if you trust it, add {OPTION}"


def named_paths(project: ProjectFile, *, with_recipe: bool) -> Iterator[Path]:
    """Yield what `project` names: its code folder, its recipe with the lock, and every file that it reads.

    A site's systems are left out: the environment names their folder, and `system_files` has stricter rules.
    """
    if project.code is not None:
        yield project.code
    file = project.recipe_file
    if not with_recipe or file is None:
        return
    yield file
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return
    recipe = load.load(str(file))
    yield lock_file.beside(recipe)
    for path in recipe.sources:
        if not path.is_relative_to(FOLDER) and not system_files.is_site(path):
            yield path


def refuse_foreign(path: Path) -> None:
    """Raise an error if users other than this one, root and the owner of imgkit can change `path`.

    Of a link, both the link and what it leads to count. A path that does not exist passes.

    Raises
    ------
    UsageError : names the owner or the mode, and what to type.
    """
    if not path.exists():
        return
    for end in dict.fromkeys((Path(os.path.abspath(path)), path.resolve())):  # noqa: PTH100 - keeps links
        _refuse_owner(end)
        for place in (end, *end.parents):
            _refuse_mode(end, place)


def _refuse_owner(path: Path) -> None:
    status = path.lstat()
    if status.st_uid in (os.geteuid(), 0, Path(__file__).stat().st_uid):
        return
    raise UsageError(
        f"belongs to {_user(status)} (mode {_octal(status)}), not to you, root or the owner of imgkit",
        where=str(path),
        hint=_LOOK,
    )


def _refuse_mode(path: Path, place: Path) -> None:
    """Refuse `path` if every user can write `place`, which is `path` or a folder above it."""
    status = place.lstat() if place == path else place.stat()
    is_safe = stat.S_ISLNK(status.st_mode) or (place != path and status.st_mode & stat.S_ISVTX)
    if is_safe or not status.st_mode & stat.S_IWOTH:
        return
    what = "every user can write it" if place == path else f"every user can replace it in {place}"
    raise UsageError(
        f"{what} (owner {_user(status)}, mode {_octal(status)})",
        where=str(path),
        hint=f"chmod o-w {shlex.quote(str(place))}\nor {_LOOK}",
    )


def _octal(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _user(status: os.stat_result) -> str:
    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"user {status.st_uid}"
