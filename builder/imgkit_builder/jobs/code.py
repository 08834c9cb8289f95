"""Read the folder of ``--code``, and refuse code that the job would not run.

Files that git or Docker ignores are not sent to the nodes. Files that usually contain secrets are refused.
The record of the run contains a digest of all files that are sent. A project is refused if the image has
installed it in another folder. Python would then import the copy in the image instead of the one in
``--code``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import posixpath
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.image.context import LargeContext
from imgkit_builder.jobs import data_mounts, quoting
from imgkit_builder.jobs.code_tree import CodeFile, CodeTree
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import CodeRecord, JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.runtimes.base import user_variables, with_targets
from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe import sources
from imgkit_builder.recipe.requirements import PYPROJECT, project_name
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import unsquash
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.launch import run_code
from imgkit_entrypoints.system import WORKSPACE

# Code of more than 100 MB or 10,000 files is sent only if the user agrees (--yes), because such code often
# contains data by mistake.
LARGE_BYTES = 100 * 10**6
MANY_FILES = 10_000
# 1 MB. A larger file or folder that is not sent is probably data that the program reads.
_DATA_BYTES = 10**6
# A folder with at most this many files is not the reason why the code is large.
_FEW_FILES = 100
# The largest number of files and folders in one message, so that it stays readable.
_MAX_NAMES = 3
# The largest number of file names in an error about files that look secret.
_MAX_SECRET_FILES = 5
# Suffixes of files that imgkit writes: images, descriptions and digests. They are not data of the program.
_NO_DATA = (".sif", ".sqsh", ".manifest.json", ".sha256")
# Variable that keeps ``__pycache__`` out of the run's copy of the code.
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The folder of ``--code`` and its content, which has been read."""

    folder: Path
    tree: CodeTree
    record: CodeRecord
    projects: tuple[InstalledProject, ...]
    """The Python projects in `folder`. Each has its folder in the job, such as ``/workspace``.

    If the code is only a part of a project, the pyproject.toml is in a parent of `folder`. Such a project has
    no folder in the job.
    """
    left_out: tuple[str, ...] = ()
    """Names of files and folders that are not sent: git or Docker ignores them, or imgkit wrote them."""


def read_code_folder(request: JobRequest, *, large: bool, report: Reporter) -> CodeFolder:
    """Read the folder of ``--code``, and return its content without ignored files.

    Parameters
    ----------
    large : whether the user agrees to send code of more than `LARGE_BYTES` or `MANY_FILES`.
    report : receives the progress while files are read.

    Raises
    ------
    UsageError : the folder is missing or empty, cannot be read, or contains files that look secret.
    LargeContext : the folder is large, and `large` is false. The error is raised before any file is read.
    """
    assert request.container.code is not None  # noqa: S101 - the caller has looked
    folder = request.container.code
    _refuse_missing_folder(folder)
    data = data_mounts.code_patterns(request, folder)
    entries, left_out = _list_folder(folder, request.container.allow, data)
    if all(entry.kind == "dir" for entry in entries):
        raise UsageError(
            "nothing to ship: every file is ignored",
            where=f"--code {folder}",
            hint=".gitignore and .dockerignore leave files out: git status --ignored",
        )
    if not large:
        _refuse_large(folder, entries)
    if sum(entry.size_bytes for entry in entries) > LARGE_BYTES:
        report.stage(f"read {folder}")
    tree = CodeTree([*entries, *data_mounts.mount_points(request, entries)], report)
    git_description, is_committed = _describe_git_state(folder)
    return CodeFolder(
        folder=folder,
        tree=tree,
        record=CodeRecord(sha256=tree.sha256, git=git_description, uncommitted=not is_committed),
        projects=tuple(_find_python_projects(folder, entries)),
        left_out=left_out,
    )


def _refuse_missing_folder(folder: Path) -> None:
    """Raise UsageError if the folder of ``--code`` does not exist, or is not a folder."""
    if folder.is_dir():
        return
    message = "not a directory" if os.path.lexists(folder) else "no such directory"
    raise UsageError(message, where=f"--code {folder}", hint="the folder of your code, for example: --code .")


