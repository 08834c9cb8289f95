"""Refuse an ``imgkit.toml`` that other users can change, and files that it names.

imgkit reads that file because it is in the current folder or above it. Its values decide where a job runs,
what it mounts and what it starts. A path that the user has typed is taken as consent, and is not checked.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.data import hub
from imgkit_builder.project.toml_file import ProjectFile
from imgkit_builder.recipe import load, lock_file, system_files
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

# The option of the verbs that skips these checks.
OPTION = "--trust-folder"
_READ_IT = f"read it; if you trust it, add {OPTION}"


def named_paths(project: ProjectFile, *, with_recipe: bool) -> Iterator[Path]:
    """Yield the paths that decide what a job of `project` does, apart from its imgkit.toml itself.

    They are the code folder and ``hf.lock``, and with `with_recipe` also the recipe, its lock, and the files
    that the recipe reads. The system files of a site are left out: an environment variable names their
    folder, and `system_files` has stricter rules for them.
    """
    if project.code is not None:
        yield project.code
    yield project.file.with_name(hub.LOCK)
    # A shipped recipe belongs to the installation, whose owner is trusted anyway.
    if with_recipe and project.recipe_file is not None:
        yield from _recipe_paths(project.recipe_file)


def _recipe_paths(file: Path) -> Iterator[Path]:
    """Yield the path of a recipe or .sif, and for a recipe the paths of its lock and of what it reads."""
    yield file
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return
    recipe = load.load(str(file))
    yield lock_file.lock_path(recipe)
    for path in recipe.sources:
        if not path.is_relative_to(FOLDER) and not system_files.is_site(path):
            yield path


def refuse_foreign(path: Path) -> None:
    """Raise an error if users other than this one, root and the owner of imgkit can change `path`.

    For a symbolic link, both the link and its target are checked. A path that does not exist is accepted.

    Raises
    ------
    UsageError : another user can change it. The error names the owner and the mode, and what to type.
    """
    if path.exists():
        link = Path(os.path.abspath(path))  # noqa: PTH100 - Path.resolve would follow it
        _refuse_foreign_path(link)
        _refuse_foreign_path(path.resolve())


def _refuse_foreign_path(path: Path) -> None:
    """Raise UsageError if another user can change `path`, or replace it by means of a folder above it.

    The path is absolute. If it is a link, the link itself is checked and not its target.
    """
    trusted_users = (os.geteuid(), 0, Path(__file__).stat().st_uid)
    status = path.lstat()
    if status.st_uid not in trusted_users:
        owner, mode = _owner_and_mode(status)
        message = f"belongs to {owner} (mode {mode}), not to you, root or the owner of imgkit"
        raise UsageError(message, where=str(path), hint=_READ_IT)
    # Linux ignores the mode of a link.
    if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
        raise _writable_error("every user can write it", path, path)
    for folder in path.parents:
        mode_bits = folder.stat().st_mode
        # In a folder with the sticky bit, such as /tmp, only the owner of a file can replace it.
        if mode_bits & stat.S_IWOTH and not mode_bits & stat.S_ISVTX:
            raise _writable_error(f"every user can replace it in {folder}", path, folder)


def _writable_error(message: str, path: Path, writable: Path) -> UsageError:
    """Return the error about `path` if every user can write to `writable`, which is `path` or a folder above.

    Parameters
    ----------
    message : what other users can do with `path`: ``every user can write it``.
    """
    owner, mode = _owner_and_mode(writable.stat())
    hint = f"chmod o-w {shlex.quote(str(writable))}\nor {_READ_IT}"
    return UsageError(f"{message} (owner {owner}, mode {mode})", where=str(path), hint=hint)


def _owner_and_mode(status: os.stat_result) -> tuple[str, str]:
    """Return the owner's name, or ``user ID`` if it has no name, and the mode in octal digits: ``0644``."""
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    try:
        return pwd.getpwuid(status.st_uid).pw_name, mode
    except KeyError:
        return f"user {status.st_uid}", mode
