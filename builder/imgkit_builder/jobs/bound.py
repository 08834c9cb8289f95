"""Images that imgkit did not build: look into one once, and bind the entry points there.

The look runs the image's own Python, with the job's mounts and options, on the machine that submits. Its
result is kept by a digest of the image, so that the next submission costs nothing. A .sif is known by its two
ends and its size, an image of an engine by its id.
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
from imgkit_builder.image.inside import PythonSeen
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, BoundEntryPoints, Job
from imgkit_builder.jobs.resolve import chooses_cpus
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.runtimes.base import Runner
from imgkit_builder.oci.platform import kernel_names
from imgkit_builder.recipe import bases
from imgkit_builder.sif import image
from imgkit_entrypoints import __version__, json_text, system
from imgkit_entrypoints.errors import ToolMissing, UsageError

FOLDER = "imgkit-entrypoints"
"""Folder of a job's folder with one folder of entry points for each version of their content."""

_CHOOSE = "choose one: --python PATH of the image, or --activate 'COMMAND' that puts one on PATH"
_CHOOSE_OTHER = _CHOOSE.replace("one", "another", 1)


def is_foreign(job: Job) -> bool:
    """Whether `bind` looks into the image: one that is here, and that imgkit did not build by its record.

    Raises
    ------
    UsageError : the image cannot be used, or the flags for such an image mean nothing in this job.
    """
    _chosen_python(job)
    return job.runs_entry_point and runtime_of(job).is_foreign(job)


def bind(job: Job, run: Runner | None = None) -> Job:
    """`job`, with the entry points bound where its image has none.

    An image that is not where the job is submitted is left to the checks of the submission.

    Parameters
    ----------
    run : runs a command on the remote that takes the job; default: on this machine.

    Raises
    ------
    UsageError : nothing in the image can run the entry points; says what imgkit found there.
    ToolMissing : the runtime is not here.
    """
    ask, chosen = run or _run_here, _chosen_python(job)
    if not (job.runs_entry_point if run else is_foreign(job)):
        return job
    digest = runtime_of(job).image_digest(job, ask)
    if not digest:
        if not chosen and run is None:
            return job
        where, hint = "here", "submit where the image is"
        if run is not None:
            where, hint = "on the remote", "the absolute path of an image there"
        message = (
            f"{job.container.image} does not exist or cannot be read {where}, so imgkit cannot look into it"
        )
        raise UsageError(message, where="--image", hint=hint)
    # What only the nodes have cannot be mounted here.
    present = tuple(mount for mount in job.container.binds if os.path.lexists(mount.partition(":")[0]))
    seen = _look(job if run else job.with_container(binds=present), digest, ask)
    if seen.built and seen.entry_points and not chosen:
        return job
    _refuse(job, seen)
    folder = f"{job.directory}/{FOLDER}/{name_of(job)}"
    entry_points = BoundEntryPoints(
        version=__version__,
        folder=quoting.check("--directory", folder),
        python=seen.path,
        site=seen.entry_points or seen.site,
        digest="" if digest == "folder" else digest,
    )
    return job.with_container(bound=entry_points)


def members(job: Job) -> tuple[tuple[str, bytes], ...]:
    """The files of the folder that is bound: the package, the system of the job, and a list for git."""
    facts = system.to_json(job.recipe.system).encode()
    # Neither git nor `--code` takes the folder for a part of the user's code.
    return (*wheel.entrypoints_files(), (system.SYSTEM_JSON.name, facts), (".gitignore", b"*\n"))


def name_of(job: Job) -> str:
    """The name of that folder, which differs for other contents."""
    digest = hashlib.sha256()
    for name, data in members(job):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return f"{__version__}-{digest.hexdigest()[:12]}"


def write(job: Job, folder: Path) -> None:
    """Write the folder that is bound to `folder`, which does not exist."""
    for name, data in members(job):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with files.create(folder / name) as stream:
            stream.write(data)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Put the folder `target` in place, which `fill` writes, unless it is there.

    Raises
    ------
    UsageError : another user has made a folder of that name, which the job would execute.
    """
    if os.path.lexists(target):
        if target.is_symlink() or files.foreign_folder(target):
            message = "it is a link or belongs to another user, and the job would execute what is in it"
            raise UsageError(message, where=str(target), hint="remove it, or choose another --directory")
        return
    target.parent.mkdir(exist_ok=True)
    temporary = files.temporary_name(target)
    try:
        fill(temporary)
        files.publish(temporary, target)
    except OSError:
        if not target.is_dir():  # another job may have made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _chosen_python(job: Job) -> str:
    """Return the flag that chooses the Python; empty if there is none.

    Raises
    ------
    UsageError : the flag or its value means nothing in this job.
    """
    container, flag = job.request.container, job.request.container.python_flag
    if flag:
        runtime_of(job).refuse_python(job, flag)
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
    return flag


def _run_here(argv: Sequence[str]) -> Finished:
    try:
        return process.run(argv, check=False)
    except ToolMissing as error:
        return Finished(argv=tuple(argv), returncode=127, output=error.what)


def _look(job: Job, digest: str, run: Runner) -> PythonSeen:
    """What the image's Python says of itself, from the cache where the same image was looked at before."""
    argv = _argv(job)
    key = hashlib.sha256(json.dumps([__version__, digest, *argv]).encode()).hexdigest()
    cache = files.cache_dir() / "looks" / f"{key}.json"
    if digest != "folder" and (cached := _read_cache(cache)):
        return cached
    finished = run(argv)
    seen = inside.parse_python(finished.output)
    if seen is None:
        raise _no_python(job, finished)
    if digest != "folder":
        files.write_cache(cache, json.dumps(dataclasses.asdict(seen)))
    return seen


