"""Submit a script, and keep a record to follow the job by its id."""

from __future__ import annotations

import dataclasses
import glob
import json
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.job import systems
from imgkit_builder.job.request import CodeRecord, Job, Script, SubmittedJob
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1


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
        name=f"{job.name}-sif" if job.request.making else job.name,
        recipe=job.recipe.name,
        directory=job.directory,
        queue=job.queue,
        code=job.code,
    )


def record_of(job_id: str) -> SubmittedJob:
    """The record of a job that this user submitted from this machine.

    Raises
    ------
    UsageError : there is no such record.
    """
    path = _path(job_id)
    try:
        data = json_text.load(path) if "/" not in job_id else {}
        return json_text.typed(
            SubmittedJob(
                id=data["id"],
                system=data["system"],
                name=data["name"],
                recipe=data["recipe"],
                directory=Path(data["directory"]),
                queue=data.get("queue", ""),
                remote=data.get("remote", ""),
                code=CodeRecord(**data["code"]) if data.get("code") else None,
            )
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        known = sorted(_folder().glob("*.json"), key=lambda found: found.stat().st_mtime)
        last = ", ".join(found.stem for found in known[-5:])
        raise UsageError(
            f"imgkit has no record of a job {job_id!r}",
            where="ID",
            hint=f"the last jobs: {last}" if last else "imgkit submit prints the id",
        ) from error


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
