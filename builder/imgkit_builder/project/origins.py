"""Combine flags with the values of ``imgkit.toml``, and find out where each value of a job comes from.

A flag takes precedence over ``imgkit.toml``, and ``imgkit.toml`` takes precedence over the recipe.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_builder.base.flags import declared_options, flags_in
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.request import JobRequest, ProjectSource
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe.problems import Position, shorten_path
from imgkit_builder.recipe.targets import Target

_KEYS = ("account", "queue", "qos", "time", "nodes", "group_readable")
"""Keys of imgkit.toml that are also flags of a job. A flag replaces the key."""
_RECIPE_KEYS = {
    "gpus": ("system.node.gpus",),
    "cpus": ("system.node.cpus_per_gpu", "system.node.cpus"),
    "mem": ("system.node.default_memory_GB",),
    "mem-per-gpu": ("system.node.memory_per_gpu_GB",),
    "time": ("system.queue.time",),
    "account": ("system.queue.account",),
    "queue": ("system.queue.name",),
    "qos": ("system.queue.qos",),
    "runtime": ("system.runtime.kind",),
    "workdir": ("image.workdir",),
}
"""The keys of a recipe that can set a value, by the name of the value. The first key that is set counts."""


def fill_from_file(request: JobRequest, project: ProjectFile | None) -> JobRequest:
    """Return `request` with the values of imgkit.toml added. Before, it has only the values of flags.

    A flag replaces the value of the file. But ``--bind``, ``--env`` and ``--option`` add to the file's lists,
    except that a variable of ``--env`` replaces a variable of the same name. The job runs in the folder of
    the file, unless a flag names another folder.

    Parameters
    ----------
    project : the content of imgkit.toml. If it is None, the request is returned unchanged.
    """
    if project is None:
        return request
    values = project.values
    container = request.container
    allocation = request.allocation
    source = ProjectSource(
        file=project.file,
        recipe=project.recipe,
        lines={key: _location_text(position) for key, position in project.positions.items()},
        sets_directory=request.directory == Path(),
    )
    changes = _join_lists(request, values)
    for flag in declared_options(JobRequest):
        if flag.field in _KEYS:
            changes[flag.field] = flag.value(request) or getattr(values, flag.field)
    # An interactive job without a command opens a shell. The command in the file is meant for other jobs.
    if not request.launch.command and not request.launch.interactive:
        changes["command"] = values.command
    if source.sets_directory:
        changes["directory"] = project.file.parent
    if not allocation.mem and not allocation.mem_per_gpu:  # a flag replaces both keys
        changes |= {"mem": values.mem, "mem_per_gpu": values.mem_per_gpu}
    if not container.packages:
        changes["requirements"] = values.packages
    if container.code is None and not container.no_code:
        changes["code"] = project.code
    return request.changed(**changes, project=source)


def _join_lists(request: JobRequest, values: ProjectValues) -> dict[str, Any]:
    """Return each list of imgkit.toml with the items of the flags added, by the name of its field.

    A variable of ``--env`` replaces a variable of the same name in the file.
    """
    container = request.container
    flag_variables = _variable_names(container.env)
    file_env = [item for item in values.env if item.partition("=")[0] not in flag_variables]
    return {
        "env": (*file_env, *container.env),
        "binds": (*values.binds, *container.binds),
        "options": (*values.options, *request.allocation.options),
        "data": (*values.data, *container.data),
    }


def _location_text(position: Position) -> str:
    """Return the file name and line of `position`, such as ``imgkit.toml:4``."""
    return f"{shorten_path(position.file).name}:{position.line}"


def _variable_names(items: Sequence[str]) -> list[str]:
    """Return the names of the variables in `items`, which have the form ``NAME=VALUE`` or ``NAME``."""
    return [item.partition("=")[0] for item in items]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """A value of a job, together with the flag or the line of a file that sets it."""

    name: str
    value: str
    flag: str = ""
    """The flag that sets the value. Empty if no flag sets it."""
    position: Position | None = None
    """The position in ``imgkit.toml`` or in a recipe that sets the value. None if no file sets it."""

    @property
    def source(self) -> str:
        """The source as text: ``--time``, ``imgkit.toml:4``, ``mn5.yaml:12`` or ``default``."""
        if self.flag:
            return self.flag
        if self.position is None:
            return "default"
        return _location_text(self.position)


def find_value_source(
    name: str, value: str, *, flag: str, project: ProjectFile | None, default: Position | None = None
) -> ValueSource:
    """Return the value called `name` with its source: a flag, or else imgkit.toml, or else the recipe.

    Parameters
    ----------
    flag : the flag that was given, or "" if there is none.
    project : the ``imgkit.toml``. It is the source if it sets the key `name` and there is no flag.
    default : the position in the recipe that sets the value, or None if the recipe does not set it. Then the
        source is a default of imgkit.
    """
    if flag:
        return ValueSource(name=name, value=value, flag=flag)
    position = default
    # A value is called like its flag, "group-readable", and a key has underscores.
    key = name.replace("-", "_")
    if project and getattr(project.values, key, None):
        position = project.positions[key]
    return ValueSource(name=name, value=value, position=position)


def list_value_sources(job: Job, flags: JobRequest, project: ProjectFile | None) -> Iterator[ValueSource]:
    """Yield every value of `job` with its source, such as ``time 1:00:00 imgkit.toml:4``.

    Parameters
    ----------
    flags : the request before the values of imgkit.toml were added. Its values all come from flags.
    project : the imgkit.toml, or None if the job uses no such file.
    """
    if project is None:
        project = ProjectFile(file=Path(), values=ProjectValues(), positions={})
    yield from _list_single_value_sources(job, flags, project)
    yield from _list_item_sources(job, flags, project)
    # Flags that belong to one kind of scheduler. They cannot be set in a file.
    for system_flags in flags.system_flags:
        for declared_flag in declared_options(type(system_flags)):
            value = declared_flag.value(system_flags)
            flag = declared_flag.names[0]
            if value != declared_flag.default:
                yield ValueSource(name=flag.lstrip("-"), value=str(value), flag=flag)


def _list_single_value_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the values that a single flag or key sets as a whole, such as the time. Lists are left out.

    `flags` has the values of flags only, without those of imgkit.toml (`project`).
    """
    # A value has the name of its flag without the dashes. --no-code also sets the value "code".
    flag_of_value = {}
    for flag in flags_in(flags):
        flag_of_value[flag.lstrip("-").removeprefix("no-")] = flag
    if flags.launch.command:
        flag_of_value["command"] = "--"  # the command of a job follows "--"
    for name, value in _collect_single_values(job).items():
        flag = flag_of_value.get(name, "")
        # Most values are listed even if they are empty. A job often has no code or command of its own.
        if name in ("code", "command") and not value and not flag:
            continue
        shown_value = "" if value is None else str(value)
        position = _recipe_position(job.recipe, name)
        yield find_value_source(name, shown_value, flag=flag, project=project, default=position)


