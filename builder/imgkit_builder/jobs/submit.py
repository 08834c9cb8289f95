"""Prepare a job, check it, submit it, and keep a record by which its id is enough to follow it.

`submit` does all of it and prints nothing. A command line calls the steps one by one, because it asks people
between them. Only `send`, `write_files` and `keep` have an effect.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import secrets
import shlex
from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import bound, container, pyxis, quoting, systems
from imgkit_builder.jobs import code as code_of
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.records import SubmittedJob
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.recipe import targets
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError
from imgkit_entrypoints.rollcall import secret

SCHEMA = 1
CODE_FOLDER = ".imgkit-code"
"""Folder of the code in that of the job; `--code .` leaves it out."""
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, UsageError)
_KEPT = 1000
"""Characters of an answer without an id that the record keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job whose script is written, before anything is submitted."""

    job: Job
    script: Script
    code: CodeFolder | None = None
    """The code over the image; None if there is none."""


def submit(recipe: str | Path, request: JobRequest, *, report: Reporter | None = None) -> SubmittedJob:
    """Prepare, check and submit a job, and save its record.

    Parameters
    ----------
    recipe : as for `prepare`.
    report : receives progress and warnings; default: nothing is reported.

    Raises
    ------
    UsageError : the system cannot satisfy the request, or has no scheduler.
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused; quotes its message. Or it printed no job id.
    """
    report = report or Silent()
    code = None
    if request.container.code is not None:
        code = code_of.read(request, large=request.container.yes, report=report)
    prepared = prepare(recipe, request, code)
    if prepared.script.foreground:
        raise UsageError(
            f"{prepared.job.recipe.name} has no scheduler: the run would take place in this process",
            where="system.scheduler",
            hint=f"imgkit run {recipe} ...",
        )
    for warning in prepared.job.warnings:
        report.note(warning)
    before_submission(prepared.job)
    prepared = look_into(prepared)
    write_files(prepared)
    record = send(prepared.job, prepared.script)
    try:
        keep(record)
    except OSError as error:  # the job runs all the same
        report.note(f"the record of the job {record.id} cannot be saved: {error.filename}: {error.strerror}")
    return need_id(record)


def prepare(recipe: str | Path, request: JobRequest, code: CodeFolder | None = None) -> PreparedJob:
    """The job that `request` becomes, and its script; nothing is written or run.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif to run on its own system.
    code : the code of the request, which `job.container.code.read` has read.

    Raises
    ------
    UsageError : a value that the system cannot satisfy.
    """
    file = Path(recipe)
    if image.is_sif(file) or sqsh.is_sqsh(file):
        target, default = baked.target(file), str(file.absolute())
    else:
        target, default = targets.find(recipe), ""
    if not request.image_flag:
        request = request.changed(image=request.container.image or default)
    job = resolve(target, request)
    if job.makes_image:
        return _with_script(job)
    if (
        job.container.runtime not in ("pyxis", "singularity")
        and job.container.image
        and sqsh.is_sqsh(Path(job.container.image))
    ):
        raise UsageError(
            f"{job.container.runtime} does not start a .sqsh",
            where=job.container.image,
            hint="--runtime singularity; or on a cluster with pyxis: --runtime pyxis",
        )
    sif = Path(job.container.image) if image.is_sif(Path(job.container.image)) else None
    code_of.refuse_unused_bind(job, sif)
    if code is not None:
        code_of.refuse_unused(code, target, sif)
        code_of.refuse_shadowed(code, job)
        job = container.with_code(job, code.record, str(job.directory / CODE_FOLDER / code.record.sha256))
        warnings = code_of.hidden_file_warnings(code, Path(job.container.image))
        job = dataclasses.replace(job, warnings=(*job.warnings, *warnings))
    return _with_script(job, code)


def _with_script(job: Job, code: CodeFolder | None = None) -> PreparedJob:
    return PreparedJob(job=job, script=systems.named(job.system).script(job), code=code)


def look_into(prepared: PreparedJob) -> PreparedJob:
    """`prepared`, with the entry points bound into an image that imgkit did not build: its Python runs once.

    Raises
    ------
    UsageError : the image cannot run the entry points.
    ToolMissing : the runtime is not here.
    """
    if prepared.job.makes_image or foreign_image(prepared.job):  # the submission refuses that
        return prepared
    return _with_script(bound.bind(prepared.job), prepared.code)


def before_submission(job: Job) -> None:
    """Check the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image does not exist, or is for other nodes.
    CheckFailed : a .sqsh is cut short.
    """
    if job.container.runtime != "kubernetes" and not job.directory.is_dir():  # pods have folders of their own
        raise UsageError(f"no folder {job.directory}", where="--directory")
    if job.makes_image:
        _check_source(job.request)
        return
    check_environment(job)
    for _ in systems.named(job.system).check(job, is_submitted=True):
        pass  # the warnings have been shown
    if job.container.runtime == "singularity":
        _check_sif(job)
    elif job.container.runtime == "pyxis" and pyxis.is_file(job.container.image):
        if not sqsh.is_sqsh(Path(job.container.image)):
            problem = "is not a .sqsh" if Path(job.container.image).exists() else "does not exist"
            hint = f"imgkit sif {job.recipe.name} -o {job.recipe.name}.sqsh, or --image PATH"
            raise UsageError(f"the image {problem}", where=job.container.image, hint=hint)
        sqsh.structure(Path(job.container.image))
        if foreign := foreign_image(job):
            raise foreign
    elif (
        job.container.runtime == "host"
        and job.container.image
        and not os.path.lexists(f"{job.container.image}/bin/python3")
    ):
        # It is not run: a login node can have another processor than the nodes it was made on.
        raise UsageError(
            f"no virtual environment {job.container.image}",
            where="--image",
            hint=f"on a node: python3 -m venv {job.container.image}",
        )


def check_environment(job: Job) -> None:
    """Raise UsageError for a variable that the job takes from here, and that is not set or means trouble."""
    if job.container.runtime == "pyxis":
        pyxis.check_environment(os.environ)
    for name in job.container.names if job.container.runtime != "kubernetes" else ():
        if name not in os.environ:
            raise UsageError(
                f"{name} is not set here", where="--env", hint=f"export {name}=..., or --env-file FILE"
            )
        if "\n" in os.environ[name]:
            raise UsageError(f"{name} holds a line break", where="--env", hint="put it into a file")
    if job.container.env_file and os.path.lexists(job.container.env_file):  # it may be on the nodes alone
        os.close(secret.open_private(Path(job.container.env_file), purpose="the file of --env-file"))


def _check_source(request: JobRequest) -> None:
    """Look for the archive here, or read the recipe and look for the base, before the job waits."""
    from imgkit_builder.recipe.load import load

    file, hint = request.archive, "imgkit save makes one"
    if file is None:
        load(request.build)
        file, hint = request.base_from, "an archive or a .sif of the base where the nodes see it"
    if file is not None and not (file.is_file() or (request.build and file.is_dir())):
        raise UsageError(f"no file {file}", where="--base-from" if request.build else "--sif", hint=hint)


def _check_sif(job: Job) -> None:
    path = Path(job.container.image)
    if not path.exists():
        raise UsageError(
            f"no image {path}", where="--image", hint=f"imgkit sif {job.recipe.name}, or --image PATH"
        )
    if path.is_dir():
        return  # a sandbox: singularity runs it too
    if foreign := foreign_image(job):
        raise foreign


def foreign_image(job: Job) -> UsageError | None:
    """The error for a .sif here of another architecture than the nodes'; None if it fits or is not here."""
    path, arch = Path(job.container.image), ""
    if job.makes_image:
        return None
    if job.container.runtime == "singularity" and image.is_sif(path):
        arch = image.read(path).arch
    elif job.container.runtime in ("pyxis", "singularity") and sqsh.is_sqsh(path):
        arch = baked.arch(path)
    if not arch:
        return None
    archs = {platform.removeprefix("linux/") for platform in job.recipe.platforms}
    if arch in archs:
        return None
    return UsageError(
        f"the image is for {arch}, but the nodes are {' or '.join(sorted(archs))}",
        where=str(path),
        hint=f"imgkit build {job.recipe.name} --platform {min(archs)}, then imgkit sif",
    )


