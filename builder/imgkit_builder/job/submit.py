"""Submit a script, and keep a record to follow the job by its id."""

from __future__ import annotations

import dataclasses
import glob
import json
import secrets
import shlex
from collections.abc import Generator
from datetime import datetime, timezone
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.job import fields, systems
from imgkit_builder.job.request import CodeRecord, Job, Script, SubmittedJob
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError

SCHEMA = 1
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, UsageError)
_KEPT = 1000
"""Characters of an answer without an id that the record keeps."""


def submit(job: Job, script: Script) -> SubmittedJob:
    """Submit `script`; returns the record to follow it by.

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused; quotes its message.
    """
    process.need(
        script.submit[0], "run this on a login node of the system, or copy the output of imgkit job there"
    )
    image_id = _image_id(job)
    output = process.through(
        script.submit,
        [script.text.encode()] if script.on_stdin else [],
        cwd=None if job.run_by == "kubernetes" else job.directory,
    )
    return dataclasses.replace(submitted(job, output), image_id=image_id)


def submitted(job: Job, output: Generator[bytes, None, None], *, remote: str = "") -> SubmittedJob:
    """The record of `job`; `output` is what its submission prints, on the cluster `remote` if that is named.

    The job exists, whatever the scheduler printed: an answer without an id becomes part of the record.
    """
    try:
        text = process.answer(output, job.system).decode(errors="replace")
    except process.TooLong as error:
        text = error.start.decode(errors="replace")
    try:
        job_id, _, cluster = systems.named(job.system).job_id(text, job.name).partition(";")
    except Exception:  # a plug-in has failed, but its job is there
        job_id, cluster = "", ""
    is_id = fields.is_job_id(job_id) and (not cluster or fields.is_job_id(cluster))
    return SubmittedJob(
        id=job_id if is_id else f"unknown-{secrets.token_hex(4)}",
        cluster=cluster if is_id else "",
        answer=None if is_id else text[:_KEPT],
        system=job.system,
        name=job.title,
        recipe=job.recipe.name,
        directory=job.directory,
        queue=job.queue,
        remote=remote,
        code=job.code,
        submitted=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=job.command,
    )


def need_id(record: SubmittedJob) -> SubmittedJob:
    """`record`, if the scheduler told the job's id.

    Raises
    ------
    ToolFailed : it did not; says where the id is found.
    """
    if record.answer is None:
        return record
    words = systems.named(record.system).own_jobs(record)
    there = f" on {record.remote}" if record.remote else ""
    look = f"{shlex.join(words)}{there}" if words else f"the commands of {record.system}{there}"
    printed = repr(record.answer.strip()) if record.answer.strip() else "nothing"
    raise ToolFailed(
        f"the job is submitted, but its id is unknown: {record.system} printed {printed}",
        where=record.handle,
        hint=f"do not submit it again; {look} shows the job {record.name} with its id, "
        "by which the scheduler's own commands follow and cancel it",
    )


def _image_id(job: Job) -> str:
    from imgkit_builder.sif import image

    if job.delta is not None or not image.is_sif(Path(job.image)):
        return job.delta.image_id if job.delta else ""
    record = image.read(Path(job.image)).record
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
        known = sorted(_folder().glob("*.json"), key=lambda found: found.stat().st_mtime)
        last = ", ".join(found.stem for found in known[-5:])
        raise UsageError(
            f"imgkit has no record of a job {job_id!r}",
            where="ID",
            hint=f"the last jobs: {last}" if last else "imgkit submit prints the id",
        ) from error
    return need_id(record)


def records() -> tuple[SubmittedJob, ...]:
    """All records, the newest first; a damaged one is left out."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            found.append(_read(path))
        except _DAMAGED:
            continue
    return tuple(sorted(found, key=lambda record: record.submitted, reverse=True))


def _read(path: Path) -> SubmittedJob:
    data = json_text.load(path)
    found = json_text.typed(
        SubmittedJob(
            id=data["id"],
            system=data["system"],
            name=data["name"],
            recipe=data["recipe"],
            directory=Path(data["directory"]),
            queue=data["queue"],
            cluster=data["cluster"],
            answer=data["answer"],
            remote=data["remote"],
            submitted=data["submitted"],
            command=tuple(data["command"]),
            image_id=data["image_id"],
            state=data["state"],
            fetched=data["fetched"],
            code=CodeRecord(**data["code"]) if data["code"] else None,
        )
    )
    if not all(map(fields.is_job_id, (found.id, *filter(None, (found.cluster, found.remote))))):
        raise ValueError(f"{found.handle!r} is no job id")
    fields.check("--name", found.name.removesuffix("-sif"))
    return found


def keep(record: SubmittedJob) -> None:
    """Save `record`, for `record_of`."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": SCHEMA,
        "id": record.id,
        "system": record.system,
        "name": record.name,
        "recipe": record.recipe,
        "directory": str(record.directory),
        "queue": record.queue,
        "cluster": record.cluster,
        "answer": record.answer,
        "remote": record.remote,
        "code": dataclasses.asdict(record.code) if record.code else None,
        "submitted": record.submitted,
        "command": record.command,
        "image_id": record.image_id,
        "state": record.state,
        "fetched": record.fetched,
    }
    files.put(folder / f"{record.handle}.json", json.dumps(data, indent=2) + "\n")


def _path(job_id: str) -> Path:
    """The file of a record; the name of a remote may be left out where it is not needed.

    Raises
    ------
    ValueError : no job can have this id.
    """
    if not all(map(fields.is_job_id, job_id.split("@", 1))):
        raise ValueError(f"{job_id!r} is no job id")
    path = _folder() / f"{job_id}.json"
    if "@" in job_id or path.exists():
        return path
    found = list(_folder().glob(f"{glob.escape(job_id)}@*.json"))
    return found[0] if len(found) == 1 else path


def _folder() -> Path:
    return files.state_dir() / "jobs"