def _find_python_projects(folder: Path, entries: Iterable[CodeFile]) -> Iterator[InstalledProject]:
    """Yield each Python project of the code, with the folder in which the job sees it.

    A project is recognized by its pyproject.toml. For example, ``libs/a/pyproject.toml`` is the project in
    ``/workspace/libs/a``. If the code is only a part of a project, such as its folder ``src``, the
    pyproject.toml is in a parent folder. That project is yielded without a folder, because the job does not
    get all of it.
    """
    files = {PurePosixPath(entry.name): entry.source for entry in entries if entry.kind == "file"}
    for path, file in files.items():
        if path.name == PYPROJECT:
            # "libs/a/pyproject.toml" -> "/workspace/libs/a"
            project_folder = PurePosixPath(f"/{WORKSPACE}", path.parent)
            yield InstalledProject(name=project_name(file), folder=str(project_folder))
    # Only a folder with packages, or a folder "src", can be a part of a project in a parent folder.
    has_package = any(path.name == "__init__.py" for path in files)
    may_be_part = has_package or folder.resolve().name == "src"
    if may_be_part and PurePosixPath(PYPROJECT) not in files:
        yield from _find_parent_project(folder)


def _find_parent_project(folder: Path) -> Iterator[InstalledProject]:
    """Yield the Python project that contains `folder`, if one of its parent folders has a pyproject.toml.

    Only the nearest such project is yielded.
    """
    for parent in folder.resolve().parents:
        file = parent / PYPROJECT
        if file.is_file():
            # Without a folder, because the job does not get all of the project.
            yield InstalledProject(name=project_name(file))
            return


def with_code(job: Job, code: CodeRecord, store: Path) -> Job:
    """Return `job` with the version of the code that its run gets a copy of.

    The command also gets the variable PYTHONDONTWRITEBYTECODE, which keeps ``__pycache__`` out of the copy.
    If the user or the recipe's system sets this variable, that value is kept.

    Parameters
    ----------
    store : the folder on the nodes that contains each version of the code that was sent, in a folder named by
        its digest.
    """
    folder = quoting.check_flag_value("--code", str(store / code.sha256))
    env = dict(job.container.env)
    # With this variable, a dist-* command refuses to start if the copy is not mounted in its container. In
    # pods and without a container, there is no such mount.
    if runtime_of(job).mounts_folders:
        env[run_code.CODE_VARIABLE] = code.sha256
    if _NO_BYTECODE not in {*user_variables(job.container), *job.recipe.system.env}:
        env[_NO_BYTECODE] = "1"
    return job.with_container(code=code, code_folder=folder, env=env)


def with_new_run_folder(job: Job) -> Job:
    """Return `job` with the path of a new run folder, ``runs/NAME-20261128-224000-3f2a`` in the job's folder.

    imgkit itself creates the folder of such a job, because the job has no script that could do so.
    """
    started = datetime.now().astimezone()
    token = secrets.token_hex(2)  # distinguishes two runs that start in the same second
    return with_run_folder(job, f"{job.directory}/runs/{job.name}-{started:%Y%m%d-%H%M%S}-{token}")


def with_run_folder(job: Job, folder: str) -> Job:
    """Return `job` with the run folder at the path `folder`."""
    return dataclasses.replace(job, run_folder=folder, settings={**job.settings, "IMGKIT_RUN_DIR": folder})


def refuse_projects_in_image(code: CodeFolder, recipe: Target) -> None:
    """Refuse code that contains a project which is also installed in the image, for a job in pods.

    Pods mount nothing at ``/workspace``. So Python would always import the copy in the image, wherever that
    copy is installed.

    Raises
    ------
    UsageError : the job would run the copy in the image. The error names the line of the recipe if it is
        known.
    """
    code_names = {project.name for project in code.projects}
    for installed in recipe.projects:
        if installed.name in code_names:
            raise UsageError(
                f"the code has the project {installed.name}, and pods would import the image's copy of it",
                # If the step that installs the project is unknown, the error names the first one.
                where=recipe.where("image", "pip", installed.step or 0, "project"),
                hint="leave this step out of the recipe, and name its packages in another one; or "
                "--no-code, for the code of the image",
            )


def refuse_shadowed_code(code: CodeFolder, recipe: Target, sif: Path | None) -> None:
    """Refuse code that contains a project which the image has installed in another folder.

    Python would import the copy in the image, and ignore the user's changes without a message.

    Parameters
    ----------
    sif : the image if it is on this machine. With None, the code is compared with the projects that `recipe`
        installs.

    Raises
    ------
    UsageError : the job would run the copy in the image. The error names the line of the recipe if it is
        known, and what to write there.
    """
    _refuse_shadowed_projects(code.projects, f"--code {code.folder}", recipe, sif)


def refuse_shadowed_bind(job: Job, sif: Path | None) -> None:
    """Refuse a project that ``--bind`` mounts below ``/workspace`` if the image has it in another folder.

    As with `refuse_shadowed_code`, Python would import the copy in the image and ignore the mounted project.
    If the source of a mount is only on the nodes, the mount is not checked.
    """
    for bind in with_targets(job.container.binds):
        source, target = bind.split(":")[:2]
        if not f"{target}/".startswith(f"/{WORKSPACE}/"):
            continue
        file = Path(source, PYPROJECT)
        if file.is_file():
            project = InstalledProject(name=project_name(file), folder=posixpath.normpath(target))
            _refuse_shadowed_projects([project], f"--bind {bind}", job.recipe, sif)


