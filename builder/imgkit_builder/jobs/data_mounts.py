"""Mount the data folders of a request into its job.

Data comes from a folder of this machine, from a path on the cluster, or from a repository on the Hugging Face
hub. If it is mounted inside the run's copy of the code, that copy gets an empty folder as the mount point.
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
    """Return the data folders of the request that are on this machine, with lists of their files.

    Paths on the cluster are left out. A repository of the Hugging Face hub that this machine has not
    downloaded yet is returned without files, and `download` downloads it later.

    Raises
    ------
    UsageError : an item of ``data`` cannot be parsed, or its folder cannot be sent.
    """
    project = request.project_folder
    folders = []
    for data_spec in spec.parse_all(request.container.data):
        if data_spec.hub:
            folders.append(hub.find(data_spec, project))
        elif data_spec.is_local:
            folders.append(folder.find_folder(data_spec, project))
    return tuple(folders)


def download(folders: Iterable[DataFolder], request: JobRequest, report: Reporter) -> tuple[DataFolder, ...]:
    """Return `folders` with their files, after downloading repositories of the hub that are missing here.

    Raises
    ------
    ImgkitError : a repository cannot be downloaded.
    """
    complete = []
    for data_folder in folders:
        if data_folder.files:
            complete.append(data_folder)
        else:  # a repository of the hub that this machine does not have yet
            complete.append(hub.download(data_folder.spec, request.project_folder, report))
    return tuple(complete)


def with_data(job: Job, folders: Iterable[DataFolder], store: str = "") -> Job:
    """Return `job` with its data folders mounted read-only at the paths that the request names.

    For example, the item ``data/letters`` is mounted at ``/workspace/data/letters``, and
    ``/gpfs/letters:/data`` at ``/data``.

    Parameters
    ----------
    folders : the data folders that are on this machine, as `list_folders` returns them.
    store : the folder on the nodes that contains copies of `folders`. If it is empty, the folders are mounted
        from their paths on this machine.

    Raises
    ------
    UsageError : the job's runtime cannot mount a folder.
    """
    specs = spec.parse_all(job.request.container.data)
    sources = {}  # the path on the nodes, by the item of the request
    for data_folder in folders:
        path = f"{store}/{data_folder.name}" if store else str(data_folder.path)
        sources[data_folder.spec] = quoting.check_flag_value("data", path)
    mounts = []
    for data_spec in specs:
        # A path on the cluster is not among `folders`, and is mounted from that path itself.
        mount = DataMount(source=sources.get(data_spec, data_spec.source), target=data_spec.target)
        _refuse_unmountable(job, data_spec, mount)
        mounts.append(mount)
    # Data of the Hugging Face hub is found through variables.
    if any(data_spec.hub for data_spec in specs):
        job = _with_hub_variables(job)
    return job.with_container(data=tuple(mounts))


def _with_hub_variables(job: Job) -> Job:
    """Return `job` with variables that let huggingface_hub find downloaded data without internet access.

    In a container or pod, the user's own values of these variables take precedence.
    """
    runtime = runtime_of(job)
    workspace = f"/{WORKSPACE}"
    if not runtime.mounts_folders:  # in pods and without a container, the copy stays in the run folder
        workspace = job.workspace
    home = f"{workspace}/{spec.HUB_HOME}"
    # A system can set HF_HUB_CACHE, which huggingface_hub prefers to HF_HOME.
    variables = {"HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub", "HF_HUB_OFFLINE": "1"}
    if runtime.has_container:
        return job.with_container(env={**variables, **job.container.env})
    # Without a container, the path of the run's copy can contain $IMGKIT_RUN_DIR, which the shell replaces
    # only in settings.
    return dataclasses.replace(job, settings={**job.settings, **variables})


def _refuse_unmountable(job: Job, data_spec: DataSpec, mount: DataMount) -> None:
    """Raise UsageError if the job's command could not see the data at the path that `data_spec` names.

    A container mounts the data at that path. In a pod, or without a container, a link in the run's copy of
    the code leads to the data instead. So in these two cases, the path must be inside the code.
    """
    runtime = runtime_of(job)
    if data_spec.hub and job.request.container.code is None:
        raise UsageError(
            f"{data_spec.source} is seen in the run's copy of the code, and there is none",
            where="data",
            hint='--code ., or in imgkit.toml: code = "."',
        )
    if not runtime.has_container:
        _refuse_unlinkable_on_host(job, mount, data_spec.source)
        return
    if runtime.is_isolated:  # the job runs in pods
        _refuse_unlinkable_in_pods(job, mount, data_spec.source)
    # Pods get a link instead of a mount, but the same characters are refused.
    for path in (mount.source, mount.target):
        if not runtime.can_mount(path):
            raise UsageError(f"{runtime.kind} cannot mount {path}", where="data", hint="give it another name")


def _refuse_unlinkable_in_pods(job: Job, mount: DataMount, name: str) -> None:
    """Raise UsageError if a link in the run's copy of the code cannot lead pods to the data `name`.

    Pods mount no folder of this machine. Only if a remote stores the files of the pods on their volume can
    the pods reach the data. The run's copy of the code then gets a link to it.
    """
    # In pods, a job has a run folder at this point only if a remote stores its files.
    has_copy = job.run_folder and job.request.container.code is not None
    if not has_copy or not is_in_code(mount.target) or "$" in mount.source:
        raise UsageError(
            f"pods see no folder of this machine or its cluster, such as {name}",
            where="data",
            hint="fill a volume of the cluster, and mount it: --pvc CLAIM:/DEST",
        )


def _refuse_unlinkable_on_host(job: Job, mount: DataMount, name: str) -> None:
    """Raise UsageError if a job without a container could not see the data `name` through a link.

    Without a container, nothing can be mounted. The run's copy of the code gets a link to the data instead.
    """
    if not is_in_code(mount.target):
        raise UsageError(
            f"--runtime {job.container.runtime} has no container that could show {name} as {mount.target}",
            where="data",
            hint=f"let the program read {name}; or in the project: {name}:/{WORKSPACE}/data",
        )
    if job.request.container.code is None or "$" in mount.source:
        raise UsageError(
            f"without a container, {mount.source} is seen by a link in the run's copy of the code",
            where="data",
            hint="--code ., and a path without variables",
        )


# Print "missing PATH" for each argument that does not exist, and "closed PATH" for each that cannot be read.
_CHECK_PATHS = """\
for path; do
    if [ ! -e "$path" ]; then echo "missing $path"; elif [ ! -r "$path" ]; then echo "closed $path"; fi
