"""What a folder of another person could do: its values are shown before the first run with them."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.project import toml_file
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe import host_effects, portable, targets
from imgkit_builder.recipe.targets import Target
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


def _reach(target: Target) -> Iterator[tuple[str, str]]:
    if target.file.parent == FOLDER:
        return
    is_json = target.file.suffix == targets.JSON_SUFFIX
    if not is_json and not target.positions:  # an image
        yield from host_effects.reach(target.system, {})
        return
    recipe = portable.find(str(target.file))
    # JSON can claim any positions.
    yield from host_effects.reach(recipe.system, {} if is_json else recipe.positions, recipe.image.secrets)


def _in_project(file: Path) -> bool:
    names = (Path(os.path.abspath(file)), file.resolve())  # noqa: PTH100 - a link counts by both its ends
    return any(toml_file.locate(name.parent) is not None for name in names)
