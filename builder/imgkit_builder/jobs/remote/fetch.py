"""Copy the run folder of a job from a remote with rsync.

Only new and changed files are transferred. A file is replaced only when it has arrived completely. So after
an interrupted fetch, each file is complete: either its old version or its new one.
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
    """The result of a fetch: the local folder, and which files in it have changed."""

    folder: Path
    new: tuple[Path, ...]
    """The files that are new or that have changed."""
    files: int
    """Number of files in the folder."""
    bytes: int
    """Size of the files in `new`."""


def fetch_run(
    connection: Connection, record: SubmittedJob, folder: Path, *, checkpoints: bool, report: Reporter
) -> Fetched:
    """Copy the run folder and the output of the job to the local `folder`. Other files there stay.

    From the run's copy of the code, only files that the run has changed are copied.

    Parameters
    ----------
    checkpoints : whether the checkpoints of the training run are copied as well.

    Raises
    ------
    ToolMissing : rsync is missing on this machine or on the remote.
    Cut : the connection was lost. Files that have arrived stay, and the next call resumes the transfer.
    CheckFailed : the job has neither a run folder nor output yet.
    """
    job = record.job
    report.stage(f"fetch {job.handle}")
    folder.mkdir(parents=True, exist_ok=True)
    files_before = _list_files(folder)  # before anything is fetched, to tell the new files
    if not job.store:  # the output of a job in pods is in its run folder
        _fetch_log(connection, jobs.log_file(record), folder, report)
    _fetch_run_folder(connection, record, folder, checkpoints=checkpoints, report=report)
    files = _list_files(folder)
    if not files:
        raise CheckFailed(
            f"there is no {job.run_folder} on {job.files_remote} yet",
            where=job.handle,
            hint=f"imgkit status {job.handle}",
        )
    new_files = [path for path, version in files.items() if version != files_before.get(path)]
    new_bytes = sum(files[path].size_bytes for path in new_files)
    return Fetched(folder=folder, new=tuple(new_files), files=len(files), bytes=new_bytes)


def _fetch_log(connection: Connection, log: PurePosixPath, folder: Path, report: Reporter) -> None:
    """Copy the file `log` on the remote to the local `folder`, if the job has already written it."""
    # The file is selected by patterns and not by its path, because rsync would fail if the path did not
    # exist.
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
    """Copy the job's run folder to the local `folder`. If it does not exist yet, nothing is copied.

    Parameters
    ----------
    checkpoints : whether the checkpoints of the training run are copied as well.
    """
    # Without -p, the files get the permissions of new local files. The secret by which the nodes of the run
    # recognize each other, and an unfinished copy of the code, must stay on the remote. Their names begin
    # with a dot.
    options = ["-rt", "--exclude=.*"]
    if not checkpoints:
        options.append("--exclude=checkpoints/")
    # Names of files may contain bytes that are not UTF-8. "surrogateescape" writes them unchanged.
    patterns = [
        f"/{WORKSPACE}/{_escape_pattern(name)}\n" for name in _list_unchanged_code(connection, record)
    ]
    with tempfile.NamedTemporaryFile(
        "w", prefix="imgkit-", encoding="utf-8", errors="surrogateescape"
    ) as pattern_file:
        pattern_file.writelines(patterns)
        pattern_file.flush()
        if patterns:
            # Without --prune-empty-dirs, folders with only unchanged files would be created empty.
            options += [f"--exclude-from={pattern_file.name}", "--prune-empty-dirs"]
        try:
            rsync.run_rsync(
                connection,
                str(record.job.run_folder),
                (*options, "remote:./", f"{folder.absolute()}/"),
                report,
            )
        except ScriptFailed as error:
            if error.code != rsync.NO_FOLDER:  # the folder does not exist before the job has started
                raise


def _list_unchanged_code(connection: Connection, record: SubmittedJob) -> list[str]:
    """Return the names of the code files in the run's copy that the run has not changed.

    For a job without code, the result is empty. A name with a line break is left out, because rsync reads the
    names from a file with one pattern on each line.
    """
    if record.code is None:
        return []
    # The third argument of the script is the digest of today's code. It is empty, because the copy is
    # compared only with the code that was sent.
    args = (str(record.job.run_folder), f"{record.job.directory}/code", "")
    output = b"".join(connection.stream(workspace.LIST, {}, args=args))
    listing = workspace.parse_listing(output)
    names = []
    for name, sent_version in listing.sent.items():
        is_unchanged = listing.current.get(name) == sent_version
        if is_unchanged and "\n" not in name:
            names.append(name)
    return names


def _escape_pattern(name: str) -> str:
    """Return an rsync pattern that matches only the file `name`: ``a[1].txt`` -> ``a\\[1].txt``.

    In a pattern without wildcards, rsync takes a backslash literally. So a name without wildcards is not
    escaped.
    """
    if not _WILDCARD.search(name):
        return name
    return re.sub(r"([\[*?\\])", r"\\\1", name)


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """Attributes of a local file. When rsync replaces the file, at least one of them changes."""

    size_bytes: int
    modified_ns: int
    inode: int


def _list_files(folder: Path) -> Mapping[Path, _FileVersion]:
    """Return the attributes of all files in `folder` and its subfolders, by path."""
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            files[path] = _FileVersion(status.st_size, status.st_mtime_ns, status.st_ino)
    return files