def _read_cache(file: Path) -> PythonSeen | None:
    try:
        if files.foreign(file):
            return None
        seen: PythonSeen = json_text.read(PythonSeen, json_text.load(file), "it", closed=True)
    except (OSError, ValueError, TypeError):
        return None
    return seen


def _argv(job: Job) -> Argv:
    """The command that looks into the image as the job will start it, without its GPUs and modules apart."""
    plain = dataclasses.replace(job, settings={}).with_allocation(gpus=0)
    plain = plain.with_container(code=None, code_folder="", workdir="")
    probe = tuple(inside.python_argv(job.request.container.python))
    # As with the mounts: what only the nodes have cannot be mounted here.
    runtime = job.recipe.system.runtime
    local_runtime = dataclasses.replace(runtime, host_libs=tuple(filter(os.path.isdir, runtime.host_libs)))
    system = dataclasses.replace(job.recipe.system, runtime=local_runtime)
    plain = dataclasses.replace(plain, recipe=dataclasses.replace(job.recipe, system=system))
    return runtime_of(plain).probe_argv(plain, probe)


def _no_python(job: Job, finished: Finished) -> UsageError | ToolMissing:
    lines = [line.strip() for line in finished.output.splitlines() if line.strip()]
    notices = ("imgkit: the command of --activate", "module load ")  # a site's modules may echo what they do
    lines = [line for line in lines if not line.startswith(notices)]
    last = lines[-1] if lines else f"exit code {finished.returncode}"
    file, runtime = job.container.image, runtime_of(job)
    program = runtime.probe_program(job)
    if program and finished.returncode == 127 and not last.startswith("no program "):
        return ToolMissing(
            f"imgkit has to look into this image, which it did not build, but {program!r} fails here: {last}",
            where=file,
            hint="submit on a login node of the system",
        )
    if job.request.container.activate and not last.startswith("no program "):
        return UsageError(
            f"the command fails in {file}: {last}",
            where="--activate",
            hint=f"try it there: {runtime.typed_shell(job)}",
        )
    arch = image.read(Path(file)).arch if image.is_sif(Path(file)) else ""
    if arch and platform.machine() not in kernel_names(arch):
        return UsageError(
            f"the image is for {arch}, and this machine cannot run it to look for its Python: {last}",
            where=file,
            hint=f"submit on a machine of {arch}, for example from a node of the job",
        )
    return UsageError(
        f"imgkit did not build this image and found no Python in it: {last}",
        where=file,
        hint=_CHOOSE,
    )


def _refuse(job: Job, seen: PythonSeen) -> None:
    """Raise UsageError for a Python that cannot run the entry points, or that the nodes cannot run."""
    file = job.container.image
    if "+rocm" in seen.torch and not chooses_cpus(job.request):
        message, hint = bases.for_amd(f"torch {seen.torch} of this image is for AMD GPUs")
        raise UsageError(message, where=file, hint=hint)
    archs = [platform_name.removeprefix("linux/") for platform_name in job.recipe.platforms]
    machines = [name for arch in archs for name in kernel_names(arch)]
    site = seen.entry_points or seen.site
    problem, hint = "", _CHOOSE_OTHER
    if tuple(map(int, seen.version.split(".")[:2])) < bases.FLOOR:
        problem = f"; the entry points need Python {'.'.join(map(str, bases.FLOOR))}"
    elif not seen.torch:
        problem = " and has no torch"
    elif machines and seen.machine not in machines:
        problem = f" and for {seen.machine}, but the nodes are {' or '.join(archs)}"
        hint = "an image for the nodes: --image PATH"
    elif not site or not runtime_of(job).can_mount(site) or not seen.path.startswith("/"):
        problem = " and has no folder of packages to which imgkit can bind its entry points"
        problem += f": {site!r}" if site else ""
    if problem:
        subject = f"the Python of this image, {seen.path or 'without a path'}, is {seen.version}"
        raise UsageError(f"{subject}{problem}", where=file, hint=hint)
