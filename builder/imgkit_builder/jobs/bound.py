"""Inspect an image that imgkit did not build, and bind imgkit's entry points into it.

A probe starts the image's own Python on the machine that submits, with the mounts and options of the job.
It prints what that Python has installed. The result is cached by a digest of the image, so that a later
submission of the same image starts nothing. The digest of a .sif covers its two ends and its size. The
digest of an image of an engine is the image's id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside, wheel
from imgkit_builder.image.inside import PythonReport
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, BoundEntryPoints, Job, Runner
from imgkit_builder.jobs.resolve import chooses_cpus
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.oci.platform import kernel_names
from imgkit_builder.recipe import bases
from imgkit_builder.sif import image
from imgkit_entrypoints import __version__, json_text, system
from imgkit_entrypoints.errors import ToolMissing, UsageError
from imgkit_entrypoints.launch.run_code import CODE_VARIABLE

# Folder of a job's folder with one folder of entry points for each version of their content.
FOLDER = "imgkit-entrypoints"

# Hints for an image in which imgkit found no Python, and for one whose Python cannot be used.
_CHOOSE_PYTHON_HINT = "choose one: --python PATH of the image, or --activate 'COMMAND' that puts one on PATH"
_CHOOSE_OTHER_HINT = _CHOOSE_PYTHON_HINT.replace("one", "another", 1)

# What `Runtime.image_digest` returns for an image that is a folder. Nothing short stands for the content of
# a folder, so the probe of such an image is not cached.
_NO_DIGEST = "folder"

# Start of the message of a probe that ran in the image and found no Python there. Without this message, the
# container or the command of --activate has failed before the probe ran.
_PROBE_MESSAGE = "no program "

# Starts of lines that do not explain a failure. The first is imgkit's own message after a failed command of
# --activate, and the second is what the modules of some sites print when they are loaded.
_IRRELEVANT_LINES = ("imgkit: the command of --activate", "module load ")


def bind_entry_points(job: Job, run: Runner | None = None) -> Job:
    """Return `job` with imgkit's entry points bound into its image, or unchanged if the image has its own.

    A job that runs no ``dist-*`` command needs no entry points. The job is also returned unchanged if this
    machine does not have the image and the user chooses no Python in it. The checks of the submission report
    the missing image.

    Parameters
    ----------
    run : runs a command on the remote that takes the job. Without it, commands run on this machine.

    Raises
    ------
    UsageError : no Python of the image can run the entry points, or the image cannot be read. The message
        says what the image has.
    ToolMissing : the container runtime is not installed on this machine.
    """
    _refuse_python_flags(job)
    python_flag = job.request.container.python_flag
    is_remote = run is not None
    if not job.runs_entry_point:
        return job
    # Whether imgkit built an image on a remote is known only after the probe.
    if not is_remote and not runtime_of(job).is_foreign(job):
        return job
    runner = run or _run_here
    digest = runtime_of(job).image_digest(job, runner)
    if not digest:  # the image does not exist on that machine, or cannot be read
        if not is_remote and not python_flag:
            return job
        raise _unreadable_image_error(job, is_remote=is_remote)
    python = _inspect_python(_with_present_mounts(job, runner), digest, runner)
    has_entry_points = python.built and bool(python.entry_points)
    if has_entry_points and not python_flag:
        return job
    _refuse_unusable_python(job, python)
    return job.with_container(bound=_entry_points(job, python, digest))


def _unreadable_image_error(job: Job, *, is_remote: bool) -> UsageError:
    """Return the error for an image that is not on this machine, or not on the remote."""
    where, hint = "here", "submit where the image is"
    if is_remote:
        where, hint = "on the remote", "the absolute path of an image there"
    return UsageError(
        f"{job.container.image} does not exist or cannot be read {where}, so imgkit cannot look into it",
        where="--image",
        hint=hint,
    )


def _with_present_mounts(job: Job, run: Runner) -> Job:
    """Return `job` without the mounts and libraries that the machine of `run` lacks.

    A runtime refuses to mount a folder that does not exist, and some folders exist on the nodes only.
    """
    mounts = job.container.binds
    facts = job.recipe.system
    paths = {*facts.runtime.host_libs, *(_mount_source(mount) for mount in mounts)}
    if not paths:
        return job
    check = 'for path; do if [ -e "$path" ]; then printf "%s\\n" "$path"; fi; done'
    present = run(("sh", "-c", check, "sh", *sorted(paths))).output.splitlines()
    libraries = [folder for folder in facts.runtime.host_libs if folder in present]
    runtime = dataclasses.replace(facts.runtime, host_libs=tuple(libraries))
    recipe = dataclasses.replace(job.recipe, system=dataclasses.replace(facts, runtime=runtime))
    present_mounts = [mount for mount in mounts if _mount_source(mount) in present]
    return dataclasses.replace(job, recipe=recipe).with_container(binds=tuple(present_mounts))


def _mount_source(mount: str) -> str:
    """Return the path on the node of a mount: ``/data:/mnt:ro`` -> ``/data``."""
    return mount.partition(":")[0]


def _entry_points(job: Job, python: PythonReport, digest: str) -> BoundEntryPoints:
    """Return the record of which entry points are bound into the image, and where.

    They replace the entry points of an image that has some, and otherwise they are bound into the first
    folder that `python` searches for packages.
    """
    folder = f"{job.directory}/{FOLDER}/{folder_name(job)}"
    return BoundEntryPoints(
        version=__version__,
        folder=quoting.check_flag_value("--directory", folder),
        python=python.path,
        site=python.entry_points or python.site,
        digest="" if digest == _NO_DIGEST else digest,
    )


def entry_points_folder(job: Job) -> Path:
    """Return the folder on the nodes with the entry points that are bound into the job's image."""
    assert job.container.bound is not None  # noqa: S101 - only such a job has the folder
    return Path(job.container.bound.folder)


