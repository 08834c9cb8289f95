"""Bring the run folder of a job back: what is new or has changed, each file whole or as it was before."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive.tar_read import REGULAR, TarStream
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.job.request import SubmittedJob
from imgkit_builder.remote import jobs
from imgkit_builder.remote.connection import Connection
from imgkit_entrypoints.errors import CheckFailed

_LATEST_S = 10**12
"""Times that a listing can have; later ones do not fit a file system."""

# GNU find and tar are on every cluster. A name that ends in NUL can hold anything else. A secret stays there.
_LIST = """\
cd -- "$home" || exit 1
for place in "$run" "$log"; do
    if [ -e "$place" ]; then find "$place" -type f ! -name '.*' -printf '%s %T@ %p\\0'; fi
done
"""
_PACK = """\
cd -- "$home" || exit 1
tar --create --file=- --format=gnu --null --verbatim-files-from --files-from=- 2> /dev/null
code=$?
if [ "$code" -gt 1 ]; then exit "$code"; fi # 1: a file has changed, or has gone, meanwhile
exit 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarFile:
    """A file of the run there."""

    path: str
    """Relative to the remote's folder."""
    size_bytes: int
    mtime_s: int

    def target(self, folder: Path, run: str) -> Path:
        """Its place in `folder`: the run folder's files by their paths, the job's output beside them."""
        inside = self.path.removeprefix(f"{run}/")
        return folder / inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch has done."""

    folder: Path
    new: tuple[Path, ...]
    """Files that are new or have changed."""
    files: int
    """Files of the run, without those that are left there."""
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
    Cut : the connection was lost; files that have arrived stay, and the next call resumes.
    CheckFailed : there is no such run yet, or its names are not those of a run.
    """
    home, run = str(record.directory), f"runs/{record.name}-{record.id}"
    log = os.path.relpath(jobs.log_file(record), home)
    report.stage(f"look at {record.handle}")
    far = _listed(connection.run(_LIST, home=home, run=run, log=log), run, log)
    if not far:
        raise CheckFailed(
            f"there is no {run} on {record.remote} yet", where=home, hint=f"imgkit status {record.handle}"
        )
    wanted = [one for one in far if checkpoints or "/checkpoints/" not in one.path]
    old = [one for one in wanted if not _is_there(one, one.target(folder, run))]
    total = sum(one.size_bytes for one in old)
    report.stage(f"fetch {record.handle}")
    new = _fetched(connection, home, run, old, folder, total, report) if old else ()
    return Fetched(folder=folder, new=new, files=len(wanted), bytes=total)


def _listed(output: bytes, run: str, log: str) -> list[FarFile]:
    found = []
    for row in output.split(b"\0")[:-1]:
        match = re.fullmatch(rb"(\d{1,18}) (\d{1,12})(?:\.\d*)? (.*)", row, re.DOTALL)
        path = os.fsdecode(match[3]) if match else ""
        parts = path.split("/")
        if not match or (path != log and not path.startswith(f"{run}/")) or {"", ".", ".."} & set(parts):
            raise CheckFailed(f"{path or row[:80]!r} is not a file of a run", where=run)
        found.append(FarFile(path=path, size_bytes=int(match[1]), mtime_s=int(match[2])))
    return found


def _is_there(far: FarFile, target: Path) -> bool:
    try:
        here = target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return here.st_size == far.size_bytes and int(here.st_mtime) == far.mtime_s


def _fetched(
    connection: Connection,
    home: str,
    run: str,
    wanted: Sequence[FarFile],
    folder: Path,
    total: int,
    report: Reporter,
) -> tuple[Path, ...]:
    names = b"".join(os.fsencode(one.path) + b"\0" for one in wanted)
    known = {one.path: one for one in wanted}
    new, done = [], 0
    stream = TarStream(connection.stream(_PACK, {"home": home}, data=[names]), name=run)
    for member in stream:
        far = known.get(member.name)
        if far is None or member.kind != REGULAR or not 0 <= member.mtime_s < _LATEST_S:
            raise CheckFailed(f"{member.name!r} was not requested", where=run)
        target = far.target(folder, run)
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.writing(target) as file:
            for chunk in stream.content():
                file.write(chunk)
                done += len(chunk)
                report.advance(done, total)
        os.utime(target, (member.mtime_s, member.mtime_s))
        new.append(target)
    stream.drain()
    return tuple(new)
