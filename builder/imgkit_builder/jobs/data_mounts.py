"""Mount the folders of data of a request into its job.

Data comes from a folder of this machine, from a path of the cluster, or from a repository of the Hugging Face
hub. If it is mounted below the run's code, the code gets an empty folder as the mount point.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from imgkit_builder.base.progress import Reporter
from imgkit_builder.data import folder, hub, spec
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.data.spec import DataSpec
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.code_tree import CodeFile
from imgkit_builder.jobs.job import DataMount, Job, RunScript
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE


def list_folders(request: JobRequest) -> tuple[DataFolder, ...]:
    """Return the folders of data that are on this machine, with lists of their files.

    Paths of the cluster are left out. A repository of the hub that was not downloaded yet has no files.

    Raises
    ------
    UsageError : an item of ``data`` cannot be parsed, or its folder cannot be sent.
    """
    project = request.project_folder
    folders = []
    for item in spec.parse_all(request.container.data):
        if item.hub:
            folders.append(hub.find(item, project))
        elif item.is_local:
            folders.append(folder.find_folder(item, project))
    return tuple(folders)


def download(folders: Iterable[DataFolder], request: JobRequest, report: Reporter) -> tuple[DataFolder, ...]:
    """Download the repositories of the hub that this machine lacks, and return `folders` with their files.

    Raises
    ------
    ImgkitError : in the cases of `hub.download`.
    """
    project = request.project_folder
    complete = []
    for item in folders:
        if item.files == 0:  # a repository of the hub that this machine lacks
            item = hub.download(item.spec, project, report)
        complete.append(item)
    return tuple(complete)


def with_data(job: Job, folders: Iterable[DataFolder], store: str = "") -> Job:
    """Return `job` with its folders of data mounted.

    Parameters
    ----------
    folders : the folders of data that are on this machine, as `list_folders` returns them.
    store : the folder on the nodes with copies of `folders`. If it is empty, the folders are mounted from
        this machine's paths.

    Raises
    ------
    UsageError : the job's runtime cannot mount a folder.
    """
    specs = spec.parse_all(job.request.container.data)
    sources: dict[DataSpec, str] = {}
    for data_folder in folders:
        path = f"{store}/{data_folder.name}" if store else str(data_folder.path)
        sources[data_folder.spec] = quoting.check_flag_value("data", path)
    mounts = []
    for item in specs:
        source = sources.get(item, item.source)  # a path of the cluster is its own source
        _refuse_unmountable(job, item, source)
        mounts.append(DataMount(source=source, target=item.target))
    if any(item.hub for item in specs):
        job = _with_hub_variables(job)
    return job.with_container(data=tuple(mounts))


def _with_hub_variables(job: Job) -> Job:
    """Return `job` with the variables by which its command finds the hub's repositories without internet.

    The user's own values of these variables take precedence in a container.
    """
    runtime = runtime_of(job)
    workspace = f"/{WORKSPACE}" if runtime.mounts_folders else job.workspace
    home = f"{workspace}/{spec.HUB_HOME}"
    # A system can set HF_HUB_CACHE, which huggingface_hub prefers to HF_HOME.
    variables = {"HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub", "HF_HUB_OFFLINE": "1"}
    if not runtime.has_container:  # the shell replaces $IMGKIT_RUN_DIR in settings
        return dataclasses.replace(job, settings={**job.settings, **variables})
    return job.with_container(env={**variables, **job.container.env})


def _refuse_unmountable(job: Job, item: DataSpec, source: str) -> None:
    """Raise UsageError if the job's command cannot see the data at the path that `item` names.

    Parameters
    ----------
    source : the path of the data on the nodes. It may begin with a variable of the site: ``$SCRATCH/a``.
    """
    runtime = runtime_of(job)
    if item.hub and job.request.container.code is None:
        raise UsageError(
            f"{item.source} is seen in the run's copy of the code, and there is none",
            where="data",
            hint='--code ., or in imgkit.toml: code = "."',
        )
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


# Print "missing PATH" for each argument that does not exist, and "closed PATH" for each that cannot be read.
_CHECK_PATHS = """\
for path; do
    if [ ! -e "$path" ]; then echo "missing $path"; elif [ ! -r "$path" ]; then echo "closed $path"; fi
done
"""


def refuse_missing(request: JobRequest, machine: str, run_script: RunScript) -> None:
    """Raise UsageError if a path of the cluster is missing, or if the user cannot read it.

    Paths with a variable of the site are not checked, because only the nodes know the variable.

    Parameters
    ----------
    machine : the name of the machine that submits the job. Messages contain it.
    run_script : runs a script of sh on that machine.
    """
    paths = []
    for item in spec.parse_all(request.container.data):
        if not item.is_local and "$" not in item.source:
            paths.append(item.source)
    if not paths:
        return
    output = run_script(_CHECK_PATHS, paths, ()).decode(errors="replace")
    state, _, path = output.partition("\n")[0].partition(" ")
    if state:
        raise _path_error(path, state, machine)


def _path_error(path: str, state: str, machine: str) -> UsageError:
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
    """Return whether a path in the container is below ``/workspace``, the run's copy of its code."""
    return target.startswith(f"/{WORKSPACE}/")


def mount_points(request: JobRequest, entries: Iterable[CodeFile]) -> Iterator[CodeFile]:
    """Yield the folders that the code lacks and over which data is mounted, with their parents.

    The code must contain these mount points, because no runtime makes them in the run's copy of the code. For
    a data set of the hub, a link in the hub's cache is yielded too, by which huggingface_hub finds it.

    Raises
    ------
    UsageError : the code has a file where data is mounted.
    """
    kinds: dict[str, str] = {entry.name: entry.kind for entry in entries}
    for item in spec.parse_all(request.container.data):
        if not is_in_code(item.target):
            continue
        name = item.target.removeprefix(f"/{WORKSPACE}/")
        points = [CodeFile(name=name, kind="dir", source=Path(name))]
        if item.hub and item.hub.is_data_set:
            link = f"{spec.HUB_HOME}/hub/{item.hub.cache_name}"
            target = posixpath.relpath(f"{name}/{spec.HUB_CACHE}", posixpath.dirname(link))
            points.append(CodeFile(name=link, kind="symlink", source=Path(link), link=target))
        for point in points:
            parents = [str(path) for path in PurePosixPath(point.name).parents][-2::-1]  # without "."
            folders = [CodeFile(name=parent, kind="dir", source=Path(parent)) for parent in parents]
            for entry in (*folders, point):
                kind = kinds.get(entry.name, "")
                if kind not in ("", entry.kind):
                    raise UsageError(
                        f"the code has a {kind} {entry.name}, and data is mounted at {item.target}",
                        where="data",
                        hint="choose another place: /SRC:/DEST",
                    )
                if not kind:
                    kinds[entry.name] = entry.kind
                    yield entry


def code_patterns(request: JobRequest, code: Path) -> Iterator[str]:
    """Yield a pattern, as in .gitignore, for each folder of data in the folder `code`: ``/data/letters``.

    The patterns keep data out of the code. The file with the hub's locked versions stays out too, because a
    download writes it after the code has been read.
    """
    project = request.project_folder
    root = code.absolute()
    for item in spec.parse_all(request.container.data):
        name = hub.LOCK if item.hub else item.source
        path = Path(os.path.abspath(project / name))  # noqa: PTH100 - keeps links
        if item.is_local and path.is_relative_to(root):
            yield f"/{path.relative_to(root).as_posix()}"
