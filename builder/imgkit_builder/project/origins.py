"""Combine flags with the values of ``imgkit.toml``, and tell where each value of a job comes from.

A flag takes precedence over ``imgkit.toml``, and ``imgkit.toml`` over the recipe.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.base.flags import declared_options, flags_in
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.request import JobRequest, ProjectSource
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe.problems import Position, shorten_path
from imgkit_builder.recipe.targets import Target

_KEYS = ("account", "queue", "qos", "time", "nodes", "group_readable")
"""Keys of the file that are also flags of a job. The flag replaces the key."""


def fill_from_file(request: JobRequest, project: ProjectFile | None) -> JobRequest:
    """Return `request`, which has the values of flags only, with those of imgkit.toml where no flag is given.

    ``--bind``, ``--env`` and ``--option`` add to the values of the file, but a variable of a flag replaces
    the file's variable of the same name. The job runs in the file's folder, unless a flag names another one.

    Parameters
    ----------
    project : the content of imgkit.toml. With None, the request is returned unchanged.
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
    changes: dict[str, Any] = {
        "env": _combined_env(values.env, container.env),
        "binds": (*values.binds, *container.binds),
        "options": (*values.options, *allocation.options),
        "data": (*values.data, *container.data),
    }
    for flag in declared_options(JobRequest):
        if flag.field in _KEYS:
            changes[flag.field] = flag.value(request) or getattr(values, flag.field)
    # An interactive job without a command opens a shell. The command of the file is for the other jobs.
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


def _combined_env(file_items: Sequence[str], flag_items: Sequence[str]) -> tuple[str, ...]:
    """Return the variables of the file that no flag sets, followed by those of the flags.

    An item is ``NAME`` or ``NAME=VALUE``.
    """
    flag_variables = _variable_names(flag_items)
    kept_items = [item for item in file_items if _variable_name(item) not in flag_variables]
    return (*kept_items, *flag_items)


def _location_text(position: Position) -> str:
    """Return the name and line of `position`, for example ``imgkit.toml:4``."""
    return f"{shorten_path(position.file).name}:{position.line}"


def _variable_name(item: str) -> str:
    """Return the name in `item`, which is ``NAME=VALUE`` or ``NAME``."""
    return item.partition("=")[0]


def _variable_names(items: Sequence[str]) -> set[str]:
    """Return the names in `items`, each of which is ``NAME=VALUE`` or ``NAME``."""
    return {_variable_name(item) for item in items}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """One value of a job, and the flag or the line of a file that sets it."""

    name: str
    value: str
    flag: str = ""
    """The flag that sets the value. Empty if no flag does."""
    position: Position | None = None
    """The place in ``imgkit.toml`` or in a recipe that sets the value. None if no file does."""

    @property
    def source(self) -> str:
        """The source as text for people: ``--time``, ``imgkit.toml:4``, ``mn5.yaml:12`` or ``default``."""
        if self.flag:
            return self.flag
        if self.position is None:
            return "default"
        return _location_text(self.position)


def find_value_source(
    name: str, value: str, *, flag: str, project: ProjectFile | None, default: Position | None = None
) -> ValueSource:
    """Return the value `name` with its source, which is a flag, or else imgkit.toml, or else the recipe.

    Parameters
    ----------
    flag : the flag that was given, or "".
    project : the ``imgkit.toml``, which is the source if it sets the key `name`.
    default : the place in the recipe that sets the value. None if the recipe does not set it.
    """
    if flag:
        return ValueSource(name=name, value=value, flag=flag)
    position = default
    key = name.replace("-", "_")
    if project and getattr(project.values, key, None):
        position = project.positions[key]
    return ValueSource(name=name, value=value, position=position)


def list_value_sources(job: Job, flags: JobRequest, project: ProjectFile | None) -> Iterator[ValueSource]:
    """Yield every value of `job` with its source: ``time 1:00:00 imgkit.toml:4``.

    Parameters
    ----------
    flags : the request before the values of imgkit.toml were added, so that a value in it comes from a flag.
    """
    if project is None:
        project = ProjectFile(file=Path(), values=ProjectValues(), positions={})
    yield from _single_value_sources(job, flags, project)
    yield from _list_item_sources(job, flags, project)
    # The flags that belong to one kind of scheduler. No file sets them.
    for system_flags in flags.system_flags:
        for declared_flag in declared_options(type(system_flags)):
            value = declared_flag.value(system_flags)
            flag = declared_flag.names[0]
            if value != declared_flag.default:
                yield ValueSource(name=flag.lstrip("-"), value=str(value), flag=flag)


