"""Flags over ``imgkit.toml`` over the recipe, and the source of each value of a job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.base import flags as job_flags
from imgkit_builder.base.flags import declared, flags_in
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest, ProjectSource
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe.problems import Position, shown

_REPLACED = ("account", "queue", "qos", "time", "nodes", "command")
"""Keys of the file that stand for a field of `JobRequest`, which a flag replaces."""


def under(request: JobRequest, project: ProjectFile | None) -> JobRequest:
    """Return `request`, which holds the flags, with the file's values where no flag was given.

    ``--bind`` and ``--env`` add to the file's; a variable of a flag replaces that of the file. The job runs
    in the file's folder.
    """
    if project is None:
        return request
    values = project.values
    source = ProjectSource(
        file=project.file,
        recipe=project.recipe,
        lines={key: _location(position) for key, position in project.positions.items()},
        sets_directory=request.directory == Path(),
    )
    # A job that makes a .sif has neither nodes and a command, nor variables and code.
    keys = _REPLACED[:4] if request.image_flag else _REPLACED
    changes: dict[str, Any] = {key: job_flags.value(request, key) or getattr(values, key) for key in keys}
    if source.sets_directory:
        changes["directory"] = project.file.parent
    if not request.image_flag:
        flag_variables = set(map(_variable_name, request.container.env))
        inherited = (item for item in values.env if _variable_name(item) not in flag_variables)
        changes["env"] = (*inherited, *request.container.env)
        changes["binds"] = (*values.binds, *request.container.binds)
        changes["code"] = request.container.code or (None if request.container.no_code else project.code)
    return request.changed(**changes, project=source)


def _location(position: Position) -> str:
    """Return ``imgkit.toml:4``, or ``mn5.yaml:12``."""
    return f"{shown(position.file).name}:{position.line}"


def _variable_name(item: str) -> str:
    return item.partition("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """One value of a job, and what decided it."""

    name: str
    value: str
    flag: str = ""
    """The flag, where one was given."""
    position: Position | None = None
    """The position in ``imgkit.toml`` or in a recipe."""

    @property
    def source(self) -> str:
        """Return ``--time``, ``imgkit.toml:4``, ``mn5.yaml:12`` or ``default``."""
        return self.flag or (_location(self.position) if self.position else "default")


def of_word(
    name: str, value: str, *, flag: str, project: ProjectFile | None, default: Position | None = None
) -> ValueSource:
    """Return the source of a value: `flag` if given, else the file if it has the key, else `default`."""
    position = None if flag else default
    if project and not flag and getattr(project.values, name, None):
        position = project.positions[name]
    return ValueSource(name=name, value=value, flag=flag, position=position)


def of_job(job: Job, flags: JobRequest, project: ProjectFile | None) -> Iterator[ValueSource]:
    """Yield every value of `job` with its source; `flags` holds the flags alone."""
    positions = job.recipe.positions
    # --no-code decides the code, too.
    flag_of = {flag.lstrip("-").removeprefix("no-"): flag for flag in flags_in(flags)}
    if flags.launch.command:
        flag_of["command"] = "--"
    # Every field has the name of its flag, so that one table serves flags, file and recipe.
    for name, (value, *keys) in _single_values(job).items():
        flag = flag_of.get(name, "")
        if value or flag or name != "code":
            # The first key that the recipe states counts: cpus_per_gpu before cpus.
            paths = [tuple(key.split(".")) for key in keys]
            default = next((positions[path] for path in paths if path in positions), None)
            text = "" if value is None else str(value)
            yield of_word(name, text, flag=flag, project=project, default=default)
    if not job.makes_image:
        yield from _binds_and_env(job, flags, project)
    key = "sif" if job.makes_image else "options"
    for number, option in enumerate(getattr(job.recipe.system.queue, key)):
        position = positions.get(("system", "queue", key, number))
        yield ValueSource(name="option", value=option, position=position)
    for option in flags.allocation.options:
        yield ValueSource(name="option", value=option, flag="--option")
    for system_flags in flags.system_flags:
        for flag_spec in declared(type(system_flags)):
            value, flag = flag_spec.value(system_flags), flag_spec.names[0]
            if value != flag_spec.default:
                yield ValueSource(name=flag.lstrip("-"), value=str(value), flag=flag)
    if flag := job.request.image_flag:
        source = job.request.archive or job.request.build
        yield ValueSource(name=flag.lstrip("-"), value=str(source), flag=flag)


def _single_values(job: Job) -> dict[str, tuple[Any, ...]]:
    """Return the values of `job` that one flag or one key states, and the keys of the recipe."""
    allocation = {
        "time": (job.allocation.time, "system.queue.time"),
        "account": (job.allocation.account, "system.queue.account"),
        "queue": (job.allocation.queue, "system.queue.name"),
    }
    image = {"name": (job.name,), "image": (job.container.image,), "directory": (job.directory,)}
    if job.makes_image:
        return {**allocation, **image}
    return {
        "nodes": (job.allocation.size,),
        "gpus": (job.allocation.gpus, "system.node.gpus"),
        "cpus": (job.allocation.cpus, "system.node.cpus_per_gpu", "system.node.cpus"),
        **allocation,
        "qos": (job.allocation.qos, "system.queue.qos"),
        **image,
        "code": (job.request.container.code,),
        "runtime": (job.container.runtime, "system.runtime.kind"),
        "stop-before": (job.allocation.stop_before_s,),
        "workdir": (job.container.workdir or ".", "image.workdir"),
        "command": (shlex.join(job.command),),
    }


def _binds_and_env(job: Job, flags: JobRequest, project: ProjectFile | None) -> Iterator[ValueSource]:
    """Yield the sources of values that the recipe, the file and flags add to each other."""
    values = project.values if project else ProjectValues()
    file_positions = project.positions if project else {}
    recipe_binds = len(job.recipe.system.runtime.binds)
    for number, bind in enumerate(job.container.binds):
        position = file_positions.get("binds") if bind in values.binds else None
        flag = "--bind" if bind in flags.container.binds else ""
        # The recipe's binds come first; a flag may repeat one of them.
        if number < recipe_binds:
            position, flag = job.recipe.positions.get(("system", "runtime", "binds", number)), ""
        yield ValueSource(name="bind", value=bind, flag=flag, position=None if flag else position)
    flag_variables = set(map(_variable_name, flags.container.env))
    file_variables = set(map(_variable_name, values.env))
    for name in (*job.container.env, *job.container.names):
        # The value of a variable that the user only names may be a secret.
        text = (
            f"{name}={job.container.env[name]}"
            if name in job.container.env
            else f"{name} (with its value from here)"
        )
        flag = "--env" if name in flag_variables else ""
        position = file_positions.get("env") if name in file_variables and not flag else None
        yield ValueSource(name="env", value=text, flag=flag, position=position)
