"""Refuse an ``imgkit.toml`` that other users can change, and files named in it that others can change.

imgkit finds an ``imgkit.toml`` in the current folder or above it and reads it without being asked. Its values
decide where a job runs, what it mounts and what it starts. So another user who can write the file could run
programs as this user. A path that the user has typed is not checked, because typing it is consent.
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

# The option of verbs that skips these checks.
OPTION = "--trust-folder"
_READ_IT = f"read it; if you trust it, add {OPTION}"


def named_paths(project: ProjectFile, *, with_recipe: bool) -> Iterator[Path]:
    """Yield the paths of files and folders that decide what a job of `project` does.

    They are the folder of code and ``hf.lock``. With `with_recipe`, they are also the recipe, its lock, and
    the files that the recipe reads. The imgkit.toml itself is not among them. System files of a site are left
    out as well: an environment variable names their folder, and `system_files` has stricter rules for them.
    """
    if project.code is not None:
        yield project.code
    yield project.file.with_name(hub.LOCK)
    # A shipped recipe belongs to the installation, whose owner is trusted anyway.
    if with_recipe and project.recipe_file is not None:
        yield from _recipe_paths(project.recipe_file)


def _recipe_paths(file: Path) -> Iterator[Path]:
    """Yield `file`, a recipe or .sif, and for a recipe also its lock and the files that it reads.

    Shipped files and the system files of a site are left out. Each yielded path is checked: other users must
    not be able to change it.
    """
    yield file
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        return
    recipe = load.load(str(file))
    yield lock_file.lock_path(recipe)
    for path in recipe.sources:
        if not path.is_relative_to(FOLDER) and not system_files.is_site(path):
            yield path


def refuse_foreign(path: Path) -> None:
    """Refuse a `path` that can be changed by anyone but this user, root and the owner of imgkit.

    If the path is a symbolic link, both the link and its target are checked. A path that does not exist is
    accepted.

    Raises
    ------
    UsageError : another user can change the path. The error names the owner and the mode, and what to do.
    """
    if path.exists():
        link = Path(os.path.abspath(path))  # noqa: PTH100 - Path.resolve would follow it
        _refuse_foreign_path(link)
        _refuse_foreign_path(path.resolve())


def _refuse_foreign_path(path: Path) -> None:
    """Raise UsageError if another user can change `path`, or can replace it in one of the folders above it.

    `path` must be absolute. If it is a link, the link itself is checked and not its target.
    """
    # This user, root, and the owner of imgkit's own files, whose code runs here anyway.
    trusted_users = (os.geteuid(), 0, Path(__file__).stat().st_uid)
    status = path.lstat()
    if status.st_uid not in trusted_users:
        owner, mode = _owner_and_mode(status)
        message = f"belongs to {owner} (mode {mode}), not to you, root or the owner of imgkit"
        raise UsageError(message, where=str(path), hint=_READ_IT)
    # Linux ignores the mode of a link, so it is not checked.
    if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
        raise _writable_error("every user can write it", path, path)
    for folder in path.parents:
        mode_bits = folder.stat().st_mode
        # In a folder with the sticky bit, such as /tmp, only the owner of a file can replace it.
        if mode_bits & stat.S_IWOTH and not mode_bits & stat.S_ISVTX:
            raise _writable_error(f"every user can replace it in {folder}", path, folder)


def _writable_error(message: str, path: Path, writable: Path) -> UsageError:
    """Return the error about `path` if every user can write to `writable`, the path itself or a folder above.

    Parameters
    ----------
    message : what other users can do with `path`, such as ``every user can write it``.
    """
    owner, mode = _owner_and_mode(writable.stat())
    hint = f"chmod o-w {shlex.quote(str(writable))}\nor {_READ_IT}"
    return UsageError(f"{message} (owner {owner}, mode {mode})", where=str(path), hint=hint)


def _owner_and_mode(status: os.stat_result) -> tuple[str, str]:
    """Return the owner of a file and its mode in octal digits, such as ``0644``.

    The owner is a name, or ``user ID`` if the user has no name on this machine.
    """
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    try:
        return pwd.getpwuid(status.st_uid).pw_name, mode
    except KeyError:
        return f"user {status.st_uid}", mode