def _single_value_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the values that are set as a whole by one flag or one key, such as the time, and no lists."""
    # A value has the name of its flag without the dashes. --no-code also decides about the value "code".
    flag_of_value = {}
    for flag in flags_in(flags):
        flag_of_value[flag.lstrip("-").removeprefix("no-")] = flag
    if flags.launch.command:
        flag_of_value["command"] = "--"
    for name, (value, *recipe_keys) in _single_values(job).items():
        flag = flag_of_value.get(name, "")
        is_unset = not value and not flag
        if name in ("code", "command") and is_unset:
            continue
        yield find_value_source(
            name,
            "" if value is None else str(value),
            flag=flag,
            project=project,
            default=_first_position(job.recipe, recipe_keys),
        )


def _first_position(recipe: Target, keys: Sequence[str]) -> Position | None:
    """Return the position of the first of `keys`, such as ``"system.queue.time"``, that the recipe sets."""
    for key in keys:
        position = recipe.positions.get(tuple(key.split(".")))
        if position is not None:
            return position
    return None


def _single_values(job: Job) -> dict[str, tuple[Any, ...]]:
    """Return each value that one flag or one key sets, by its name.

    In ``{"time": ("1:00:00", "system.queue.time")}``, the keys of the recipe that can set the value follow
    it. The first of these keys that the recipe sets counts.
    """
    memory_value = {}
    memory = job.allocation.memory
    if memory is not None:  # otherwise the scheduler decides about it
        key = "memory_per_gpu_GB" if memory.gpus else "default_memory_GB"
        memory_value[memory.flag.lstrip("-")] = (size_text(memory.size_MiB), f"system.node.{key}")
    return {
        "nodes": (job.allocation.size,),
        "gpus": (job.allocation.gpus, "system.node.gpus"),
        "cpus": (job.allocation.cpus, "system.node.cpus_per_gpu", "system.node.cpus"),
        **memory_value,
        "time": (job.allocation.time, "system.queue.time"),
        "account": (job.allocation.account, "system.queue.account"),
        "queue": (job.allocation.queue, "system.queue.name"),
        "qos": (job.allocation.qos, "system.queue.qos"),
        "name": (job.name,),
        "image": (job.container.image,),
        "directory": (job.directory,),
        "code": (job.request.container.code,),
        "runtime": (job.container.runtime, "system.runtime.kind"),
        "stop-before": (job.allocation.stop_before_s,),
        "group-readable": (job.request.group_readable,),
        "workdir": (job.container.workdir or ".", "image.workdir"),
        "command": (shlex.join(job.command),),
    }


def _list_item_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the items of the values that are lists, such as mounts and variables, each with its source.

    The items of one list can come from the recipe, from imgkit.toml and from flags.
    """
    values = project.values
    lines = project.positions
    recipe_lines = job.recipe.positions
    for number, bind in enumerate(job.container.binds):
        # The recipe's binds come first. A flag may repeat one of them.
        recipe_line = recipe_lines.get(("system", "runtime", "binds", number))
        yield _item_source("bind", bind, flags.container.binds, values.binds, lines.get("binds"), recipe_line)
    for data in job.request.container.data:
        yield _item_source("data", data, (), values.data, lines.get("data"))
    packages = flags.container.packages
    for package in packages or job.request.container.requirements:
        yield _item_source("packages", package, packages, values.packages, lines.get("packages"))
    yield from _variable_sources(job, flags, project)
    flag_options = flags.allocation.options
    for number, option in enumerate((*job.recipe.system.queue.options, *values.options, *flag_options)):
        recipe_line = recipe_lines.get(("system", "queue", "options", number))
        yield _item_source("option", option, flag_options, values.options, lines.get("options"), recipe_line)


def _variable_sources(job: Job, flags: JobRequest, project: ProjectFile) -> Iterator[ValueSource]:
    """Yield the environment variables of the job, each with its source.

    The value of a variable that the user names without a value may be a secret, and is not shown.
    """
    flag_variables = _variable_names(flags.container.env)
    file_variables = _variable_names(project.values.env)
    texts = {name: f"{name}={value}" for name, value in job.container.env.items()}
    for name in job.container.names:
        texts.setdefault(name, f"{name} (with its value from here)")
    for name, text in texts.items():
        source = _item_source("env", name, flag_variables, file_variables, project.positions.get("env"))
        yield dataclasses.replace(source, value=text)


def _item_source(
    name: str,
    item: str,
    flag_items: Collection[str],
    file_items: Collection[str],
    file_line: Position | None,
    recipe_line: Position | None = None,
) -> ValueSource:
    """Return an item of a list with its source: the recipe, or else a flag, or else imgkit.toml.

    Parameters
    ----------
    name : the name of the flag that adds an item, without its dashes.
    flag_items, file_items : the items that flags have added, and those of the file.
    file_line : the place of the list in imgkit.toml. None if that file does not set it.
    recipe_line : the place of the item in the recipe. None if the recipe does not have it.
    """
    if recipe_line is None and item in flag_items:
        return ValueSource(name=name, value=item, flag=f"--{name}")
    position = recipe_line
    if recipe_line is None and item in file_items:
        position = file_line
    return ValueSource(name=name, value=item, position=position)
