"""Inspect an image that imgkit did not build, and bind imgkit's entry points into it.

The entry points are ``dist-run`` and the other ``dist-*`` commands. A probe, which is a short program, prints
what the Python of the image has installed. It runs in the image on the machine that submits the job, with the
mounts and options of the job. The result is cached by a digest of the image, so that a later submission of
the same image starts no container. The digest of a .sif covers its start, its end and its size. The digest of
an image in a container engine is the image's id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside, wheel
from imgkit_builder.image.inside import PythonReport
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job, MountedEntryPoints, Runner
from imgkit_builder.jobs.resolve import chooses_cpus
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.oci.platform import kernel_names
from imgkit_builder.recipe import bases
from imgkit_builder.sif import image
from imgkit_entrypoints import __version__, json_text, system
from imgkit_entrypoints.errors import ToolMissing, UsageError
from imgkit_entrypoints.launch.run_code import CODE_VARIABLE

# Name of a folder in the job's folder. It has one subfolder for each version of the entry points.
FOLDER = "imgkit-entrypoints"

# Hints for two cases: imgkit found no Python in an image, or the Python that it found cannot be used.
_CHOOSE_PYTHON_HINT = "choose one: --python PATH of the image, or --activate 'COMMAND' that puts one on PATH"
_CHOOSE_OTHER_HINT = _CHOOSE_PYTHON_HINT.replace("one", "another", 1)

# Shell text that prints those of its arguments that are existing paths, one on each line.
_PRINT_EXISTING = 'for path; do if [ -e "$path" ]; then printf "%s\\n" "$path"; fi; done'

# `Runtime.image_digest` returns this text for an image that is a folder. The content of a folder has no short
# digest, so the result of the probe is not cached for such an image.
_NO_DIGEST = "folder"

# Start of the probe's message that it has found no Python in the image. Without this message, the container
# or the command of --activate has failed before the probe ran.
_PROBE_MESSAGE = "no program "

# Starts of lines that do not explain a failure. The first is imgkit's own message about a failed command of
# --activate. The second is printed by the modules of some sites when they are loaded.
_IRRELEVANT_LINES = ("imgkit: the command of --activate", "module load ")


def bind_entry_points(job: Job, remote_run: Runner | None = None) -> Job:
    """Return `job` with imgkit's entry points bound into its image, if the image does not have them.

    The entry points are ``dist-run`` and the other ``dist-*`` commands. If the job runs none of them, or if
    the image has them, the job is returned unchanged. It is also returned unchanged if the image is not on
    this machine and the user chooses no Python in it. The checks before the submission then report the
    missing image.

    Parameters
    ----------
    remote_run : runs a command on the remote that takes the job. Without it, commands run on this machine.

    Raises
    ------
    UsageError : no Python of the image can run the entry points, or the image cannot be read. The message
        says what the image contains.
    ToolMissing : the container runtime is not installed on this machine.
    """
    _refuse_python_flags(job)  # first, because a wrong flag is an error in any job
    if not job.runs_entry_point:
        return job
    chooses_python = job.request.container.python_flag != ""
    is_remote = remote_run is not None
    # An image that is not "foreign" has the entry points already. On a remote, only the probe below, a short
    # program in the image, can tell whether imgkit built it.
    if not is_remote and not runtime_of(job).needs_entry_points(job):
        return job
    run = remote_run or _run_here
    # The digest is also the key under which the report of the probe is cached.
    digest = runtime_of(job).image_digest(job, run)
    if not digest:  # the image does not exist on that machine, or cannot be read
        if is_remote or chooses_python:
            raise _unreadable_image_error(job, is_remote=is_remote)
        return job
    python = _inspect_python(_without_missing_paths(job, run), digest, run)
    # `built` is whether imgkit built the image. Another Python, which the user chooses, needs the entry
    # points as well.
    has_entry_points = python.built and python.entry_points != ""
    if has_entry_points and not chooses_python:
        return job
    _refuse_unusable_python(job, python)
    return job.with_container(entry_points=_mounted_entry_points(job, python, digest))


def _unreadable_image_error(job: Job, *, is_remote: bool) -> UsageError:
    """Return the error for an image that cannot be read on this machine, or on the remote."""
    machine = "here"
    hint = "submit where the image is"
    if is_remote:
        machine = "on the remote"
        hint = "the absolute path of an image there"
    return UsageError(
        f"{job.container.image} does not exist or cannot be read {machine}, so imgkit cannot look into it",
        where="--image",
        hint=hint,
    )


def _without_missing_paths(job: Job, run: Runner) -> Job:
    """Return `job` without mounts and libraries that do not exist on the machine that runs the probe.

    A runtime refuses to mount a folder that does not exist. Some folders of a job exist only on the nodes,
    and the probe does not need them.

    Parameters
    ----------
    run : runs a command on the machine that runs the probe.
    """
    runtime = job.recipe.system.runtime
    mounts = job.container.binds
    sources = [mount.partition(":")[0] for mount in mounts]
    existing = _list_existing({*runtime.host_libs, *sources}, run)  # one command for all paths
    libraries = tuple(folder for folder in runtime.host_libs if folder in existing)
    job = job.with_system_facts(runtime=dataclasses.replace(runtime, host_libs=libraries))
    present_mounts = [mount for mount, source in zip(mounts, sources, strict=True) if source in existing]
    return job.with_container(binds=tuple(present_mounts))


def _list_existing(paths: Collection[str], run: Runner) -> Collection[str]:
    """Return those of `paths` that exist on the machine where `run` runs commands."""
    if not paths:
        return ()
    return run(("sh", "-c", _PRINT_EXISTING, "sh", *sorted(paths))).output.splitlines()


def _mounted_entry_points(job: Job, python: PythonReport, digest: str) -> MountedEntryPoints:
    """Return what is bound into the image, and to which folder of the image.

    If the image has entry points, they are replaced.

    Parameters
    ----------
    python : what the probe has reported about the Python of the image.
    digest : the digest of the image that the probe has inspected.
    """
    # The folder has a new name for each version of the files, so running jobs keep theirs.
    folder = f"{job.directory}/{FOLDER}/{folder_name(job)}"
    return MountedEntryPoints(
        version=__version__,
        folder=quoting.check_flag_value("--directory", folder),
        python=python.path,
        package_folder=_package_folder(python),
        digest="" if digest == _NO_DIGEST else digest,
    )


def _package_folder(python: PythonReport) -> str:
    """Return the folder of the image into which the entry points are bound, or "" if there is no such folder.

    It is the folder that already contains entry points, or otherwise the first folder in which the image's
    Python looks for packages.
    """
    return python.entry_points or python.site


def mounted_folder(job: Job) -> Path:
    """Return the folder on the nodes with the entry points that are mounted into the job's image."""
    assert job.container.entry_points is not None  # noqa: S101 - only such a job has the folder
    return Path(job.container.entry_points.folder)


