"""Prepare a job and submit it, here or on a remote, for the command line, the Python API and scaling alike.

`prepare` has no effect. `submit` makes everything ready where the transport leads, and submits.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Generator
from datetime import datetime, timezone
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import bound, image_source, quoting, records, systems
from imgkit_builder.jobs import code as code_of
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import QueuedJob, SubmittedJob
from imgkit_builder.jobs.transport import CODE_FOLDER, Folder, Transport
from imgkit_builder.recipe import targets
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import ToolFailed, UsageError

_KEPT = 1000
"""Characters of an answer without an id that the record keeps."""


def prepare(
    recipe: str | Path,
    request: JobRequest,
    code: CodeFolder | None = None,
    *,
    remote: Remote | None = None,
    base: str = "",
    rebuild: bool = False,
) -> PreparedJob:
    """Return the job that `request` becomes, and its script; nothing is written or run.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif to run on its own system; for a remote also an
        archive, or empty for the remote's default.
    code : the code of the request, which `code.read` has read.
    remote : the remote that takes the job; None: this machine.
    base : with `remote`, another base image than the recipe's.
    rebuild : with `remote`, ask the engine for the image even if nothing that goes into it has changed.

    Raises
    ------
    UsageError : a value that the system cannot satisfy.
    """
    if remote is None:
        return _prepare_here(recipe, request, code)
    image_source.refuse_flags(request, base)
    source = image_source.find(str(recipe), request, remote.recipe)
    source = dataclasses.replace(source, base=base, rebuild=rebuild)
    image_source.refuse_runtime(source)
    if code is not None:
        code_of.refuse_unused(code, source.target, source.given_sif)
    job = source.early
    if code is not None:
        job = code_of.with_code(job, code.record, job.directory / "code")
    script = systems.named(job.system).script(job)
    image_source.refuse_script(job, script)
    return PreparedJob(job=job, script=script, code=code, source=source)


def _prepare_here(recipe: str | Path, request: JobRequest, code: CodeFolder | None) -> PreparedJob:
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
    job_image = Path(job.container.image)
    sif = job_image if image.is_sif(job_image) else None
    code_of.refuse_unused_bind(job, sif)
    if code is not None:
        code_of.refuse_unused(code, target, sif)
        code_of.refuse_shadowed(code, job)
        job = code_of.with_code(job, code.record, job.directory / CODE_FOLDER)
        warnings = code_of.hidden_file_warnings(code, job_image)
        job = dataclasses.replace(job, warnings=(*job.warnings, *warnings))
    return _with_script(job, code)


def submit(prepared: PreparedJob, transport: Transport, report: Reporter | None = None) -> SubmittedJob:
    """Bring what the job needs to where it starts, submit it, and save its record.

    Parameters
    ----------
    report : receives progress and warnings; default: nothing is reported.

    Raises
    ------
    UsageError : the system cannot satisfy the request, or has no scheduler.
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused; quotes its message. Or it printed no job id.
    ImgkitError : as of a build, a conversion and a transfer.
    """
    report = report or Silent()
    if prepared.script.foreground:
        name = prepared.job.recipe.name
        raise UsageError(
            f"{name} has no scheduler: the run would take place in this process",
            where="system.scheduler",
            hint=f"imgkit run {prepared.job.recipe.file} ...",
        )
    return start(make_ready(prepared, transport, report), transport, report)


def start(ready: PreparedJob, transport: Transport, report: Reporter) -> SubmittedJob:
    """Submit a job for which `make_ready` has brought everything, and save its record.

    Raises
    ------
    ToolMissing, ToolFailed : as `submit`.
    """
    record = _submit_script(ready, transport)
    try:
        records.keep(record)
    except OSError as error:
        # The job runs all the same, and its own system answers.
        report.note(
            f"the job {record.job.handle} is submitted, but its record cannot be saved "
            f"({error.filename}: {error.strerror}): imgkit status, logs and cancel will not know it; "
            "next time: export XDG_STATE_HOME=FOLDER"
        )
    return record


def make_ready(prepared: PreparedJob, transport: Transport, report: Reporter) -> PreparedJob:
    """Bring the image, the code and the entry points to where the job starts.

    Raises
    ------
    ImgkitError : as `submit`.
    """
    for warning in prepared.job.warnings:
        report.note(warning)
    with_image = transport.bring_image(prepared, report)
    job = with_image.job
    if with_image.code is not None:
        job = code_of.with_code(job, with_image.code.record, transport.code_folder(job))
        transport.put(_code_folder(with_image.code, job), report)
    job = transport.with_entry_points(dataclasses.replace(with_image, job=job))
    if job.container.bound is not None:
        transport.put(_entry_points_folder(job), report)
    return dataclasses.replace(with_image, job=job, script=systems.named(job.system).script(job))


def look_into(prepared: PreparedJob, transport: Transport) -> PreparedJob:
    """Return `prepared` with the entry points bound into an image that imgkit did not build.

    The image's Python runs once; nothing is written.
    """
    return _with_script(transport.with_entry_points(prepared), prepared.code)


def _with_script(job: Job, code: CodeFolder | None = None) -> PreparedJob:
    return PreparedJob(job=job, script=systems.named(job.system).script(job), code=code)


def _code_folder(code: CodeFolder, job: Job) -> Folder:
    return Folder(
        path=job.container.code_folder,
        label="code",
        source=str(code.folder),
        size_bytes=code.tree.size_bytes,
        write=code.tree.write,
    )


def _entry_points_folder(job: Job) -> Folder:
    assert job.container.bound is not None  # noqa: S101 - the caller has looked
    return Folder(
        path=job.container.bound.folder,
        label="entry points",
        source="",
        size_bytes=sum(len(data) for _, data in bound.members(job)),
        write=lambda folder: bound.write(job, folder),
    )


def _submit_script(ready: PreparedJob, transport: Transport) -> SubmittedJob:
    """Submit the script of `ready`, and return the record to follow it by."""
    job = ready.job
    output = transport.start(job, ready.script)
    try:
        record = submitted(job, ready.script, output, remote=transport.name)
    except ToolFailed as error:
        # Of a job in pods, the name is the id.
        if not re.search("already ?exists", f"{error.what}\n{error.hint}", re.IGNORECASE):
            raise
        hint = f"nothing was started: a job named {job.name} exists; choose --name OTHER, or delete that job"
        raise ToolFailed(error.what, where=error.where, hint=f"{hint}\n{error.hint or ''}".strip()) from error
    return dataclasses.replace(record, image_id=ready.image_id)


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
    is_id = quoting.is_job_id(job_id) and (not cluster or quoting.is_job_id(cluster))
    queued = QueuedJob(
        id=job_id if is_id else f"unknown-{secrets.token_hex(4)}",
        cluster=cluster if is_id else "",
        system=job.system,
        kind=script.kind,
        name=job.title,
        directory=job.directory,
        queue=job.allocation.queue,
        remote=remote,
        array=script.is_array,
        shell_line="" if job.makes_image else runtime_of(job).shell_line(job),
    )
    return SubmittedJob(
        job=queued,
        recipe=job.recipe.name,
        answer=None if is_id else text[:_KEPT],
        code=job.container.code,
        bound_entry_points=job.container.bound.version if job.container.bound else "",
        submitted=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=() if job.makes_image else job.command,
    )
