"""Which files of a folder go to the nodes as code (``--code``), and what the run's record says of them."""

from __future__ import annotations

import collections
import contextlib
import os
import posixpath
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.image.context import LargeContext
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.code_tree import CODE_PLACE, CodeFile, CodeTree
from imgkit_builder.jobs.job import CodeRecord, Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe import sources
from imgkit_builder.recipe.requirements import PYPROJECT, project_name
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import unsquash
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.launch import mounted_code

LARGE_BYTES = 100 * 10**6
"""More code goes only where the user agrees: often it is data that was not meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The code of a run, which has been read once."""

    folder: Path
    tree: CodeTree
    record: CodeRecord
    projects: tuple[InstalledProject, ...]
    """The Python projects in it, with their folders in the job; of one without a folder it is only a part."""
    left_out: tuple[str, ...] = ()
    """Names that stay out, since git or Docker ignores them or imgkit made them."""


def read(request: JobRequest, *, large: bool, report: Reporter) -> CodeFolder:
    """Read the folder of ``--code``, which takes time where it is large.

    Raises
    ------
    UsageError : it is not a directory, has no file, holds what looks secret, or cannot be read.
    LargeContext : it is large, and `large` does not allow it; raised before a file is read.
    """
    assert request.container.code is not None  # noqa: S101 - the caller has looked
    folder = request.container.code
    if not folder.is_dir():
        message = "not a directory" if os.path.lexists(folder) else "no such directory"
        raise UsageError(
            message, where=f"--code {folder}", hint="the folder of your code, for example: --code ."
        )
    left_out: list[str] = []
    entries = tuple(_entries(folder, request.container.allow, left_out))
    if not any(entry.kind != "dir" for entry in entries):
        raise UsageError(
            "nothing to ship: every file is ignored",
            where=f"--code {folder}",
            hint=".gitignore and .dockerignore leave files out: git status --ignored",
        )
    if not large:
        _refuse_large(folder, entries)
    if sum(entry.size_bytes for entry in entries) > LARGE_BYTES:
        report.stage(f"read {folder}")
    layer = CodeTree(entries, report)
    described, clean = _git_state(folder)
    record = CodeRecord(sha256=layer.sha256, git=described, uncommitted=not clean)
    projects = tuple(_projects(folder, entries))
    return CodeFolder(folder=folder, tree=layer, record=record, projects=projects, left_out=tuple(left_out))


def _projects(folder: Path, entries: Iterable[CodeFile]) -> Iterator[InstalledProject]:
    files = {entry.name: entry.source for entry in entries if entry.kind == "file"}
    for name, file in files.items():
        if posixpath.basename(name) == PYPROJECT:
            path = posixpath.normpath(f"/{CODE_PLACE}/{posixpath.dirname(name)}")
            yield InstalledProject(name=project_name(file), folder=path)
    has_package = any(posixpath.basename(name) == "__init__.py" for name in files)
    if PYPROJECT not in files and (has_package or folder.resolve().name == "src"):
        above = [parent / PYPROJECT for parent in folder.resolve().parents]
        nearest = [file for file in above if file.is_file()][:1]
        yield from (InstalledProject(name=project_name(file)) for file in nearest)


def with_code(job: Job, code: CodeRecord, parent: Path) -> Job:
    """Return `job` with the code over its image; it lies on the nodes in a folder of `parent`."""
    folder = quoting.check("--code", str(parent / code.sha256))
    env = {mounted_code.CODE_VARIABLE: code.sha256, **job.container.env}
    return job.with_container(code=code, code_folder=folder, env=env)


def refuse_unused(code: CodeFolder, recipe: Target, sif: Path | None) -> None:
    """Refuse code with a project that Python finds elsewhere in the image: that would run, and not the code.

    Parameters
    ----------
    sif : the image, where it is here; else what is known of `recipe` counts.

    Raises
    ------
    UsageError : names the recipe's line where it is known, and what to write there.
    """
    _refuse_unused(code.projects, f"--code {code.folder}", recipe, sif)


def refuse_unused_bind(job: Job, sif: Path | None) -> None:
    """Refuse a folder over that of the code, as `refuse_unused` does, where the folder is here."""
    for text in job.container.binds:
        source, target = (*text.split(":"), "")[:2]
        file = Path(source, PYPROJECT)
        if f"{target or source}/".startswith(f"/{CODE_PLACE}/") and file.is_file():
            sent = InstalledProject(name=project_name(file), folder=posixpath.normpath(target or source))
            _refuse_unused([sent], f"--bind {text}", job.recipe, sif)


def _refuse_unused(projects: Sequence[InstalledProject], flag: str, recipe: Target, sif: Path | None) -> None:
    own_name = next((project.name for project in projects if project.folder in ("", f"/{CODE_PLACE}")), "")
    installed = recipe.projects if sif is None else baked.projects(sif, own_name)
    for sent in projects:
        for project in installed:
            if project.name == sent.name and (not project.folder or project.folder != sent.folder):
                raise _unused(sent, project, flag, recipe)


def _unused(sent: InstalledProject, installed: InstalledProject, flag: str, recipe: Target) -> UsageError:
    name = f"the project {sent.name}" if sent.name else "a project without a name"
    holds = f"has {name} in {sent.folder}" if sent.folder else f"is only a part of {name}"
    runs = f"that in {installed.folder}" if installed.folder else "its copy in site-packages"
    target = sent.folder or f"/{CODE_PLACE}"
    steps = [project.step for project in (*recipe.projects, installed) if project.name == installed.name]
    step = next((number for number in steps if number is not None), None)
    hints = [] if sent.folder else ["--code with the whole folder of the project"]
    if installed.folder != target:
        key = "a pip step" if step is None else f"image.pip[{step}]"
        hints.append(
            f"set `editable: {target}` in {key} of the recipe {recipe.name}, and build the image again"
        )
    where = recipe.where("image", "pip", step or 0, "project") if recipe.positions else flag
    message = f"the code {holds}, but the image runs {runs}"
    return UsageError(message, where=where, hint="; ".join(hints))