def _refuse_shadowed_projects(
    projects: Sequence[InstalledProject], flag: str, recipe: Target, sif: Path | None
) -> None:
    """Raise UsageError for a project of the code that the image has installed in another folder.

    Python would import the copy in the image, and ignore the user's changes without a message.

    Parameters
    ----------
    projects : the projects in the code, with the folders in which the job sees them.
    flag : the flag that names the code, for the error: ``--code /home/me/project``.
    sif : the image, or None if this machine does not have it. With None, only the projects that `recipe`
        installs are known.
    """
    if sif is None:
        installed_projects = recipe.projects
    else:
        installed_projects = baked.read_projects(sif, _top_project_name(projects))
    for project in projects:
        for installed in installed_projects:
            # An installed project without a folder is a copy in site-packages. One in the same folder is no
            # problem: the job mounts the code over it.
            is_elsewhere = not installed.folder or installed.folder != project.folder
            if installed.name == project.name and is_elsewhere:
                raise _unused_project_error(project, installed, flag, recipe)


def _top_project_name(projects: Sequence[InstalledProject]) -> str:
    """Return the name of the project to which the top folder of the code belongs, or "" if there is none.

    The top folder is the project itself, or a part of a project whose pyproject.toml is in a parent folder. A
    project in a subfolder, such as ``/workspace/libs/a``, does not count.
    """
    for project in projects:
        if project.folder in ("", f"/{WORKSPACE}"):
            return project.name
    return ""


def _unused_project_error(
    project: InstalledProject, installed: InstalledProject, flag: str, recipe: Target
) -> UsageError:
    """Return the error for a project of the code that the image has installed in another folder.

    Python would run the copy in the image. The hint names the ``editable`` folder to set in the recipe, so
    that the installed package is the run's copy of the code.

    Parameters
    ----------
    project : the project in the code.
    installed : the same project, as the image has it.
    """
    title = f"the project {project.name}" if project.name else "a project without a name"
    folder = project.folder or f"/{WORKSPACE}"
    hints = []
    if project.folder:
        message = f"the code has {title} in {folder}"
    else:
        message = f"the code is only a part of {title}"
        hints.append("--code with the whole folder of the project")
    image_copy = f"that in {installed.folder}" if installed.folder else "its copy in site-packages"
    message += f", but the image runs {image_copy}"
    step = _pip_step(installed, recipe)
    if installed.folder != folder:  # if they are equal, only --code is wrong
        key = "a pip step" if step is None else f"image.pip[{step}]"
        hints.append(
            f"set `editable: {folder}` in {key} of the recipe {recipe.name}, and build the image again"
        )
    # The positions are the lines of the recipe's file. A recipe from the record in an image has none. If the
    # step that installs the project is unknown, the error names the first one.
    where = flag
    if recipe.positions:
        where = recipe.where("image", "pip", step or 0, "project")
    return UsageError(message, where=where, hint="; ".join(hints))


def _pip_step(installed: InstalledProject, recipe: Target) -> int | None:
    """Return the index of the step in the recipe's ``image.pip`` that installs the project.

    The result is None if neither the recipe nor the image's record names the step.
    """
    for project in (*recipe.projects, installed):
        if project.name == installed.name and project.step is not None:
            return project.step
    return None


def image_code_notice(job: Job) -> str:
    """Return a warning about code in the image that the job does not use, or "" if there is none.

    A recipe can copy code to a path below ``/workspace``. The job mounts the run's copy of ``--code`` there,
    which hides the code in the image.
    """
    recipe = job.recipe
    for index, target in enumerate(recipe.copies):
        if f"{posixpath.normpath(target)}/".startswith(f"/{WORKSPACE}/"):
            where = recipe.where("image", "copy", index)
            code = job.request.container.code
            return f"{where}: the image has code in {target}; the job runs that of --code {code}"
    return ""


