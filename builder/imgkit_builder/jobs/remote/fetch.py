"""Copy the run folder of a job from the remote with rsync.

Only new and changed files are transferred. A file is replaced when all of it has arrived, so that an
interrupted fetch leaves each file complete, as it was before or as it is on the remote.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs import workspace
from imgkit_builder.jobs.remote import jobs, rsync
from imgkit_builder.jobs.remote.connection import Connection, ScriptFailed
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_entrypoints.errors import CheckFailed
from imgkit_entrypoints.system import WORKSPACE

_WILDCARD = re.compile(r"[\[*?]")  # the characters that make a name a pattern for rsync


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The result of a fetch: the local folder, and what has changed in it."""

    folder: Path
    new: tuple[Path, ...]
    """The files that are new or have changed."""
    files: int
    """Number of files in the folder."""
    bytes: int
    """Size of the files in `new`."""


def fetch_run(
    connection: Connection, record: SubmittedJob, folder: Path, *, checkpoints: bool, report: Reporter
) -> Fetched:
    """Copy the run folder and the output of the job into the local `folder`. Other files in `folder` stay.

    Files of the run's copy of the code are copied only if the run has changed them.

    Parameters
    ----------
    checkpoints : copy the checkpoints of the training as well.

    Raises
    ------
    ToolMissing : rsync is missing on this machine or on the remote.
    Cut : the connection was lost. Files that have arrived stay, and the next call resumes the transfer.
    CheckFailed : the job has neither a run folder nor output yet.
    """
    job = record.job
    report.stage(f"fetch {job.handle}")
    folder.mkdir(parents=True, exist_ok=True)
    files_before = _list_files(folder)
    if not job.store:  # the output of pods is in the run folder
        _fetch_log(connection, jobs.log_file(record), folder, report)
    _fetch_run_folder(connection, record, folder, checkpoints=checkpoints, report=report)
    files = _list_files(folder)
    if not files:
        raise CheckFailed(
            f"there is no {job.run_folder} on {job.files_remote} yet",
            where=job.handle,
            hint=f"imgkit status {job.handle}",
        )
    new_files = []
    new_bytes = 0
    for path, version in files.items():
        if files_before.get(path) != version:
            new_files.append(path)
            new_bytes += version.size_bytes
    return Fetched(folder=folder, new=tuple(new_files), files=len(files), bytes=new_bytes)


def _fetch_log(connection: Connection, log: PurePosixPath, folder: Path, report: Reporter) -> None:
    """Copy the file `log` on the remote into the local `folder`, if the job has already written it."""
    # Including one name and excluding all others is no error while the file does not exist.
    args = (
        "-rt",
        f"--include=/{_escape_pattern(log.name)}",
        "--exclude=*",
        "remote:./",
        f"{folder.absolute()}/",
    )
    rsync.run_rsync(connection, str(log.parent), args, report)


def _fetch_run_folder(
    connection: Connection, record: SubmittedJob, folder: Path, *, checkpoints: bool, report: Reporter
) -> None:
    """Copy the job's run folder into the local `folder`. A run folder that does not exist yet is no error.

    Parameters
    ----------
    checkpoints : copy the checkpoints of the training as well.
    """
    # Without -p, files get the permissions of new local files. The names of a run's secret and of an
    # unfinished copy of its code begin with a dot, so that they are not copied.
    options = ["-rt", "--exclude=.*"]
    if not checkpoints:
        options.append("--exclude=checkpoints/")
    with tempfile.NamedTemporaryFile(
        "w", prefix="imgkit-", encoding="utf-8", errors="surrogateescape"
    ) as patterns:
        unchanged_names = _unchanged_code(connection, record)
        for name in unchanged_names:
            patterns.write(f"/{WORKSPACE}/{_escape_pattern(name)}\n")
        patterns.flush()
        if unchanged_names:
            options += [f"--exclude-from={patterns.name}", "--prune-empty-dirs"]
        try:
            rsync.run_rsync(
                connection,
                str(record.job.run_folder),
                (*options, "remote:./", f"{folder.absolute()}/"),
                report,
            )
        except ScriptFailed as error:
            if error.code != rsync.NO_FOLDER:
                raise


def _unchanged_code(connection: Connection, record: SubmittedJob) -> list[str]:
    """Return the names of the code files in the run's copy that are still as they were sent.

    The result is empty for a job without code. A name with a line break is left out, since rsync reads the
    names from a file with one pattern per line.
    """
    if record.code is None:
        return []
    args = (str(record.job.run_folder), f"{record.job.directory}/code", "")
    output = b"".join(connection.stream(workspace.LIST, {}, args=args))
    listing = workspace.parse_listing(output)
    names = []
    for name, version in listing.sent.items():
        if listing.current.get(name) == version and "\n" not in name:
            names.append(name)
    return names


def _escape_pattern(name: str) -> str:
    """Return the rsync pattern that matches the file `name` only: ``a[1].txt`` -> ``a\\[1].txt``.

    rsync takes a backslash in a pattern literally, unless the pattern has a wildcard. So a name without
    wildcards stays as it is.
    """
    if not _WILDCARD.search(name):
        return name
    return re.sub(r"([\[*?\\])", r"\\\1", name)


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """The attributes of a local file, of which rsync changes at least one when it replaces the file."""

    size_bytes: int
    modified_ns: int
    inode: int


def _list_files(folder: Path) -> Mapping[Path, _FileVersion]:
    """Return all files in `folder` and in the folders below it."""
    files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            status = path.lstat()
            files[path] = _FileVersion(status.st_size, status.st_mtime_ns, status.st_ino)
    return files