done
"""


def refuse_missing(request: JobRequest, machine: str, run_script: RunScript) -> None:
    """Raise UsageError if a data folder on the cluster is missing, or if the user may not read it.

    A path with a variable of the site, such as ``$SCRATCH``, is not checked, because only the nodes know the
    variable.

    Parameters
    ----------
    machine : the name of the machine that submits the job, for error messages.
    run_script : runs a script of sh on that machine.
    """
    paths = []
    for data_spec in spec.parse_all(request.container.data):
        if not data_spec.is_local and "$" not in data_spec.source:
            paths.append(data_spec.source)
    if not paths:
        return
    output = run_script(_CHECK_PATHS, paths, ()).decode(errors="replace")
    state, _, path = output.partition("\n")[0].partition(" ")  # the first problem: "missing /gpfs/letters"
    if not path:
        return
    if state == "missing":
        raise UsageError(f"{machine} has no {path}", where="data", hint="correct the path in imgkit.toml")
    raise UsageError(
        f"you may not read {path} on {machine}",
        where="data",
        hint=f"its owner lets your group in: chmod -R g+rX {path}; see its group: ls -ld {path}",
    )


def is_in_code(target: str) -> bool:
    """Return whether a path in the container is below ``/workspace``, where the run's copy of its code is."""
    return target.startswith(f"/{WORKSPACE}/")


def mount_points(request: JobRequest, entries: Iterable[CodeFile]) -> Iterator[CodeFile]:
    """Yield the empty folders that the code needs as mount points for data, together with their parents.

    For example, data at ``/workspace/data/letters`` needs the folders ``data`` and ``data/letters``. Folders
    that the code already has are left out. The folders must be part of the code, because no runtime creates a
    mount point in the run's copy of the code. For a data set of the Hugging Face hub, a link in the hub's
    cache is yielded as well, through which huggingface_hub finds the data.

    Raises
    ------
    UsageError : the code has a file at the path where data is to be mounted.
    """
    kinds = {entry.name: entry.kind for entry in entries}  # of the code, and of what is yielded below
    for data_spec in spec.parse_all(request.container.data):
        if not is_in_code(data_spec.target):  # the runtime creates mount points outside of the code
            continue
        for mount_point in _mount_points_of_item(data_spec):
            kind = kinds.get(mount_point.name)
            # The code has it, or it was yielded before as the parent of another mount point.
            if kind == mount_point.kind:
                continue
            if kind is not None:
                raise UsageError(
                    f"the code has a {kind} {mount_point.name}, and data is mounted at {data_spec.target}",
                    where="data",
                    hint="choose another place: /SRC:/DEST",
                )
            kinds[mount_point.name] = mount_point.kind
            yield mount_point


def _mount_points_of_item(data_spec: DataSpec) -> Iterator[CodeFile]:
    """Yield the mount point of one item of ``data``, for example the folders ``data`` and ``data/letters``.

    A data set of the Hugging Face hub also needs a link in the hub's cache, where huggingface_hub looks for
    it. Parents come before their content.
    """
    mount_point = data_spec.target.removeprefix(f"/{WORKSPACE}/")
    yield from _folders_down_to(PurePosixPath(mount_point))
    if data_spec.hub is None or not data_spec.hub.is_data_set:
        return
    # For example, the link "hf/hub/datasets--me--letters" has the target "../data/me/letters/.hub".
    link = f"{spec.HUB_HOME}/hub/{data_spec.hub.cache_name}"
    cache_folder = posixpath.dirname(link)
    yield from _folders_down_to(PurePosixPath(cache_folder))
    target = posixpath.relpath(f"{mount_point}/{spec.HUB_CACHE}", cache_folder)
    yield CodeFile(name=link, kind="symlink", source=Path(link), link=target)


def _folders_down_to(path: PurePosixPath) -> Iterator[CodeFile]:
    """Yield each parent of a folder, and then the folder: ``data/letters`` -> ``data``, ``data/letters``."""
    *parents, _ = path.parents  # leave out the last parent, which is "."
    for ancestor in (*reversed(parents), path):
        yield CodeFile(name=str(ancestor), kind="dir", source=Path(ancestor))


def code_patterns(request: JobRequest, code: Path) -> Iterator[str]:
    """Yield a .gitignore pattern for each data folder inside the folder `code`, such as ``/data/letters``.

    The patterns exclude data from the code, because data is sent separately. For data of the Hugging Face
    hub, the pattern excludes the file with the locked versions instead. A download writes that file after the
    code has been read.
    """
    root = code.absolute()
    for data_spec in spec.parse_all(request.container.data):
        if not data_spec.is_local:
            continue
        name = hub.LOCK if data_spec.hub else data_spec.source
        path = Path(os.path.abspath(request.project_folder / name))  # noqa: PTH100 - keeps links
        if path.is_relative_to(root):
            yield f"/{path.relative_to(root).as_posix()}"
