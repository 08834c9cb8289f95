"""Submit a script, and keep a record to follow the job by its id."""

from __future__ import annotations

import dataclasses
import glob
import json
from datetime import datetime, timezone
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.job import systems
from imgkit_builder.job.request import CodeRecord, Job, Script, SubmittedJob
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError)


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
    output = process.through(
        script.submit,
        [script.text.encode()] if script.on_stdin else [],
        cwd=None if job.run_by == "kubernetes" else job.directory,
    )
    return SubmittedJob(
        id=systems.named(job.system).job_id(b"".join(output).decode()) or job.name,
        system=job.system,
        name=job.title,
        recipe=job.recipe.name,
        directory=job.directory,
        queue=job.queue,
        code=job.code,
        submitted=now(),
        command=job.command,
        image_id=_image_id(job),
    )


def now() -> str:
    """The time for a record: UTC, in seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


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
    """
    path = _path(job_id)
    try:
        return _read(path if "/" not in job_id else Path())
    except _DAMAGED as error:
        known = sorted(_folder().glob("*.json"), key=lambda found: found.stat().st_mtime)
        last = ", ".join(found.stem for found in known[-5:])
        raise UsageError(
            f"imgkit has no record of a job {job_id!r}",
            where="ID",
            hint=f"the last jobs: {last}" if last else "imgkit submit prints the id",
        ) from error


def records() -> tuple[SubmittedJob, ...]:
    """All records, the newest first; a damaged one is left out."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            found.append((_read(path), path.stat().st_mtime))
        except _DAMAGED:
            continue
    # Records of imgkit before 0.2 have no time; their files do not change later.
    return tuple(record for record, _ in sorted(found, key=lambda pair: _when(*pair), reverse=True))


def _when(record: SubmittedJob, written_s: float) -> float:
    try:
        return datetime.fromisoformat(record.submitted).timestamp()
    except ValueError:
        return written_s


def _read(path: Path) -> SubmittedJob:
    data = json_text.load(path)
    return json_text.typed(
        SubmittedJob(
            id=data["id"],
            system=data["system"],
            name=data["name"],
            recipe=data["recipe"],
            directory=Path(data["directory"]),
            queue=data.get("queue", ""),
            remote=data.get("remote", ""),
            submitted=data.get("submitted", ""),
            command=tuple(data.get("command", ())),
            image_id=data.get("image_id", ""),
            state=data.get("state", ""),
            fetched=data.get("fetched", ""),
            code=CodeRecord(**data["code"]) if data.get("code") else None,
        )
    )


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
    """The file of a record; the name of a remote may be left out where it is not needed."""
    path = _folder() / f"{job_id}.json"
    if "/" in job_id or "@" in job_id or path.exists():
        return path
    found = list(_folder().glob(f"{glob.escape(job_id)}@*.json"))
    return found[0] if len(found) == 1 else path


def _folder() -> Path:
    return files.state_dir() / "jobs"