def write_files(prepared: PreparedJob) -> None:
    """Write what the job mounts where it looks for it, unless an earlier job has done so.

    That is the folder of the code, and the entry points for an image without them.
    """
    bound.write(prepared.job)
    if prepared.code is not None:
        bound.write_folder(Path(prepared.job.container.code_folder), prepared.code.tree.write)


def send(job: Job, script: Script) -> SubmittedJob:
    """Submit `script`; returns the record to follow it by.

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused; quotes its message.
    """
    process.need(
        script.submit[0],
        "run this on a login node of the system, or copy the output of imgkit run --dry-run there",
    )
    image_id = _image_id(job)
    output = process.through(
        script.submit,
        [script.text.encode()] if script.on_stdin else [],
        cwd=None if job.container.runtime == "kubernetes" else job.directory,
    )
    try:
        return dataclasses.replace(submitted(job, script, output), image_id=image_id)
    except ToolFailed as error:
        # Of a job in pods, the name is the id.
        if not re.search("already ?exists", f"{error.what}\n{error.hint}", re.IGNORECASE):
            raise
        hint = f"nothing was started: a job named {job.name} exists; choose --name OTHER, or delete that job"
        raise ToolFailed(error.what, where=error.where, hint=f"{hint}\n{error.hint or ''}".strip()) from error