def left_out_notice(code: CodeFolder, image: Path | None) -> str:
    """Return a one-line notice about files that are not sent although the job may need them, or "".

    These are files and folders of more than 1 MB, and files that the image has at the same path in
    ``/workspace``. The hint suggests to list their folders as data.

    Parameters
    ----------
    image : the job's image if it is a .sif or .sqsh on this machine. With None, only the sizes are checked.
    """
    names = _select_needed_names(code, image)
    if not names:
        return ""
    # Suggest the folder of a file, or the entry itself if it is at the top of the code, which has no folder.
    folders = [posixpath.dirname(name) or name for name in names]
    unique_folders = list(dict.fromkeys(folders))  # each folder once, in the original order
    data = json.dumps(unique_folders[:_MAX_NAMES], ensure_ascii=False)
    return f"not sent: {sources.describe_left_out(names)}; if the job reads it: data = {data} in imgkit.toml"


def _select_needed_names(code: CodeFolder, image: Path | None) -> list[str]:
    """Return the ignored files and folders of the code that the job may need, as `left_out_notice` says.

    Parameters
    ----------
    image : a .sif or .sqsh on this machine, or None to look only at the sizes.
    """
    image_names: Collection[str] = ()
    if image is not None and code.left_out:  # the image is read only if there is something to look for
        image_names = _list_names_in_image(image)
    names = []
    for name in code.left_out:
        path_in_image = f"{WORKSPACE}/{name.rstrip('/')}"  # without a leading slash, as in the image
        if path_in_image in image_names or _looks_like_data(code.folder, name):
            names.append(name)
    return names


def _list_names_in_image(image: Path) -> frozenset[str]:
    """Return the paths of the files that the image has in ``/workspace``, such as ``workspace/data/a.bin``.

    If no program on this machine can read the image, the result is empty.
    """
    names = set()
    with contextlib.suppress(CheckFailed, ToolFailed, ToolMissing, UsageError):
        # A .sif can have overlays beside its root partition.
        for squashfs in unsquash.open_squashfs(image):
            for file in squashfs.list_files(WORKSPACE):
                # unsquashfs prints a symlink as "NAME -> TARGET".
                names.add(file.path.partition(" -> ")[0])
    return frozenset(names)


def _looks_like_data(folder: Path, name: str) -> bool:
    """Return whether a file or folder that is not sent is larger than 1 MB and looks like data.

    Run folders, images, archives of imgkit, caches and virtual environments do not look like data.
    """
    path = folder / name
    if name.startswith("runs/") or name.endswith(_NO_DATA):
        return False
    if Path(f"{path}.manifest.json").exists():  # imgkit writes X.tar.manifest.json beside an archive X.tar
        return False
    for marker in sources.CACHE_MARKERS:  # files that only caches and virtual environments have
        if Path(path, marker).exists():
            return False
    return _is_larger_than(path, _DATA_BYTES)


def _is_larger_than(path: Path, limit_bytes: int) -> bool:
    """Return whether a file, or all files in a folder together, are larger than `limit_bytes`."""
    size_bytes = 0
    with contextlib.suppress(OSError):  # a file was removed meanwhile
        size_bytes = path.lstat().st_size
        for parent, _, file_names in os.walk(path):
            for file_name in file_names:
                size_bytes += Path(parent, file_name).lstat().st_size
                if size_bytes > limit_bytes:  # stop early, because a data set can have millions of files
                    return True
    return size_bytes > limit_bytes


def _list_folder(
    folder: Path, allow: Sequence[str], data: Iterable[str]
) -> tuple[list[CodeFile], tuple[str, ...]]:
    """Return the entries of `folder` that are sent to the nodes, and the names of the ignored entries.

    In the list, each folder comes before its content.

    Parameters
    ----------
    allow : names of files that are sent although such files usually contain secrets.
    data : patterns, as in .gitignore, that match the folders of data. They are sent separately from the code.

    Raises
    ------
    UsageError : a file cannot be read, usually contains a secret, or is a device, socket or pipe.
    """
    patterns = [*data, *(f"!{name}" for name in allow)]  # "!" un-ignores a name, as in .gitignore
    try:
        listing = sources.list_source(folder, patterns, listed=_list_git_files(folder))
        entries = [_describe_file(entry) for entry in listing.entries]
    except FileNotFoundError as error:
        raise UsageError(
            "it was removed while imgkit read it", where=str(error.filename), hint="run the command again"
        ) from None
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="chmod u+rX it, or list it in .gitignore or .dockerignore",
        ) from error
    if listing.secret:
        raise _secret_files_error(folder, listing.secret)
    return entries, listing.left_out


def _secret_files_error(folder: Path, names: Sequence[str]) -> UsageError:
    """Return the error for files of the code that seem to contain secrets, by their names or content."""
    shown_names = ", ".join(names[:_MAX_SECRET_FILES])
    if len(names) > _MAX_SECRET_FILES:
        shown_names += " ..."
    return UsageError(
        f"these files usually hold secrets: {shown_names}",
        where=f"--code {folder}",
        hint=f"list them in .gitignore or .dockerignore; if it holds none: --allow {names[0].rstrip('/')}",
    )


