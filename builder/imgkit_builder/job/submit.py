"""Hand a script over, keep what is needed to follow it, and the thin commands that do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from imgkit_builder import files
from imgkit_builder.job import systems
from imgkit_builder.job.request import Job, Record, Script
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

SCHEMA = 1


def submit(job: Job, script: Script) -> Record:
    """Submit `script` and keep its record.

    Raises
    ------
    ToolMissing : the scheduler's command is not here.
    ToolFailed : it refused; its own words are quoted.
    """
    system = systems.name_for(job)
    need(
        script.submit[0], "run this on a login node of the system; imgkit job prints the script to take there"
    )
    done = subprocess.run(
        script.submit,
        input=script.text if script.on_stdin else None,
        stdin=None if script.on_stdin else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=None if job.run_by == "kubernetes" else job.directory,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ToolFailed(
            f"{script.submit[0]} refused the job (exit code {done.returncode})", hint=said or None
        )
    record = Record(
        id=systems.named(system).job_id(done.stdout) or job.name,
        system=system,
        name=job.name if job.request.archive is None else f"{job.name}-sif",
        recipe=job.recipe.name,
        directory=job.directory,
        queue=job.queue,
    )
    _keep(record)
    return record


def through(words: Sequence[str], *, cwd: Path | None = None) -> int:
    """Run `words` with this terminal as theirs; their exit code."""
    need(words[0])
    try:
        return subprocess.run(list(words), check=False, cwd=cwd).returncode
    except KeyboardInterrupt:
        return 130  # the program has had the same Ctrl-C


def become(words: Sequence[str], *, cwd: Path) -> NoReturn:
    """Run `words` in place of this process: the terminal, signals and the exit code are theirs.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    need(words[0])
    os.chdir(cwd)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and that would be inherited
        signal.signal(number, signal.SIG_DFL)
    os.execvp(words[0], list(words))  # noqa: S606 - an argv list, no shell


def captured(words: Sequence[str]) -> tuple[int, str]:
    """Run `words` to their end; exit code and output."""
    need(words[0])
    done = subprocess.run(
        list(words), check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def need(program: str, hint: str = "") -> None:
    """Raise ToolMissing where `program` is not on PATH."""
    if shutil.which(program) is None:
        raise ToolMissing(f"the program {program!r} is not on PATH", hint=hint or None)


def record_of(job_id: str) -> Record:
    """The record of a job that this user has submitted from here.

    Raises
    ------
    UsageError : there is none.
    """
    path = _folder() / f"{job_id}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if "/" not in job_id else None
    except (OSError, ValueError):
        data = None
    if data is None:
        known = sorted(_folder().glob("*.json"), key=lambda found: found.stat().st_mtime)
        last = ", ".join(found.stem for found in known[-5:])
        raise UsageError(
            f"no job {job_id!r} was submitted by imgkit from here",
            where="ID",
            hint=f"the last ones: {last}" if last else "imgkit submit prints the id",
        )
    return Record(
        id=data["id"],
        system=data["system"],
        name=data["name"],
        recipe=data["recipe"],
        directory=Path(data["directory"]),
        queue=data.get("queue", ""),
    )


def _keep(record: Record) -> None:
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
    }
    files.write_text(folder / f"{record.id}.json", json.dumps(data, indent=2) + "\n")


def _folder() -> Path:
    return files.state_dir() / "jobs"
