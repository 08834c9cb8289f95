"""Find the files that describe a system without an image.

They are shipped with imgkit, provided by a site, or written by a user. The site's folder is
``$IMGKIT_SYSTEMS``, or ``/etc/imgkit/systems`` by default. Files in it must be writable by their owner only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.recipe.model import KEYS
from imgkit_builder.recipe.problems import allowed_hint, error_reason, nearest_name
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Line
from imgkit_recipes import SYSTEMS

VARIABLE = "IMGKIT_SYSTEMS"
MACHINE_FOLDER = Path("/etc/imgkit/systems")
SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a system's values were tested, and where, in one sentence each. An empty text means not at all."""

    __pydantic_config__ = KEYS

    documented: Line = ""
    """The documentation that the values come from."""
    rendered: Line = ""
    """Where the job scripts for it are compared, byte by byte."""
    simulated: Line = ""
    """Where jobs have run with it on a cluster that imitates this one, and what differs there."""
    run: Line = ""
    """Who has run jobs with it on the machine itself, and when."""

    @property
    def strongest(self) -> str:
        """Return the strongest kind of test, as `imgkit list --systems` prints it."""
        # The strongest kind of test comes first.
        if self.run:
            return "ran there"
        if self.simulated:
            return "simulated"
        if self.rendered:
            return "script only"
        if self.documented:
            return "documented"
        return "-"


def site_folder() -> Path:
    """Return the folder of the site's systems. It may not exist.

    Raises
    ------
    UsageError : the variable IMGKIT_SYSTEMS is set to a relative path.
    """
    stated_folder = os.environ.get(VARIABLE, "")
    if not stated_folder:
        return MACHINE_FOLDER
    folder = Path(stated_folder)
    if not folder.is_absolute():
        hint = f"export {VARIABLE}={folder.absolute()}"
        raise UsageError(f"{stated_folder!r} is not an absolute path", where=VARIABLE, hint=hint)
    return folder


def is_site(file: Path) -> bool:
    """Return whether `file`, or the target of a link `file`, is in the site's folder of systems."""
    folder = site_folder()
    return file.is_relative_to(folder) or file.resolve().is_relative_to(folder.resolve())


def find_systems() -> Mapping[str, Path]:
    """Return every system that a recipe can name, with its file. imgkit's own systems come first.

    Raises
    ------
    UsageError : the site's folder cannot be read, or one of its systems has the name of a shipped one.
    """
    # Sort by name without the suffix. As paths, "mn5-gpu.yaml" would come before "mn5.yaml".
    shipped_files = sorted(SYSTEMS.glob(f"*{SUFFIX}"), key=lambda path: path.stem)
    systems = {path.stem: path for path in shipped_files}
    for path in _list_site_files():
        name = path.stem
        if name in systems:
            raise UsageError(
                f"imgkit ships a system named {name!r}",
                where=str(path),
                hint=f"rename the file, and begin it with `extends: {name}` to change some values",
            )
        systems[name] = path
    return systems


def _list_site_files() -> list[Path]:
    """Return the files of the site's systems, sorted by path.

    A missing default folder means that the site has no systems. A missing folder that `VARIABLE` names is an
    error.

    Raises
    ------
    UsageError : the folder that `VARIABLE` names is missing, or the folder cannot be read.
    """
    folder = site_folder()
    # Files of other kinds, such as notes, may be in the folder, too.
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        if not os.environ.get(VARIABLE):
            return []
        where = f"{VARIABLE}={folder}"
        hint = f"name an existing folder, or unset {VARIABLE}"
        raise UsageError("there is no such folder", where=where, hint=hint) from None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(folder)) from error


def is_path(ref: str) -> bool:
    """Return whether `ref` is a path, rather than the name of a shipped recipe or a known system."""
    return "/" in ref or ref.endswith((SUFFIX, ".yml"))


def locate_system(ref: str, source: Path | None = None) -> Path:
    """Return the absolute path of the file that describes the system `ref`.

    Parameters
    ----------
    ref : the name of a system, or a path relative to the folder of `source`.
    source : the file that names the system. None for a system that the user names. Then a path is relative to
        the working directory.

    Raises
    ------
    UsageError : there is no such system, or it is a file of the site that users other than its owner can
        write.
    """
    folder = Path.cwd() if source is None else source.parent
    try:
        file = _find_by_path(ref, folder, source) if is_path(ref) else _find_by_name(ref, folder)
        refuse_writable(file)
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a system: {error_reason(error)}") from error
    return file


def _find_by_path(ref: str, folder: Path, source: Path | None) -> Path:
    """Return the absolute path of the file `ref` in `folder`. The hint of an error names a similar file.

    `source` is the file that names the system, or None for a system that the user names.
    """
    # A system in the site's folder must not extend a file outside of it, whose permissions are not checked.
    if source is not None and is_site(source):
        hint = "a system of a site's folder extends another by its name"
        raise UsageError(f"{ref} is a path", hint=hint)
    file = (folder / ref).absolute()
    if file.is_file():
        return file
    nearest = nearest_name(file.name, sorted(path.name for path in file.parent.glob("*.y*ml")))
    hint = f"did you mean {nearest}?" if nearest else "imgkit list --systems shows the known systems"
    raise UsageError(f"there is no file {ref}", hint=hint)


def _find_by_name(name: str, folder: Path) -> Path:
    """Return the file of the system `name`. The hint of an error names a file of this name in `folder`."""
    systems = find_systems()
    if name in systems:
        return systems[name]
    hint = allowed_hint(name, systems)
    file = folder / f"{name}{SUFFIX}"
    if file.is_file():
        hint += f"; for the file {file.name} write ./{file.name}"
    raise UsageError(f"there is no system {name!r}", hint=hint)


def refuse_writable(file: Path) -> None:
    """Refuse a file in the site's folder that users other than its owner can write.

    The jobs of all users run commands from that file. Anybody who can write it could run programs as those
    users.

    Raises
    ------
    UsageError : the group or all users can write the file or its folder. The hint is the chmod command that
        fixes it.
    """
    if not is_site(file):
        return
    # Check the folders, too, because whoever can write a folder can replace the files in it. If the file is a
    # link, this includes the folder of its target.
    for path in dict.fromkeys((site_folder(), file.parent, file.resolve().parent, file)):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            writers = "everybody" if mode & stat.S_IWOTH else "its group"
            kind = "folder" if stat.S_ISDIR(mode) else "file"
            message = f"{writers} can write this {kind} of systems"
            raise UsageError(message, where=str(path), hint=f"chmod go-w {path}")