def bound_files(job: Job) -> tuple[tuple[str, bytes], ...]:
    """Return the names and contents of the files that are bound into the image.

    These are the files of the package, ``system.json`` with the job's system, and a ``.gitignore``.
    """
    system_json = system.to_json(job.recipe.system).encode()
    # The folder lies in the job's folder, which often is the user's repository: this keeps it out of git and
    # out of `--code`.
    gitignore = b"*\n"
    return (
        *wheel.entrypoints_files(),
        (system.SYSTEM_JSON.name, system_json),
        (".gitignore", gitignore),
    )


def folder_name(job: Job) -> str:
    """Return the name of the folder with `bound_files`, such as ``0.5.0-3f2a91c04b7d``.

    It is imgkit's version and a digest of the files, so other files are in another folder.
    """
    digest = hashlib.sha256()
    for name, data in bound_files(job):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return f"{__version__}-{digest.hexdigest()[:12]}"


def write_bound_files(job: Job, folder: Path) -> None:
    """Write `bound_files` to `folder`, which must not exist."""
    for name, data in bound_files(job):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.create_file(path) as stream:
            stream.write(data)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Create the folder `target`, unless it exists. No other process sees it half written.

    Parameters
    ----------
    fill : writes the content to the folder that it gets, which `write_folder` then moves to `target`.

    Raises
    ------
    UsageError : `target` is a link or belongs to another user, who could change what the job executes.
    """
    if os.path.lexists(target):
        if target.is_symlink() or files.is_foreign_folder(target):
            message = "it is a link or belongs to another user, and the job would execute what is in it"
            raise UsageError(message, where=str(target), hint="remove it, or choose another --directory")
        return
    target.parent.mkdir(exist_ok=True)
    temporary = files.temporary_name(target)
    try:
        fill(temporary)
        files.publish_file(temporary, target)
    except OSError:
        if not target.is_dir():  # else another submission has created it in the meantime
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_python_flags(job: Job) -> None:
    """Raise UsageError for a value of ``--python`` or ``--activate`` that this job cannot use.

    The runtime may bind nothing into the image, the command may need no Python, or the value is not valid.
    """
    container = job.request.container
    if container.python_flag:
        runtime_of(job).refuse_python(job, container.python_flag)
    if container.python and not job.runs_entry_point:
        message = "--python chooses the Python of the dist-* commands, and the job runs none"
        raise UsageError(message, where="--python", hint="-- dist-run SCRIPT, or --activate")
    for name, value in (("--python", container.python), ("--activate", container.activate)):
        if any(ord(letter) < 32 for letter in value):
            raise UsageError("it holds a control character", where=name)
    if container.python and not re.fullmatch(r"[A-Za-z0-9._+-]+|/[^:,]*", container.python):
        raise UsageError(
            f"{container.python!r} is not a Python of the image",
            where="--python",
            hint="an absolute path in the image, or a name on its PATH, without : and ,",
        )


def _run_here(argv: Sequence[str]) -> Finished:
    """Run a command on this machine.

    A program that is missing does not raise. The result then has exit code 127, as from a shell, and the
    message in its output, so that a missing program looks the same here and on a remote.
    """
    try:
        return process.run(argv, check=False)
    except ToolMissing as error:
        return Finished(argv=tuple(argv), returncode=127, output=error.what)


def _inspect_python(job: Job, digest: str, run: Runner) -> PythonReport:
    """Return what the probe prints about the image's Python.

    The probe does not run if the cache has its result, from the same image, command and version of imgkit.

    Raises
    ------
    UsageError : the probe found no Python, or could not start.
    ToolMissing : the container runtime is missing where `run` runs it.
    """
    argv = _probe_argv(job)
    # The result depends on the image, on the command with the user's --python and --activate, and on imgkit.
    key = hashlib.sha256(json.dumps([__version__, digest, *argv]).encode()).hexdigest()
    cache_file = files.cache_dir() / "looks" / f"{key}.json"
    can_cache = digest != _NO_DIGEST
    if can_cache:
        cached = _read_cache(cache_file)
        if cached is not None:
            return cached
    finished = run(argv)
    python = inside.parse_python_probe(finished.output)
    if python is None:
        raise _no_python_error(job, finished)
    if can_cache:
        files.write_cache(cache_file, json.dumps(dataclasses.asdict(python)))
    return python


def _read_cache(file: Path) -> PythonReport | None:
    """Return the cached result of a probe, or None if there is none.

    A file that is damaged or belongs to another user counts as missing, and the image is probed again.
    """
    try:
        if files.foreign_file_reason(file):
            return None
        python: PythonReport = json_text.build_value(PythonReport, json_text.load(file), "it", closed=True)
    except (OSError, ValueError, TypeError):
        return None
    return python


def _probe_argv(job: Job) -> Argv:
    """Return the command that runs the probe in the job's image on the machine that submits.

    The container starts with the job's runtime, options and mounts. It gets no GPUs, code, data, packages,
    working directory or settings of the node agent. The probe does not need them, and a login node may lack
    them.
    """
    probe_job = dataclasses.replace(job, settings={}).with_allocation(gpus=0)
    # The digest of the code would be part of the cache's key: each edit would start the image again.
    env = {name: value for name, value in job.container.env.items() if name != CODE_VARIABLE}
    probe_job = probe_job.with_container(code=None, code_folder="", data=(), packages=(), workdir="", env=env)
    python_argv = tuple(inside.python_probe_argv(job.request.container.python))
    return runtime_of(probe_job).probe_argv(probe_job, python_argv)


def _no_python_error(job: Job, finished: Finished) -> UsageError | ToolMissing:
    """Return the error for a probe that printed no result.

    Either the runtime did not start, or the command of ``--activate`` failed, or the image is for another
    architecture, or it has no Python.
    """
    last_line = _last_line(finished)
    has_probe_run = last_line.startswith(_PROBE_MESSAGE)
    file, runtime = job.container.image, runtime_of(job)
    program = runtime.probe_program(job)
    # A shell returns 127 for a program that is missing, here the container runtime.
    if program and finished.returncode == 127 and not has_probe_run:
        return ToolMissing(
            f"imgkit has to look into this image, which it did not build, but {program!r} fails here: "
            f"{last_line}",
            where=file,
            hint="submit on a login node of the system",
        )
    if job.request.container.activate and not has_probe_run:
        return UsageError(
            f"the command fails in {file}: {last_line}",
            where="--activate",
            hint=f"try it there: {runtime.typed_shell(job)}",
        )
    arch = ""
    if image.is_sif(Path(file)):
        arch = image.read(Path(file)).arch
    if arch and platform.machine() not in kernel_names(arch):
        return UsageError(
            f"the image is for {arch}, and this machine cannot run it to look for its Python: {last_line}",
            where=file,
            hint=f"submit on a machine of {arch}, for example from a node of the job",
        )
    return UsageError(
        f"imgkit did not build this image and found no Python in it: {last_line}",
        where=file,
        hint=_CHOOSE_PYTHON_HINT,
    )


def _last_line(finished: Finished) -> str:
    """Return the last line of a command's output that can explain its failure.

    Without such a line, the result is the exit code: ``exit code 255``.
    """
    for line in reversed(finished.output.splitlines()):
        message = line.strip()
        if message and not message.startswith(_IRRELEVANT_LINES):
            return message
    return f"exit code {finished.returncode}"


def _refuse_unusable_python(job: Job, python: PythonReport) -> None:
    """Raise UsageError if `python` cannot run the entry points, or if the nodes cannot run `python`."""
    file = job.container.image
    # Wheels of torch for AMD GPUs have versions such as 2.5.1+rocm6.2.
    if "+rocm" in python.torch and not chooses_cpus(job.request):
        message, hint = bases.amd_warning(f"torch {python.torch} of this image is for AMD GPUs")
        raise UsageError(message, where=file, hint=hint)
    problem = _python_problem(job, python)
    if problem is None:
        return
    predicate, hint = problem
    subject = f"the Python of this image, {python.path or 'without a path'}, is {python.version}"
    raise UsageError(f"{subject}{predicate}", where=file, hint=hint)


def _python_problem(job: Job, python: PythonReport) -> tuple[str, str] | None:
    """Return the reason why `python` cannot be used and a hint, or None if it can be used.

    The reason is the end of a sentence that begins with the path and the version: `` and has no torch``.
    """
    major_minor = tuple(map(int, python.version.split(".")[:2]))
    if major_minor < bases.FLOOR:
        return f"; the entry points need Python {'.'.join(map(str, bases.FLOOR))}", _CHOOSE_OTHER_HINT
    if not python.torch:
        return " and has no torch", _CHOOSE_OTHER_HINT
    archs = [platform_name.removeprefix("linux/") for platform_name in job.recipe.platforms]
    machines: list[str] = []
    for arch in archs:
        machines += kernel_names(arch)  # they differ from those of images: x86_64 and amd64
    if machines and python.machine not in machines:
        problem = f" and for {python.machine}, but the nodes are {' or '.join(archs)}"
        return problem, "an image for the nodes: --image PATH"
    site = python.entry_points or python.site
    if site and runtime_of(job).can_mount(site) and python.path.startswith("/"):
        return None
    problem = " and has no folder of packages to which imgkit can bind its entry points"
    if site:
        problem += f": {site!r}"
    return problem, _CHOOSE_OTHER_HINT
