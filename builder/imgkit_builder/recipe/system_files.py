"""Files that describe a system, apart from images: those of imgkit, those of a site, and a user's own.

A site's folder is that of ``$IMGKIT_SYSTEMS``, or ``/etc/imgkit/systems``. Only their owners may be able to
write its files.
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
    """Return the site's folder, whether it exists or not.

    Raises
    ------
    UsageError : the variable does not hold an absolute path.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return MACHINE_FOLDER
    folder = Path(value)
    if not folder.is_absolute():
        hint = f"export {VARIABLE}={folder.absolute()}"
        raise UsageError(f"{value!r} is not an absolute path", where=VARIABLE, hint=hint)
    return folder


def is_site(file: Path) -> bool:
    """Return whether `file` lies in the site's folder of systems. Links are followed, too."""
    folder = site_folder()
    return file.is_relative_to(folder) or file.resolve().is_relative_to(folder.resolve())


def find_systems() -> Mapping[str, Path]:
    """Return the file of every system that a recipe can name: first imgkit's, then the site's.

    Raises
    ------
    UsageError : the site's folder cannot be read, or has a system with the name of one that imgkit ships.
    """
    # Sorted without the suffix: "mn5-gpu.yaml" comes before "mn5.yaml", but the name "mn5" comes first.
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

    A missing folder means that the site has no systems, unless `VARIABLE` names it.

    Raises
    ------
    UsageError : the folder that `VARIABLE` names is missing, or the folder cannot be read.
    """
    folder = site_folder()
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
    """Return whether `ref` names a file rather than a shipped recipe or a known system."""
    return "/" in ref or ref.endswith((SUFFIX, ".yml"))


def locate_system(ref: str, source: Path) -> Path:
    """Return the absolute path of the file of the system `ref`.

    Parameters
    ----------
    ref : the name of a system, or a path that starts at the folder of `source`.
    source : the file that names the system.

    Raises
    ------
    UsageError : there is no such system, or it is a file of the site that others than its owner can write.
    """
    try:
        if not is_path(ref):
            file = _find_by_name(ref, source)
            refuse_writable(file)
            return file
        if is_site(source):
            hint = "a system of a site's folder extends another by its name"
            raise UsageError(f"{ref} is a path", hint=hint)
        file = (source.parent / ref).absolute()
        if file.is_file():
            refuse_writable(file)
            return file
        siblings = sorted(path.name for path in file.parent.glob("*.y*ml"))
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a system: {error_reason(error)}") from error
    nearest = nearest_name(file.name, siblings)
    hint = "imgkit list --systems shows the known systems"
    if nearest:
        hint = f"did you mean {nearest}?"
    raise UsageError(f"there is no file {ref}", hint=hint)


def _find_by_name(name: str, source: Path) -> Path:
    """Return the file of the system `name`. `source` is the file that names it, for the hint."""
    systems = find_systems()
    if name in systems:
        return systems[name]
    hint = allowed_hint(name, systems)
    sibling = source.parent / f"{name}{SUFFIX}"
    if sibling.is_file():
        hint += f"; for the file {sibling.name} write ./{sibling.name}"
    raise UsageError(f"there is no system {name!r}", hint=hint)


def refuse_writable(file: Path) -> None:
    """Refuse a file of the site's folder that others than its owner can write.

    The jobs of all users run commands of that file, so anybody who can write it could run programs as them.

    Raises
    ------
    UsageError : the group or all users can write the file or its folder. The hint is the chmod that ends it.
    """
    if not is_site(file):
        return
    # The folders count, too: whoever can write a folder can replace the files in it. If the file is a link,
    # so does the folder of its target.
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
