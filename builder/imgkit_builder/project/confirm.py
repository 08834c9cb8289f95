"""What a folder of another person could do: its values are shown before the first run with them."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.project import toml_file
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe import host_effects, system_files
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import ToolMissing
from imgkit_recipes import FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignValues:
    """The values of a folder that decide where the job runs, what it can reach and what it does."""

    file: Path
    """The imgkit.toml, or the recipe where that was named beside it."""
    toml: ProjectValues
    recipe: tuple[tuple[str, str], ...] = ()
    """Keys and values of recipes."""

    @property
    def shown(self) -> tuple[tuple[str, str], ...]:
        """Each value with its name."""
        values = self.toml
        env = (one if "=" in one else f"{one} (with its value from here)" for one in values.env)
        return (
            *((("remote", values.remote),) if values.remote else ()),
            *(("env", one) for one in env),
            *(("bind", one) for one in values.binds),
            *((("code", values.code),) if values.code else ()),
            *((("command", shlex.join(values.command)),) if values.command else ()),
            *(("recipe", f"{key}: {value}") for key, value in self.recipe),
        )

    @property
    def digest(self) -> str:
        """The digest of exactly these values; whole, as two files with one short digest can be found."""
        values = self.toml
        more = filter(None, (values.code, self.recipe))
        named = [values.remote, values.env, values.binds, values.command, *more]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()

    @property
    def is_known(self) -> bool:
        """Whether there is nothing to confirm, or this user has confirmed these values on this machine."""
        return not self.shown or self._mark.is_file()

    def remember(self) -> None:
        """Take these values as confirmed from now on.

        Raises
        ------
        OSError : the state folder cannot be written.
        """
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        files.put(self._mark, f"{self.file}\n")

    @property
    def _mark(self) -> Path:
        return files.state_dir() / "confirmed" / self.digest


def remember_author(file: Path) -> None:
    """Take this user as the author of the imgkit.toml `file`, which ``imgkit init`` has just written.

    Raises
    ------
    OSError : the state folder cannot be written.
    """
    mark = _author_mark(file)
    mark.parent.mkdir(parents=True, exist_ok=True)
    files.put(mark, f"{file}\n")


def is_authors(project: ProjectFile, recipes: Sequence[Target]) -> bool:
    """Whether this user has made the imgkit.toml, and nobody else can have changed it or its recipe since.

    The files must belong to the user alone. In a git repository, all commits of them must be the user's.
    """
    if not _author_mark(project.file).is_file():
        return False
    found = {project.file}
    for target in recipes:
        if target.file.parent != FOLDER:
            if not target.positions:  # an image, or JSON that states no places
                return False
            found |= {target.file, *(place.file for place in target.positions.values())}
    # The values of a site's systems are confirmed apart, by `of_site`.
    return all(
        _is_own(file) for file in found if not file.is_relative_to(FOLDER) and not system_files.is_site(file)
    )


def _is_own(file: Path) -> bool:
    try:
        status = file.lstat()
        user = pwd.getpwuid(os.geteuid()).pw_name
        private = grp.getgrgid(status.st_gid).gr_name == user  # a group of the user alone
    except (OSError, KeyError):
        return False
    shared = stat.S_IWOTH if private else stat.S_IWOTH | stat.S_IWGRP
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & shared:
        return False
    git = (*process.GIT, "-C", str(file.parent))
    try:
        history = process.run(
            (*git, "log", "--no-show-signature", "--format=%ae", "--", file.name), check=False
        )
        own = process.run((*git, "config", "user.email"), check=False)
    except ToolMissing:
        return False
    # Without a repository or a commit there are no authors.
    authors = set(history.output.split()) if history.returncode == 0 else set()
    return authors <= {own.output.strip()}


def _author_mark(file: Path) -> Path:
    """A folder that takes the place of a removed one is another: its number counts, too."""
    try:
        number = file.parent.stat().st_ino
    except OSError:
        number = 0
    digest = hashlib.sha256(f"{number} {file.resolve()}".encode(errors="surrogateescape")).hexdigest()
    return files.state_dir() / "authors" / digest


def of_job(project: ProjectFile | None, recipes: Sequence[Target], *, stated: bool) -> ForeignValues:
    """What another person may have written of a job.

    Parameters
    ----------
    recipes : what decides on its system, and what it builds. One counts if it lies in a folder with an
        imgkit.toml: who gives away the one gives away the other.
    stated : whether the imgkit.toml names the first one, which then counts wherever it lies.
    """
    found: list[tuple[str, str]] = []
    for number, target in enumerate(recipes):
        if (stated and number == 0) or _in_project(target.file):
            found += _reach(target)
    file = project.file if project else recipes[0].file
    return ForeignValues(
        file=file, toml=project.values if project else ProjectValues(), recipe=tuple(sorted(found))
    )


def of_site(recipes: Sequence[Target]) -> ForeignValues | None:
    """What a site's systems decide for a job; None where it has none of them.

    Nobody is asked about a system that imgkit ships, nor about the user's own file.
    """
    stated = [place.file for target in recipes for place in target.positions.values()]
    file = next((one for one in stated if system_files.is_site(one)), None)
    if file is None:
        return None
    found = {
        pair
        for target in recipes
        for pair in host_effects.reach(target.system, target.positions, of_site=True)
    }
    return ForeignValues(file=file, toml=ProjectValues(), recipe=tuple(sorted(found)))


def _reach(target: Target) -> Iterator[tuple[str, str]]:
    if target.file.parent == FOLDER:
        return
    if not target.positions:  # an image
        yield from host_effects.reach(target.system, {})
        return
    recipe = load(str(target.file))
    yield from host_effects.reach(recipe.system, recipe.positions, recipe.image.secrets)


def _in_project(file: Path) -> bool:
    names = (Path(os.path.abspath(file)), file.resolve())  # noqa: PTH100 - a link counts by both its ends
    return any(toml_file.locate(name.parent) is not None for name in names)