def mounted_files(job: Job) -> tuple[tuple[str, bytes], ...]:
    """Return the name and the content of each file that is mounted into the image.

    These are the files of the entry points' package, ``system.json`` with the job's system, and a
    ``.gitignore``.
    """
    system_json = system.to_json(job.recipe.system).encode()
    return (
        *wheel.entrypoints_files(),
        (system.SYSTEM_JSON.name, system_json),
        # The job's folder is often the user's repository. This file keeps the mounted files out of git and of
        # `--code`.
        (".gitignore", b"*\n"),
    )


def folder_name(job: Job) -> str:
    """Return the name of the folder for `mounted_files`, such as ``0.5.0-3f2a91c04b7d``.

    The name consists of imgkit's version and a digest of the files. So files with other content are in
    another folder.
    """
    digest = hashlib.sha256()
    for name, data in mounted_files(job):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return f"{__version__}-{digest.hexdigest()[:12]}"


def write_mounted_files(job: Job, folder: Path) -> None:
    """Write `mounted_files` to `folder`, which must not exist."""
    for name, data in mounted_files(job):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.create_file(path) as stream:
            stream.write(data)


def _refuse_python_flags(job: Job) -> None:
    """Raise UsageError for a value of ``--python`` or ``--activate`` that this job cannot use.

    There are three reasons: the runtime cannot bind anything into the image, the command needs no Python, or
    the value is not valid.
    """
    requested = job.request.container
    # The flag that chooses the Python: "--python", "--activate", or "" if the user chooses none.
    if requested.python_flag:
        runtime_of(job).refuse_python(job, requested.python_flag)
    if requested.python and not job.runs_entry_point:
        message = "--python chooses the Python of the dist-* commands, and the job runs none"
        raise UsageError(message, where="--python", hint="-- dist-run SCRIPT, or --activate")
    value_by_flag = {"--python": requested.python, "--activate": requested.activate}
    for flag, value in value_by_flag.items():
        if re.search(r"[\x00-\x1f]", value):
            raise UsageError("it holds a control character", where=flag)
    if requested.python and not re.fullmatch(r"[A-Za-z0-9._+-]+|/[^:,]*", requested.python):
        raise UsageError(
            f"{requested.python!r} is not a Python of the image",
            where="--python",
            hint="an absolute path in the image, or a name on its PATH, without : and ,",
        )


