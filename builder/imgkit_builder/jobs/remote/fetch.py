"""Bring the run folder of a job back: what is new or has changed, each file whole or as it was before."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs.remote import jobs, rsync
from imgkit_builder.jobs.remote.connection import Connection, ScriptFailed
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_entrypoints.errors import CheckFailed

# Files alone, with the permissions that new files have here; a run's secret stays there.
_OPTIONS = ("-rt", "--exclude=.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch has done."""

    folder: Path
    new: tuple[Path, ...]
    """Files that are new or have changed."""
    files: int
    """Number of files in the folder."""
    bytes: int
    """Size of the new ones."""


def fetch(
    connection: Connection, record: SubmittedJob, folder: Path, *, checkpoints: bool, report: Reporter
) -> Fetched:
    """Make `folder` like the run folder of the job, with the job's output; nothing in it is removed.

    Parameters
    ----------
    checkpoints : fetch the training's checkpoints as well.

    Raises
    ------
    ToolMissing : there is no rsync, here or there.
    Cut : the connection was lost; files that have arrived stay, and the next call resumes.
    CheckFailed : there is no such run yet.
    """
    report.stage(f"fetch {record.job.handle}")
    folder.mkdir(parents=True, exist_ok=True)
    before = _files(folder)
    log = jobs.log_file(record)
    # In a pattern, only a name with a wildcard has escapes.
    name = re.sub(r"([\[*?\\])", r"\\\1", log.name) if re.search(r"[\[*?]", log.name) else log.name
    target = f"{folder.absolute()}/"
    output = ("-rt", f"--include=/{name}", "--exclude=*", "remote:./", target)
    rsync.run(connection, str(log.parent), output, report)
    left_out = () if checkpoints else ("--exclude=checkpoints/",)
    run_folder = f"{record.job.directory}/runs/{record.job.name}-{record.job.id}"
    try:
        rsync.run(connection, run_folder, (*_OPTIONS, *left_out, "remote:./", target), report)
    except ScriptFailed as error:
        if error.code != rsync.NO_FOLDER:
            raise
    after = _files(folder)
    if not after:
        message = f"there is no {run_folder} on {record.job.remote} yet"
        raise CheckFailed(message, where=record.job.handle, hint=f"imgkit status {record.job.handle}")
    new = tuple(path for path, status in after.items() if before.get(path) != status)
    return Fetched(folder=folder, new=new, files=len(after), bytes=sum(after[path][0] for path in new))


def _files(folder: Path) -> Mapping[Path, tuple[int, int, int]]:
    """Return size, time and inode of each file in `folder`."""
    files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            status = Path(root, name).lstat()
            files[Path(root, name)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return files
