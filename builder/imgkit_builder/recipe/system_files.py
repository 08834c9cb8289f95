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
from imgkit_builder.recipe.problems import choices, nearest, reason
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Line
from imgkit_recipes import SYSTEMS

VARIABLE = "IMGKIT_SYSTEMS"
OF_MACHINE = Path("/etc/imgkit/systems")
SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a system's values were tested, and where: one sentence each; empty: not at all."""

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
        return "documented" if self.documented else "-"


def site_folder() -> Path:
    """Return the site's folder, whether it exists or not.

    Raises
    ------
    UsageError : the variable does not hold an absolute path.
    """
    named = os.environ.get(VARIABLE, "")
    if named and not Path(named).is_absolute():
        hint = f"export {VARIABLE}={Path(named).absolute()}"
        raise UsageError(f"{named!r} is not an absolute path", where=VARIABLE, hint=hint)
    return Path(named) if named else OF_MACHINE


def is_site(file: Path) -> bool:
    """Return whether `file` lies in the site's folder, under its own name or behind a link."""
    folder = site_folder()
    return file.is_relative_to(folder) or file.resolve().is_relative_to(folder.resolve())


def find_all() -> Mapping[str, Path]:
    """Return every system that a recipe can name, with its file; those of the site come last.

    Raises
    ------
    UsageError : the site's folder cannot be read, or has a system with the name of one that imgkit ships.
    """
    shipped = {path.stem: path for path in sorted(SYSTEMS.glob(f"*{SUFFIX}"), key=lambda path: path.stem)}
    folder = site_folder()
    try:
        of_site = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise UsageError(
                "there is no such folder", where=f"{VARIABLE}={folder}", hint=f"unset {VARIABLE}"
            ) from None
        of_site = []
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(folder)) from error
    for path in of_site:
        if path.stem in shipped:
            raise UsageError(
                f"imgkit ships a system named {path.stem!r}",
                where=str(path),
                hint=f"rename the file, and begin it with `extends: {path.stem}` to change some values",
            )
    return shipped | {path.stem: path for path in of_site}


def is_path(ref: str) -> bool:
    """Return whether `ref` names a file rather than a shipped recipe or a known system."""
    return "/" in ref or ref.endswith((SUFFIX, ".yml"))


def locate(ref: str, source: Path) -> Path:
    """Return the absolute path of the system `ref`, a name or a path from the folder of the file `source`.

    Raises
    ------
    UsageError : there is none, or a file of the site that others can write.
    """
    try:
        if not is_path(ref):
            return private(_named(ref, source))
        if is_site(source):
            hint = "a system of a site's folder extends another by its name"
            raise UsageError(f"{ref} is a path", hint=hint)
        file = (source.parent / ref).absolute()
        if file.is_file():
            return private(file)
        siblings = sorted(path.name for path in file.parent.glob("*.y*ml"))
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise UsageError(f"{ref!r} is not a system: {reason(error)}") from error
    near = nearest(file.name, siblings)
    hint = f"did you mean {near}?" if near else "imgkit list --systems shows the known systems"
    raise UsageError(f"there is no file {ref}", hint=hint)


def _named(name: str, source: Path) -> Path:
    names = find_all()
    if name in names:
        return names[name]
    sibling = source.parent / f"{name}{SUFFIX}"
    advice = f"; for the file {sibling.name} write ./{sibling.name}" if sibling.is_file() else ""
    raise UsageError(f"there is no system {name!r}", hint=choices(name, names) + advice)


def private(file: Path) -> Path:
    """Return `file`, unless it is a site's and another user than its owner can write it.

    Raises
    ------
    UsageError : its group or all users can write it or its folder; names the command that ends that.
    """
    if not is_site(file):
        return file
    # Who can write a folder can replace its files; behind a link, the target's folder counts too.
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
    return file