def _run_here(argv: Sequence[str]) -> Finished:
    """Run a command on this machine, and return its exit code and output even if the program is missing.

    For a missing program, the exit code is 127, as in a shell, and the output is the error message. So a
    missing program looks the same here and on a remote, and `_no_python_error` can recognize it.
    """
    try:
        return process.run(argv, check=False)
    except ToolMissing as error:
        return Finished(argv=tuple(argv), returncode=127, output=error.what)


def _inspect_python(job: Job, digest: str, run: Runner) -> PythonReport:
    """Return what the image's Python reports about itself: its path, version, packages and torch.

    A probe, a short program that runs in the image, prints this report. The report is cached, because the
    start of a container can take many seconds.

    Parameters
    ----------
    digest : the digest of the job's image, from `Runtime.image_digest`.
    run : runs the probe in the image, on the machine that has the image.

    Raises
    ------
    UsageError : the probe found no Python, or could not be started.
    ToolMissing : the container runtime is missing on that machine.
    """
    argv = _probe_argv(job)
    if digest == _NO_DIGEST:  # an image that is a folder may change at any time, so nothing is cached
        return _run_probe(job, argv, run)
    # The report depends on the image, on the version of imgkit, and on the command, which contains the user's
    # --python and --activate.
    key = hashlib.sha256(json.dumps([__version__, digest, *argv]).encode()).hexdigest()
    cache_file = files.cache_dir() / "looks" / f"{key}.json"
    cached = _read_cache(cache_file)
    if cached is not None:
        return cached
    python = _run_probe(job, argv, run)
    files.write_cache(cache_file, json.dumps(dataclasses.asdict(python)))
    return python


def _run_probe(job: Job, argv: Argv, run: Runner) -> PythonReport:
    """Run the probe `argv`, a short program in the job's image, and return its report about the Python there.

    Raises
    ------
    UsageError, ToolMissing : the probe has printed no report. `_no_python_error` names the cause.
    """
    finished = run(argv)
    python = inside.parse_python_probe(finished.output)
    if python is None:
        raise _no_python_error(job, finished)
    return python


def _read_cache(file: Path) -> PythonReport | None:
    """Return the cached report of a probe, or None if there is none.

    A file that is damaged or belongs to another user is ignored, and the image is probed again.
    """
    try:
        if files.foreign_file_reason(file):
            return None
        fields = json_text.load(file)
        python: PythonReport = json_text.build_value(PythonReport, fields, "python", closed=True)
    except (OSError, ValueError, TypeError):
        return None
    return python


def _probe_argv(job: Job) -> Argv:
    """Return the command that runs the probe in the job's image, on the machine that submits the job.

    The probe is a short program that reports what the image's Python has installed. The container starts with
    the runtime, options and mounts of the job. It starts without GPUs, code, data, packages, working
    directory and settings of the node agent, which a login node may lack and the probe does not need.
    """
    # The argv is part of the cache's key. Whatever does not change the report should stay out of it.
    probe_job = dataclasses.replace(job, settings={}).with_allocation(gpus=0)
    # With the variable that has the digest of the code, each edit of the code would start the image again.
    env = {name: value for name, value in job.container.env.items() if name != CODE_VARIABLE}
    probe_job = probe_job.with_container(code=None, code_folder="", data=(), packages=(), workdir="", env=env)
    python_argv = tuple(inside.python_probe_argv(job.request.container.python))
    return runtime_of(probe_job).probe_argv(probe_job, python_argv)


def _no_python_error(job: Job, finished: Finished) -> UsageError | ToolMissing:
    """Return the error for a probe (a short program that runs in the image) that printed no report.

    There are four possible causes: the runtime is missing, the command of ``--activate`` failed, the image is
    for another processor, or it contains no Python.
    """
    last_line = _last_line(finished)
    image_name = job.container.image
    if not last_line.startswith(_PROBE_MESSAGE):  # the probe itself has not been started
        error = _probe_start_error(job, finished.returncode, last_line)
        if error is not None:
            return error
    arch = _foreign_arch(Path(image_name))
    if arch:
        return UsageError(
            f"the image is for {arch}, and this machine cannot run it to look for its Python: {last_line}",
            where=image_name,
            hint=f"submit on a machine of {arch}, for example from a node of the job",
        )
    return UsageError(
        f"imgkit did not build this image and found no Python in it: {last_line}",
        where=image_name,
        hint=_CHOOSE_PYTHON_HINT,
    )