def submitted(
    job: Job, script: Script, output: Generator[bytes, None, None], *, remote: str = ""
) -> SubmittedJob:
    """Return the record of `job`.

    Parameters
    ----------
    output : what the submission of `script` prints, on the cluster `remote` if that is named.

    The job exists, whatever the scheduler printed: an answer without an id becomes part of the record.
    """
    try:
        text = process.answer(output, job.system).decode(errors="replace")
    except process.TooLong as error:
        text = error.start.decode(errors="replace")
    try:
        job_id, _, cluster = systems.named(job.system).parse_job_id(text, job.name).partition(";")
    except Exception:  # a plug-in has failed, but its job is there
        job_id, cluster = "", ""
    has_shell = not job.makes_image and job.container.runtime in ("singularity", "host")
    is_id = quoting.is_job_id(job_id) and (not cluster or quoting.is_job_id(cluster))
    return SubmittedJob(
        id=job_id if is_id else f"unknown-{secrets.token_hex(4)}",
        cluster=cluster if is_id else "",
        answer=None if is_id else text[:_KEPT],
        system=job.system,
        kind=script.kind,
        name=job.title,
        recipe=job.recipe.name,
        directory=job.directory,
        queue=job.allocation.queue,
        remote=remote,
        code=job.container.code,
        bound_entry_points=job.container.bound.version if job.container.bound else "",
        submitted=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=() if job.makes_image else job.command,
        array=script.is_array,
        shell_line=container.shell_line(job) if has_shell else "",
    )


def need_id(record: SubmittedJob) -> SubmittedJob:
    """`record`, if the scheduler told the job's id.

    Raises
    ------
    ToolFailed : it did not; says where the id is found.
    """
    if record.answer is None:
        return record
    argv = systems.named(record.system).own_jobs
    suffix = f" on {record.remote}" if record.remote else ""
    look = f"{shlex.join(argv)}{suffix}" if argv else f"the commands of {record.system}{suffix}"
    printed = repr(record.answer.strip()) if record.answer.strip() else "nothing"
    raise ToolFailed(
        f"the job is submitted, but its id is unknown: {record.system} printed {printed}",
        where=record.handle,
        hint=f"do not submit it again; {look} shows the job {record.name} with its id, "
        "by which the scheduler's own commands follow and cancel it",
    )


def _image_id(job: Job) -> str:
    if job.makes_image:
        return ""  # the image is still to be made
    if not image.is_sif(Path(job.container.image)):
        return ""
    record = image.read(Path(job.container.image)).record
    return record.image_id if record else ""


def record_of(job_id: str) -> SubmittedJob:
    """The record of a job that this user submitted from this machine.

    Raises
    ------
    UsageError : there is no such record.
    ToolFailed : the job's id is unknown.
    """
    try:
        record = _read(_path(job_id))
    except _DAMAGED as error:
        if task := _task(job_id):
            return need_id(task)
        paths = sorted(_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
        last = ", ".join(path.stem for path in paths[-5:])
        raise UsageError(
            f"imgkit has no record of a job {job_id!r}",
            where="ID",
            hint=f"the last jobs: {last}" if last else "imgkit run prints the id",
        ) from error
    return need_id(record)


def _task(job_id: str) -> SubmittedJob | None:
    """The record for a task of an array job; None if no array has it."""
    number, _, remote = job_id.partition("@")
    for record in records():
        if record.array and remote in ("", record.remote):
            task = systems.task_id(record, number)
            if task and quoting.is_job_id(task):
                return dataclasses.replace(record, id=task, array=False, state="", fetched="")
    return None


def records() -> tuple[SubmittedJob, ...]:
    """All records, the newest first; a damaged one is left out."""
    loaded = []
    for path in _folder().glob("*.json"):
        try:
            loaded.append(_read(path))
        except _DAMAGED:
            continue
    return tuple(sorted(loaded, key=lambda record: record.submitted, reverse=True))


def _read(path: Path) -> SubmittedJob:
    record: SubmittedJob = json_text.read(SubmittedJob, json_text.load(path), "record")
    if not all(map(quoting.is_job_id, (record.id, *filter(None, (record.cluster, record.remote))))):
        raise ValueError(f"{record.handle!r} is not a job id")
    quoting.check("--name", record.name.removesuffix("-sif"))
    return record


def keep(record: SubmittedJob) -> None:
    """Save `record`, for `record_of`."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, **dataclasses.asdict(record), "directory": str(record.directory)}
    files.put(folder / f"{record.handle}.json", json.dumps(data, indent=2) + "\n")


def is_cancelled(record: SubmittedJob) -> bool:
    """Return whether imgkit has cancelled the job, also after `record` was read."""
    try:
        return _read(_path(record.handle)).cancelled
    except _DAMAGED:
        return False


def _path(job_id: str) -> Path:
    """The file of a record; the name of a remote may be left out where it is not needed.

    Raises
    ------
    ValueError : no job can have this id.
    """
    if not all(map(quoting.is_job_id, job_id.split("@", 1))):
        raise ValueError(f"{job_id!r} is not a job id")
    path = _folder() / f"{job_id}.json"
    if "@" in job_id or path.exists():
        return path
    matches = list(_folder().glob(f"{glob.escape(job_id)}@*.json"))
    return matches[0] if len(matches) == 1 else path


def _folder() -> Path:
    return files.state_dir() / "jobs"
