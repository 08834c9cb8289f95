"""Flags over ``imgkit.toml`` over the recipe, and the place that each value of a job comes from."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from imgkit_builder.job import request
from imgkit_builder.job.request import (
    AnyRequest,
    BuildJobRequest,
    ImageJob,
    Job,
    Request,
)
from imgkit_builder.project.toml_file import ProjectFile, ProjectValues
from imgkit_builder.recipe.problems import KeyPath, Position, shown

_Kind = TypeVar("_Kind", bound=AnyRequest)
_STATED = ("account", "queue", "qos", "time", "nodes", "command")
"""Keys of the file that stand for a field of `Request`, which a flag replaces."""


def under(request: _Kind, project: ProjectFile | None) -> _Kind:
    """`request`, which holds the flags, with the file's values where no flag was given.

    ``--bind`` and ``--env`` add to the file's; a variable of a flag replaces that of the file. The job runs
    in the file's folder.
    """
    if project is None:
        return request
    values = project.values
    places = {key: _place(position) for key, position in project.positions.items()}
    # Pods have no folder of this machine, so they must know who named it.
    folder = {"directory": shown(project.file).name} if request.directory == Path() else {}
    stated: dict[str, Any] = {
        **{key: getattr(request, key) or getattr(values, key) for key in _STATED if hasattr(request, key)},
        "project": {"": shown(project.file).name, **places, **folder},
        "directory": project.file.parent if request.directory == Path() else request.directory,
    }
    if not isinstance(request, Request):  # a job that makes a .sif has neither variables nor code
        return dataclasses.replace(request, **stated)
    own = {_name(one) for one in request.env}
    return dataclasses.replace(
        request,
        **stated,
        binds=(*values.binds, *request.binds),
        env=(*(one for one in values.env if _name(one) not in own), *request.env),
        code=request.code or (None if request.no_code else project.code),
    )


def _place(position: Position) -> str:
    """``imgkit.toml:4``, or ``mn5.yaml:12``."""
    return f"{shown(position.file).name}:{position.line}"


def _name(variable: str) -> str:
    return variable.partition("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """One value of a job, and what decided it."""

    name: str
    value: str
    flag: str = ""
    """The flag, where one was given."""
    position: Position | None = None
    """The place in ``imgkit.toml`` or in a recipe."""

    @property
    def source(self) -> str:
        """``--time``, ``imgkit.toml:4``, ``mn5.yaml:12`` or ``default``."""
        if self.flag or self.position is None:
            return self.flag or "default"
        return _place(self.position)


def of_job(job: Job | ImageJob, given: AnyRequest, project: ProjectFile | None) -> tuple[ValueSource, ...]:
    """Every value of `job`; `given` holds the flags alone."""
    finder = _Finder(job=job, given=given, project=project)
    return tuple(finder.rows())


def of_word(name: str, value: str, *, flag: str, project: ProjectFile | None) -> ValueSource:
    """The origin of the remote or the recipe: `flag` if one was given, else the file if it states one."""
    stated = project is not None and bool(getattr(project.values, name))
    position = project.positions[name] if project and stated and not flag else None
    return ValueSource(name=name, value=value, flag=flag, position=position)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    job: Job | ImageJob
    given: AnyRequest
    project: ProjectFile | None

    def rows(self) -> Iterator[ValueSource]:
        if isinstance(self.job, Job) and isinstance(self.given, Request):
            yield from self._of_run(self.job, self.given)
        elif isinstance(self.job, ImageJob):
            yield from self._of_image(self.job)

    def _of_image(self, job: ImageJob) -> Iterator[ValueSource]:
        yield from self._of_queue()
        yield self._row("name", job.name)
        yield self._row("image", job.image)
        yield self._row("directory", job.directory)
        yield from self._options((*job.recipe.system.queue.sif,), ("system", "queue", "sif"))
        source = job.request.build if isinstance(job.request, BuildJobRequest) else job.request.archive
        flag = job.request.where
        yield ValueSource(name=flag.strip("-"), value=str(source), flag=flag)

    def _of_queue(self) -> Iterator[ValueSource]:
        queue = ("system", "queue")
        yield self._row("time", self.job.time, (*queue, "time"))
        yield self._row("account", self.job.account, (*queue, "account"))
        yield self._row("queue", self.job.queue, (*queue, "name"))

    def _of_run(self, job: Job, given: Request) -> Iterator[ValueSource]:
        yield self._row("nodes", str(job.size))
        yield self._row("gpus", job.gpus, ("system", "node", "gpus"))
        yield self._row("cpus", job.cpus, ("system", "node", "cpus_per_gpu"), ("system", "node", "cpus"))
        yield from self._of_queue()
        yield self._row("qos", job.qos, ("system", "queue", "qos"))
        yield self._row("name", job.name)
        yield self._row("image", job.image)
        if job.overlay:
            yield self._row("delta", job.overlay)
        if job.request.code:
            yield self._row("code", job.request.code)
        elif given.no_code:
            yield ValueSource(name="code", value="", flag="--no-code")
        yield self._row("runtime", job.run_by, ("system", "runtime", "kind"))
        yield self._row("stop-before", job.stop_before_s, field="stop_before_s")
        yield self._row("directory", job.directory)
        yield self._row("workdir", job.workdir or ".", ("image", "workdir"))
        yield from self._lists(job, given)
        for own in given.system_flags:
            for word in request.given(own):
                known = next(one for one in request.declared(type(own)) if one.names[0] == word)
                yield ValueSource(name=word.strip("-"), value=str(getattr(own, known.field)), flag=word)
        yield self._row("command", shlex.join(job.command))

    def _lists(self, job: Job, given: Request) -> Iterator[ValueSource]:
        values = self.project.values if self.project else ProjectValues()
        shared = len(job.recipe.system.runtime.binds)
        for number, one in enumerate(job.binds):
            if number < shared:
                yield self._stated("bind", one, ("system", "runtime", "binds", number))
            else:
                yield self._added("bind", one, "binds", flag=one in given.binds, file=one in values.binds)
        for name in (*job.env, *job.names):
            text = f"{name}={job.env[name]}" if name in job.env else f"{name} (with its value from here)"
            here, there = (name in map(_name, of) for of in (given.env, values.env))
            yield self._added("env", text, "env", flag=here, file=there)
        yield from self._options(job.recipe.system.queue.options, ("system", "queue", "options"))

    def _options(self, stated: tuple[str, ...], path: KeyPath) -> Iterator[ValueSource]:
        for number, one in enumerate((*stated, *self.given.options)):
            if number < len(stated):
                yield self._stated("option", one, (*path, number))
            else:
                yield ValueSource(name="option", value=one, flag="--option")

    def _row(self, name: str, value: Any, *paths: KeyPath, field: str = "") -> ValueSource:
        """The row of a value that one flag, one key of the file or the recipe at one of `paths` states."""
        text = "" if value is None else str(value)
        known = next(
            (one for one in request.declared(type(self.given)) if one.field == (field or name)), None
        )
        if known and getattr(self.given, known.field) != known.default:
            return ValueSource(name=name, value=text, flag=known.names[0])
        if name == "command" and isinstance(self.given, Request) and self.given.command:
            return ValueSource(name=name, value=text, flag="--")
        if self.project is not None and bool(getattr(self.project.values, name, "")):
            return ValueSource(name=name, value=text, position=self.project.positions[name])
        return self._stated(name, text, *paths)

    def _stated(self, name: str, value: str, *paths: KeyPath) -> ValueSource:
        stated = self.job.recipe.positions
        position = next((stated[path] for path in paths if path in stated), None)
        return ValueSource(name=name, value=value, position=position)

    def _added(self, name: str, value: str, key: str, *, flag: bool, file: bool) -> ValueSource:
        """The row of one of several values that flags and the file add."""
        position = self.project.positions.get(key) if self.project and file else None
        return ValueSource(name=name, value=value, flag=f"--{name}" if flag else "", position=position)
