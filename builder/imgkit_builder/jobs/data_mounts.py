"""Mount the folders of data of a request into its job, and make their places in the code of the run."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path

from imgkit_builder.data import folder, spec
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.data.spec import DataSpec
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.code_tree import CodeFile
from imgkit_builder.jobs.job import DataMount, Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE


def list_folders(request: JobRequest) -> tuple[DataFolder, ...]:
    """Return the folders of data that are on this machine, with lists of their files.

    Raises
    ------
    UsageError : an item of ``data`` cannot be parsed, or its folder cannot be sent.
    """
    specs = spec.parse_all(request.container.data)
    project = request.project.file.parent if request.project else Path()
    return tuple(folder.find(item, project) for item in specs if item.is_local)


def with_data(job: Job, folders: Iterable[DataFolder], store: str = "") -> Job:
    """Return `job` with its folders of data mounted.

    Parameters
    ----------
    folders : those of this machine.
    store : the folder on the nodes with copies of `folders`; empty: they are mounted from where they lie.

    Raises
    ------
    UsageError : the job's runtime mounts no folders, or not this one.
    """
    specs = spec.parse_all(job.request.container.data)
    sources = {item.spec: f"{store}/{item.name}" if store else str(item.path) for item in folders}
    mounts = []
    for item in specs:
        source = sources.get(item, item.source)
        if item in sources:
            quoting.check("data", source)
        _refuse_unmountable(job, item, source)
        mounts.append(DataMount(source=source, target=item.target))
    return job.with_container(data=tuple(mounts))


def _refuse_unmountable(job: Job, item: DataSpec, source: str) -> None:
    """Raise UsageError if the job's command cannot see the data at its place."""
    runtime = runtime_of(job)
    # A remote that stores the files of pods has the data, too, and the run folder gets a link to it.
    has_link = job.run_folder and job.request.container.code is not None and is_in_code(item.target)
    if runtime.is_isolated and (not has_link or "$" in source):
        raise UsageError(
            f"pods see no folder of this machine or its cluster, such as {item.source}",
            where="data",
            hint="fill a volume of the cluster, and mount it: --pvc CLAIM:/DEST",
        )
    if not runtime.has_container and not is_in_code(item.target):
        raise UsageError(
            f"--runtime {runtime.kind} has no container that could show {item.source} as {item.target}",
            where="data",
            hint=f"let the program read {item.source}; or in the project: {item.source}:/{WORKSPACE}/data",
        )
    if not runtime.has_container and (job.request.container.code is None or "$" in source):
        raise UsageError(
            f"without a container, {source} is seen by a link in the run's copy of the code",
            where="data",
            hint="--code ., and a path without variables",
        )
    for path in (source, item.target):
        if runtime.has_container and not runtime.can_mount(path):
            raise UsageError(f"{runtime.kind} cannot mount {path}", where="data", hint="give it another name")


def refuse_missing(job: Job) -> None:
    """Raise UsageError if a path of the cluster is missing on this machine, or cannot be read."""
    for mount in job.container.data:
        if "$" in mount.source:  # a module of the site sets the variable on the nodes
            continue
        if not os.path.lexists(mount.source):
            raise path_error(mount.source, "missing", "this machine")
        if not os.access(mount.source, os.R_OK):
            raise path_error(mount.source, "closed", "this machine")


def path_error(path: str, state: str, machine: str) -> UsageError:
    """Return the error for data on `machine` that is missing or that this user cannot read.

    Parameters
    ----------
    state : ``missing`` or ``closed``.
    """
    if state == "missing":
        return UsageError(f"{machine} has no {path}", where="data", hint="correct the path in imgkit.toml")
    return UsageError(
        f"you may not read {path} on {machine}",
        where="data",
        hint=f"its owner lets your group in: chmod -R g+rX {path}; see its group: ls -ld {path}",
    )


def is_in_code(target: str) -> bool:
    """Return whether a path of the job is in the copy of the code."""
    return target.startswith(f"/{WORKSPACE}/")


def mount_points(request: JobRequest, entries: Iterable[CodeFile]) -> Iterator[CodeFile]:
    """Yield the folders that the code lacks, and over which data is mounted: no runtime makes them there.

    Raises
    ------
    UsageError : the code has a file where data is mounted.
    """
    kinds: dict[str, str] = {entry.name: entry.kind for entry in entries}
    for item in spec.parse_all(request.container.data):
        if not is_in_code(item.target):
            continue
        name = item.target.removeprefix(f"/{WORKSPACE}/")
        parents = [name]
        while posixpath.dirname(parents[0]):
            parents.insert(0, posixpath.dirname(parents[0]))
        for parent in parents:
            kind = kinds.get(parent, "")
            if kind not in ("", "dir"):
                raise UsageError(
                    f"the code has a {kind} {parent}, and data is mounted at {item.target}",
                    where="data",
                    hint="choose another place: /SRC:/DEST",
                )
            if not kind:
                kinds[parent] = "dir"
                yield CodeFile(name=parent, kind="dir", source=Path(parent))


def code_patterns(request: JobRequest, code: Path) -> Iterator[str]:
    """Yield a pattern, as in .gitignore, for each folder of data in the folder `code`: it is not code."""
    project = request.project.file.parent if request.project else Path()
    for item in spec.parse_all(request.container.data):
        path = Path(os.path.abspath(project / item.source))  # noqa: PTH100 - keeps links
        root = code.absolute()
        if item.is_local and path.is_relative_to(root):
            yield f"/{path.relative_to(root).as_posix()}"