def _recipe_position(recipe: Target, name: str) -> Position | None:
    """Return the position in the recipe that sets the value `name`, or None if the recipe does not set it."""
    for key in _RECIPE_KEYS.get(name, ()):
        position = recipe.positions.get(tuple(key.split(".")))
        if position is not None:
            return position
    return None


def _collect_single_values(job: Job) -> dict[str, Any]:
    """Return each value of the job that a single flag or key sets, by its name.

    The name is that of the flag without its dashes, and the order is that in which the values are shown.
    """
    allocation = job.allocation
    values = {"nodes": allocation.size, "gpus": allocation.gpus, "cpus": allocation.cpus}
    memory = allocation.memory
    if memory is not None:  # otherwise the scheduler decides how much memory the job gets
        values[memory.flag.lstrip("-")] = size_text(memory.size_MiB)
    return {
        **values,
        "time": allocation.time,
        "account": allocation.account,
        "queue": allocation.queue,
        "qos": allocation.qos,
        "name": job.name,
        "image": job.container.image,
        "directory": job.directory,
        "code": job.request.container.code,
        "runtime": job.container.runtime,
        "stop-before": allocation.stop_before_s,
        "group-readable": job.request.group_readable,
        "workdir": job.container.workdir or ".",
        "command": shlex.join(job.command),
    }


def _list_item_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the items of the job's lists, such as mounts and variables, each with its source.

    The items of one list can come from the recipe, from imgkit.toml and from flags. `flags` has the values of
    flags only. A list in imgkit.toml has one line number, and a list in the recipe has one for each item.
    """
    file_values = project.values
    file_lines = project.positions
    recipe_lines = job.recipe.positions
    binds = _ListSources("bind", flags.container.binds, file_values.binds, file_lines.get("binds"))
    for index, bind in enumerate(job.container.binds):
        # The recipe's binds come first, so an index finds the line of the recipe. A flag may repeat one of
        # them.
        yield binds.find(bind, recipe_lines.get(("system", "runtime", "binds", index)))
    data = _ListSources("data", (), file_values.data, file_lines.get("data"))
    for item in job.request.container.data:
        yield data.find(item)
    packages = _ListSources(
        "packages", flags.container.packages, file_values.packages, file_lines.get("packages")
    )
    for package in flags.container.packages or job.request.container.requirements:
        yield packages.find(package)
    yield from _variable_sources(job, flags, project)
    flag_options = flags.allocation.options
    options = _ListSources("option", flag_options, file_values.options, file_lines.get("options"))
    # The recipe's options come first here, too.
    for index, option in enumerate((*job.recipe.system.queue.options, *file_values.options, *flag_options)):
        yield options.find(option, recipe_lines.get(("system", "queue", "options", index)))


def _variable_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the environment variables of the job, each with its source.

    If the user names a variable without a value, the job gets the value that it has on this machine. This
    value may be a secret, so it is not shown.
    """
    flag_names = _variable_names(flags.container.env)
    file_names = _variable_names(project.values.env)
    # Finds the flag or the line of imgkit.toml that names a variable.
    variables = _ListSources("env", flag_names, file_names, project.positions.get("env"))
    shown_texts = {name: f"{name}={value}" for name, value in job.container.env.items()}
    for name in job.container.names:
        # A variable that also has an explicit value is listed only with that value.
        shown_texts.setdefault(name, f"{name} (with its value from here)")
    for name, text in shown_texts.items():
        yield dataclasses.replace(variables.find(name), value=text)


class _ListSources(NamedTuple):
    """The flags and the line of imgkit.toml that can add items to one list of the job, such as its mounts."""

    name: str
    """The name of the flag that adds an item, without its dashes."""
    flag_items: Collection[str]
    file_items: Collection[str]
    file_line: Position | None
    """The position of the list in imgkit.toml. None if the file does not set it."""

    def find(self, item: str, recipe_line: Position | None = None) -> ValueSource:
        """Return an item with its source: the recipe, or else a flag, or else imgkit.toml.

        Parameters
        ----------
        recipe_line : the position of the item in the recipe, or None if the item is not in the recipe.
        """
        if recipe_line is not None:
            return ValueSource(name=self.name, value=item, position=recipe_line)
        if item in self.flag_items:
            return ValueSource(name=self.name, value=item, flag=f"--{self.name}")
        position = self.file_line if item in self.file_items else None
        return ValueSource(name=self.name, value=item, position=position)
