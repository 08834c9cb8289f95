"""Read ``imgkit.toml``, which sets values of ``imgkit run`` for the jobs of a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from imgkit_builder.data import spec
from imgkit_builder.jobs import container_setup, memory, quoting, resolve
from imgkit_builder.packages import add
from imgkit_builder.recipe.model import KEYS, Flag, Short
from imgkit_builder.recipe.problems import Collector, Position, RecipeErrors, parse_toml_file
from imgkit_builder.recipe.system_files import is_path
from imgkit_builder.recipe.validation import Mistake, make_rule, validate
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import EnvValue, Line
from imgkit_entrypoints.system import Bind

NAME = "imgkit.toml"
_MAX_BYTES = 32 << 10
_MAX_LINES = 500
"""Limits for the size of the file, which may come from a stranger. A usual file has about ten lines."""


def _number_as_text(value: Any) -> Any:
    """Return an integer as text, so that ``nodes = 2`` needs no quotes. Return other values unchanged."""
    # isinstance is not used, because True is an instance of int, too.
    if type(value) is int:
        return str(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectValues:
    """The values of the file by key. A key takes the same values as the flag of that name.

    An empty value means that the file does not set the key.
    """

    __pydantic_config__ = KEYS

    remote: Line = ""
    recipe: Line = ""
    account: Annotated[str, make_rule(partial(quoting.check_flag_value, "--account"))] = ""
    queue: Annotated[str, make_rule(partial(quoting.check_flag_value, "--queue"))] = ""
    qos: Annotated[str, make_rule(partial(quoting.check_flag_value, "--qos"))] = ""
    time: Annotated[str, make_rule(partial(quoting.parse_time_limit, where=""))] = ""
    nodes: Annotated[str, make_rule(resolve.parse_nodes), Short(_number_as_text)] = ""
    mem: Annotated[str, make_rule(partial(memory.parse_size, where=""))] = ""
    mem_per_gpu: Annotated[str, make_rule(partial(memory.parse_size, where=""))] = ""
    options: tuple[
        Annotated[Line, make_rule(partial(quoting.check_scheduler_option, where="options"), required=True)],
        ...,
    ] = ()
    """Options for the scheduler, which follow those of the recipe. Each is one argument."""
    binds: tuple[Bind, ...] = ()
    env: tuple[Annotated[EnvValue, make_rule(container_setup.split_variable)], ...] = ()
    """Variables: ``NAME=VALUE``, or ``NAME`` for the value that the variable has on this machine."""
    code: Line = ""
    """The folder of code to mount over /workspace, relative to the file's folder."""
    group_readable: Flag = False
    data: tuple[Annotated[Line, make_rule(spec.parse_spec)], ...] = ()
    """Data of the job: folders below the file's folder, or ``/SRC:/DEST`` on the cluster."""
    packages: tuple[Annotated[Line, make_rule(add.check_requirement)], ...] = ()
    """Requirements of Python packages, which ``imgkit add`` puts into a file beside the image."""
    command: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFile:
    """The values of an ``imgkit.toml``, and their positions in it."""

    file: Path
    values: ProjectValues
    positions: Mapping[str, Position]
    """The position of every key that the file sets."""

    @property
    def recipe_file(self) -> Path | None:
        """The path of the recipe or .sif that the file names. None for a shipped recipe."""
        recipe = self.values.recipe
        if is_path(recipe) or recipe.endswith(".sif"):
            return self.file.parent / recipe
        return None

    @property
    def recipe(self) -> str:
        """The recipe as the command line names it: the path of a recipe or .sif, or a shipped name."""
        return str(self.recipe_file or self.values.recipe)

    @property
    def code(self) -> Path | None:
        """The path of the folder of code to mount over /workspace. None if the file names none."""
        if not self.values.code:
            return None
        return self.file.parent / self.values.code


def find_file(folder: Path) -> Path | None:
    """Return the ``imgkit.toml`` in `folder` or in the nearest folder above it, or None if there is none.

    The search goes up to the root of the git repository. Outside of a repository, only `folder` itself is
    searched, because a file in /tmp or in a home folder is not meant for all folders below it.
    """
    start = folder.absolute()
    candidates = (start, *start.parents)
    repositories = [candidate for candidate in candidates if (candidate / ".git").exists()]
    last_candidate = repositories[0] if repositories else start  # the innermost repository
    for candidate in candidates:
        file = candidate / NAME
        if file.is_file():
            return file
        # Files above the root of the repository belong to something else.
        if candidate == last_candidate:
            break
    return None


def read_file(file: Path) -> ProjectFile:
    """Read the ``imgkit.toml`` at `file`.

    Raises
    ------
    UsageError : the file cannot be read, is not TOML, or has an unknown key or a wrong value. The error lists
        all wrong keys with their lines.
    """
    try:
        text = files.read_text(file, most_bytes=_MAX_BYTES)
        if text.count("\n") > _MAX_LINES:
            raise ValueError(f"it has more than {_MAX_LINES} lines")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), hint="correct or remove it") from error
    return parse_text(text, file)


def parse_text(text: str, file: Path) -> ProjectFile:
    """Parse `text`, the content of an ``imgkit.toml``, and return its values with the line of each key.

    All mistakes are reported together, sorted by line. `file` is the path of the file: it is used in
    messages, and to resolve relative paths later.

    Raises
    ------
    UsageError : `text` is not TOML, or has an unknown key or a wrong value.
    """
    problems = Collector(visible_folders=(file.parent.resolve(),))
    data = parse_toml_file(text, file, problems, 'write KEY = "VALUE"')
    positions = {key: _key_position(key, text, file) for key in data}
    # A key with an empty value counts as not set. `imgkit init` writes such keys for the user to fill in.
    set_values = {key: value for key, value in data.items() if value != ""}
    values, mistakes = validate(ProjectValues, set_values)
    for mistake in mistakes:
        key = str(mistake.path[0])
        problems.error(positions[key], mistake.path, mistake.message, _mistake_hint(mistake))
    if values is None or problems.errors:
        errors = sorted(problems.errors, key=lambda problem: problem.position.line)
        raise RecipeErrors(errors, of=NAME)
    return ProjectFile(file=file, values=values, positions=positions)


def _mistake_hint(mistake: Mistake) -> str:
    """Return the hint for a mistake in imgkit.toml.

    If a value has the wrong type, as in ``data = "letters"``, the hint shows how to write the right type.
    Otherwise the hint is that of the rule that the value breaks.
    """
    if mistake.kind != "type":
        return mistake.hint
    if mistake.expected == "a list":
        return 'write ["ONE", "TWO"]'
    if mistake.expected == "true or false":
        return "write true or false, without quotes"
    return 'write "TEXT"'


def _key_position(key: str, text: str, file: Path) -> Position:
    """Return the position of the line that sets `key`.

    The line begins with the key, as in ``time = "10m"``. A table such as ``[time]`` is found as well, because
    it is a mistake that an error must locate. If no line is found, for example because the key is in quotes,
    the result is line 0, which stands for the whole file.
    """
    match = re.search(rf"^[ \t]*(?:{re.escape(key)}[ \t]*=|\[+{re.escape(key)}\b)", text, re.MULTILINE)
    if match is None:
        return Position(file=file, line=0, column=0)
    line = text.count("\n", 0, match.start()) + 1
    return Position(file=file, line=line, column=1)