def _describe_file(source: sources.SourceEntry) -> CodeFile:
    """Return the description of a file, folder or link in the code. A link is not followed.

    Raises
    ------
    UsageError : `source` is a device, socket or pipe.
    """
    path = Path(source.entry.path)
    status = source.entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        return CodeFile(name=source.name, kind="dir", source=path)
    if stat.S_ISLNK(status.st_mode):
        link = os.readlink(path)  # noqa: PTH115 - Path.readlink loses ./ and //
        return CodeFile(name=source.name, kind="symlink", source=path, link=link)
    if stat.S_ISREG(status.st_mode):
        return CodeFile(
            name=source.name,
            kind="file",
            source=path,
            size_bytes=status.st_size,
            executable=bool(status.st_mode & stat.S_IXUSR),
        )
    raise UsageError(
        "only files, folders and links go to the nodes, and this is none",
        where=str(path),
        hint="list it in .gitignore or .dockerignore",
    )


def _list_git_files(folder: Path) -> Collection[str] | None:
    """Return the paths below `folder` that git tracks or does not ignore, or None if git cannot tell.

    The result is None if git is not installed or if `folder` is in no repository. It is also None if git
    ignores the whole folder. The user has named such a folder on purpose, so all of its files are sent.
    """
    argv = (*process.GIT, "-C", str(folder), "ls-files", "--cached", "--others", "-z", "--exclude-standard")
    try:
        output = b"".join(process.filter_through(argv, []))
    except (ToolMissing, ToolFailed):
        return None
    names = []
    for path_bytes in output.split(b"\0"):
        name = os.fsdecode(path_bytes).rstrip("/")
        if not name:  # after the last null byte
            continue
        names.append(name)
        path = folder / name
        # For a repository inside this one, git lists only the folder, without its files.
        if path.is_dir() and not path.is_symlink():
            nested_names = _list_git_files(path) or ()  # nothing if git cannot list it
            names += [f"{name}/{nested}" for nested in nested_names]
    return names or None  # git ignores the whole folder if it lists nothing


def _describe_git_state(folder: Path) -> tuple[str, bool]:
    """Return what ``git describe`` prints for `folder`, and whether all changes in the folder are committed.

    For example, the result is ``("v1.2-3-g3f2a91c", True)``. If git is not installed or `folder` is in no
    repository, the result is ``("", False)``.
    """
    git = (*process.GIT, "-C", folder)
    try:
        description = process.run((*git, "describe", "--always", "--dirty"), check=False)
        changes = process.run((*git, "status", "--porcelain", "--", *sources.GIT_PATHS), check=False)
    except ToolMissing:
        return "", False
    if description.returncode or changes.returncode:
        return "", False
    is_committed = not changes.output.strip()
    return description.output.strip(), is_committed


def _refuse_large(folder: Path, entries: Sequence[CodeFile]) -> None:
    """Raise LargeContext if the code exceeds `LARGE_BYTES` or `MANY_FILES`, because it may contain data.

    The caller does so before it reads any file, and not at all if the user has agreed (``--yes``).

    The error names the three largest entries at the top of the folder, by their size or their number of
    files. Data that is in the code by mistake is usually in one of these entries.
    """
    sizes, counts = _total_top_entries(entries)
    if sizes.total() > LARGE_BYTES:
        total_text = size_text(sizes.total())
        largest = sizes.most_common(_MAX_NAMES)
        # Small entries are not named, because they are not the reason.
        top_entries = [f"{name} {size_text(size)}" for name, size in largest if size > _DATA_BYTES]
    elif counts.total() > MANY_FILES:
        total_text = f"{counts.total():,} files"
        fullest = counts.most_common(_MAX_NAMES)
        top_entries = [f"{name} {count:,}" for name, count in fullest if count > _FEW_FILES]
    else:
        return
    raise LargeContext(
        f"the code has {total_text}: {', '.join(top_entries)}",
        where=f"--code {folder}",
        hint="list data in .gitignore, and name its folder in imgkit.toml (data = [...]); to send all of it: "
        "--yes",
    )


def _total_top_entries(
    entries: Iterable[CodeFile],
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Return the size in bytes and the number of files of each entry at the top of the code's folder.

    For example, ``data/a/b.bin`` counts for the entry ``data``.
    """
    sizes = collections.Counter[str]()
    counts = collections.Counter[str]()
    for entry in entries:
        top_name = entry.name.partition("/")[0]
        sizes[top_name] += entry.size_bytes
        if entry.kind == "file":
            counts[top_name] += 1
    return sizes, counts