def refuse_shadowed(code: CodeFolder, job: Job) -> None:
    """Refuse a command that names files outside of the code, which lie here, where the code has the same.

    Raises
    ------
    UsageError : the job would run files that may change until it starts, and its record would name the code.
    """
    root, folder = code.folder.resolve(), Path(job.container.workdir or job.directory.resolve())
    advice = "choose another folder for the job: --directory DIR"
    for before, argument in zip(("", *job.command), job.command, strict=False):
        module = argument.partition(".")[0] if before == "-m" else ""
        for part in (module, f"{module}.py") if module else (argument,):
            path = os.path.normpath(folder / part)
            if path.startswith(f"/{CODE_PLACE}/"):  # where the code is mounted
                continue
            for name in (os.path.normpath(part), os.path.relpath(path, root)):
                sent = code.tree.files.get(name)
                if sent and (module or sent.kind == "file") and os.path.lexists(path):
                    raise UsageError(
                        f"the job would read {path}, and not what --code {code.folder} sends",
                        where=f"the command's {argument}",
                        hint=advice if module else f"/{CODE_PLACE}/{name}, or {advice}",
                    )


def hidden_file_warnings(code: CodeFolder, image: Path) -> Iterator[str]:
    """Yield a warning about files that stay out of the code, and that `image`, a .sif or .sqsh, has there.

    The code lies over them. Nothing where no program of this machine reads the image.
    """
    names: set[str] = set()
    if code.left_out:
        with contextlib.suppress(CheckFailed, ToolFailed, ToolMissing, UsageError):
            for squashfs in unsquash.opened(image):
                names.update(file.path.partition(" -> ")[0] for file in squashfs.listed(CODE_PLACE))
    hidden = [name for name in code.left_out if f"{CODE_PLACE}/{name.rstrip('/')}" in names]
    if hidden:
        yield (
            f"not in the job: {sources.left_out_text(hidden)}; the image has it in /{CODE_PLACE}, over which "
            "--code lies"
        )


def _entries(folder: Path, allow: Sequence[str], left_out: list[str]) -> Iterator[CodeFile]:
    secret: list[str] = []
    bring_back = [f"!{name}" for name in allow]
    try:
        listed = _listed_by_git(folder)
        for entry in sources.walk(folder, bring_back, listed=listed, left_out=left_out, secret=secret):
            yield _file(entry)
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
    if secret:
        raise UsageError(
            f"these files usually hold secrets: {', '.join(secret[:5])}{' ...' if secret[5:] else ''}",
            where=f"--code {folder}",
            hint="list them in .gitignore or .dockerignore; if it holds none: "
            f"--allow {secret[0].rstrip('/')}",
        )


def _file(entry: sources.SourceEntry) -> CodeFile:
    path, status = Path(entry.entry.path), entry.entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        return CodeFile(name=entry.name, kind="dir", source=path)
    if stat.S_ISLNK(status.st_mode):
        # Not Path.readlink: it loses ./ and //.
        return CodeFile(name=entry.name, kind="symlink", source=path, link=os.readlink(path))  # noqa: PTH115
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(
            "only files, folders and links go to the nodes, and this is none",
            where=str(path),
            hint="list it in .gitignore or .dockerignore",
        )
    return CodeFile(
        name=entry.name,
        kind="file",
        source=path,
        size_bytes=status.st_size,
        executable=bool(status.st_mode & stat.S_IXUSR),
    )


def _listed_by_git(folder: Path) -> Collection[str] | None:
    """The files of `folder` that git tracks or does not ignore; None where git does not know the folder."""
    argv = (*process.GIT, "-C", str(folder), "ls-files", "-coz", "--exclude-standard")
    try:
        output = b"".join(process.through(argv, []))
    except (ToolMissing, ToolFailed):
        return None
    names: list[str] = []
    for row in filter(None, output.split(b"\0")):
        name = os.fsdecode(row).rstrip("/")
        names.append(name)
        inside = folder / name
        if inside.is_dir() and not inside.is_symlink():  # a repository in this one
            names += (f"{name}/{nested}" for nested in _listed_by_git(inside) or ())
    # Git lists nothing in a folder that it ignores as a whole, and which was named on purpose.
    return names or None


def _git_state(folder: Path) -> tuple[str, bool]:
    """What git calls the state of `folder`, and whether all of it is committed; empty without git."""
    git = (*process.GIT, "-C", folder)
    try:
        described = process.run((*git, "describe", "--always", "--dirty"), check=False)
        changed = process.run((*git, "status", "--porcelain", "--", *sources.GIT_PATHS), check=False)
    except ToolMissing:
        return "", False
    if described.returncode or changed.returncode:
        return "", False
    return described.output.strip(), not changed.output.strip()


def _refuse_large(folder: Path, entries: Sequence[CodeFile]) -> None:
    """Name the largest parts of code that is larger than `LARGE_BYTES`."""
    sizes: collections.Counter[str] = collections.Counter()
    for entry in entries:
        sizes[entry.name.partition("/")[0]] += entry.size_bytes
    if sizes.total() <= LARGE_BYTES:
        return
    largest = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.most_common(3) if size > 10**6)
    raise LargeContext(
        f"the code has {size_text(sizes.total())}: {largest}",
        where=f"--code {folder}",
        hint="list data in .gitignore or .dockerignore, and bind it when the job starts (--bind); to send "
        "all of it: --yes",
    )