def _probe_start_error(job: Job, exit_code: int, last_line: str) -> UsageError | ToolMissing | None:
    """Return the error for a missing container runtime or a failed ``--activate``, or None for another cause.

    In both cases, the probe (a short program that runs in the image) has not been started.

    Parameters
    ----------
    last_line : the last line of the output, which says why the probe has not been started.
    """
    image_name = job.container.image
    runtime = runtime_of(job)
    program = runtime.probe_program(job)
    # A shell exits with 127 if the program, which is the container runtime here, is missing.
    if program and exit_code == 127:
        return ToolMissing(
            f"imgkit has to look into this image, which it did not build, but {program!r} fails here: "
            f"{last_line}",
            where=image_name,
            hint="submit on a login node of the system",
        )
    if job.request.container.activate:
        return UsageError(
            f"the command fails in {image_name}: {last_line}",
            where="--activate",
            hint=f"try it there: {runtime.typed_shell(job)}",
        )
    return None


def _foreign_arch(path: Path) -> str:
    """Return the architecture of a .sif that this machine cannot run, such as ``arm64``, or ""."""
    if not image.is_sif(path):
        return ""
    arch = image.read(path).arch
    if not arch or platform.machine() in kernel_names(arch):
        return ""
    return arch


def _last_line(finished: Finished) -> str:
    """Return the last line of a command's output that may explain why the command failed.

    Without such a line, the result names the exit code: ``exit code 255``.
    """
    for line in reversed(finished.output.splitlines()):
        message = line.strip()
        if message and not message.startswith(_IRRELEVANT_LINES):
            return message
    return f"exit code {finished.returncode}"


def _refuse_unusable_python(job: Job, python: PythonReport) -> None:
    """Raise UsageError if the image's Python cannot run the entry points, or cannot run on the nodes.

    Without this check, the job would wait in the queue and then fail on the nodes.

    Parameters
    ----------
    python : what the probe has reported about the Python of the image.
    """
    image_name = job.container.image
    # Builds of torch for AMD GPUs have versions such as 2.5.1+rocm6.2.
    if "+rocm" in python.torch and not chooses_cpus(job.request):  # imgkit does not support AMD GPUs
        message, hint = bases.amd_warning(f"torch {python.torch} of this image is for AMD GPUs")
        raise UsageError(message, where=image_name, hint=hint)
    subject = f"the Python of this image, {python.path or 'without a path'}, is {python.version}"
    # Each problem is the end of a sentence about the Python, or "". The first one is reported.
    problems = (
        (_version_problem(python), _CHOOSE_OTHER_HINT),
        (_arch_problem(python, job.recipe.platforms), "an image for the nodes: --image PATH"),
        (_package_folder_problem(job, python), _CHOOSE_OTHER_HINT),
    )
    for problem, hint in problems:
        if problem:
            raise UsageError(f"{subject}{problem}", where=image_name, hint=hint)


def _version_problem(python: PythonReport) -> str:
    """Return why the version of `python`, or a missing torch, rules it out. Return "" if nothing does.

    The text is the end of a sentence about the path and the version: `` and has no torch``.
    """
    version = tuple(map(int, python.version.split(".")[:2]))
    if version < bases.OLDEST_PYTHON:
        return f"; the entry points need Python {'.'.join(map(str, bases.OLDEST_PYTHON))}"
    if not python.torch:
        return " and has no torch"
    return ""


def _arch_problem(python: PythonReport, platforms: Sequence[str]) -> str:
    """Return why nodes of `platforms`, such as ``linux/amd64``, cannot run `python`, or "" if they can.

    The text is the end of a sentence about the Python: `` and for aarch64, but the nodes are amd64``.
    """
    archs = [platform_name.removeprefix("linux/") for platform_name in platforms]
    machines: list[str] = []
    for arch in archs:
        machines += kernel_names(arch)  # "x86_64" of the kernel is "amd64" of images
    if not machines or python.machine in machines:
        return ""
    return f" and for {python.machine}, but the nodes are {' or '.join(archs)}"


def _package_folder_problem(job: Job, python: PythonReport) -> str:
    """Return why nothing can be bound into the package folder of `python`, or "" if it is possible.

    The text is the end of a sentence about the Python: `` and has no folder of packages ...``.
    """
    problem = " and has no folder of packages to which imgkit can bind its entry points"
    folder = _package_folder(python)
    if not folder:
        return problem
    has_path = python.path.startswith("/")  # a Python can fail to find its own path, which is then empty
    # A runtime cannot mount a path with a colon or comma, for example.
    if has_path and runtime_of(job).can_mount(folder):
        return ""
    return f"{problem}: {folder!r}"
