"""Find what nothing uses any more in a store, and remove it; whatever imgkit has not named stays.

A file is in use if it was written or chosen lately, if a job that has not ended names it, or if a run of late
used it. ``jobs/ID`` in the store, which the submission writes, says what a job names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.job import systems
from imgkit_builder.job.quoting import is_job_id
from imgkit_builder.remote import jobs
from imgkit_builder.remote.connection import Connection, unreadable
from imgkit_entrypoints.errors import ToolFailed, UsageError

DAY_S = 86400
_FILE = r"[0-9a-f]{64}-[0-9a-f]{12}\.(sif|imgdelta)"
_FOLDER = r"[0-9a-f]{64}"
# A complete file, one that a removal has put aside, and what rsync makes of an incoming one.
_PATH = re.compile(
    rf"(images|deltas)/({_FILE}|\.{_FILE}\.gone|\.incoming/(\.imgkit-part/)?\.?{_FILE}(\.\w+)*)"
    rf"|code/(\.incoming/)?({_FOLDER}|\.{_FOLDER}\.gone)"
)
"""Names that imgkit gives."""

_LIST = """\
cd -- "$folder" 2> /dev/null || { echo "clock $(date +%s)"; echo end; exit 0; }
echo "clock $(date +%s)"
for place in images deltas; do
    if [ -d "$place" ]; then find "$place/" -maxdepth 3 -type f -printf 'file %T@ %s %p\\n'; fi
done
for path in code/* code/.*.gone code/.incoming/* code/.incoming/.*.gone; do
    if [ -d "$path" ] && [ ! -L "$path" ]; then
        find "$path" -maxdepth 0 -printf 'file %T@ '
        echo "$(($(du -sk "$path" | cut -f 1) * 1024)) $path"
    fi
done
if [ -d runs ]; then find runs/ -mindepth 1 -maxdepth 1 -printf 'run %T@ %f\\n'; fi
if [ -d jobs ]; then
    find jobs/ -maxdepth 1 -type f -printf 'job %T@ %f\\n'
    find jobs/ -maxdepth 1 -type f -exec grep '' /dev/null {} + | sed 's/^/note /'
fi
echo end
"""
# A file is put aside first: a submission that chooses it meanwhile either renews its time, or misses it and
# says so. In both cases no job waits for a file that is gone.
_REMOVE = """\
cd -- "$folder" || exit 1
while IFS= read -r file; do
    name=${file##*/}
    case $name in .*.gone) aside=$file ;; *) aside=${file%/*}/.${name#.}.gone ;; esac
    if [ "$aside" != "$file" ]; then mv -T -f -- "$file" "$aside" 2> /dev/null || continue; fi
    if [ -n "$(find "$aside" -maxdepth 0 -newermt "@$before")" ]; then
        mv -T -f -- "$aside" "$file"
    elif rm -rf -- "$aside"; then
        echo "removed $file"
    fi
done
for id; do rm -f -- "jobs/$id"; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of imgkit's in a store, or a folder of code."""

    path: str
    """Relative to the remote's folder."""
    size_bytes: int
    used_s: float
    """Time at which it was last used, by the remote's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """What the store knows of a job."""

    id: str
    system: str
    """The system, or ``SYSTEM;CLUSTER``."""
    files: tuple[str, ...]
    used_s: float
    """Time of its submission, or of the last change in its run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """What a store could lose."""

    files: tuple[StoredFile, ...]
    """Oldest first."""
    used: int
    """Number of files in use."""
    ended_jobs: tuple[str, ...]
    """Ids of old jobs whose notes are needed no more."""
    before_s: float
    """What was used since then is in use."""
    unknown: tuple[str, ...]
    """Why the files of some jobs all count as in use; empty where the scheduler has answered."""


def find_unused(connection: Connection, days: int) -> Unused:
    """Return everything that no run of the last `days` days used and no waiting or running job names.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot list its files.
    ToolFailed : its answer is cut short.
    """
    output = connection.run(_LIST, {"folder": connection.remote.folder})
    files, notes, clock_s = parse(output, connection.remote.name)
    waiting = {name: unfinished(connection, name) for name in dict.fromkeys(note.system for note in notes)}
    return choose(files, notes, waiting, clock_s - days * DAY_S)


def remove(connection: Connection, unused: Unused) -> tuple[str, ...]:
    """Remove these files; return the paths of those that nothing has used meanwhile.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached; the same call resumes.
    """
    if not unused.files and not unused.ended_jobs:
        return ()
    names = "".join(f"{file.path}\n" for file in unused.files)
    values = {"folder": connection.remote.folder, "before": str(int(unused.before_s))}
    output = connection.answer(
        connection.stream(_REMOVE, values, args=unused.ended_jobs, data=[names.encode()])
    )
    rows = output.decode(errors="replace").splitlines()
    return tuple(row.removeprefix("removed ") for row in rows if row.startswith("removed "))


def parse(output: bytes, remote: str) -> tuple[tuple[StoredFile, ...], tuple[JobNote, ...], float]:
    """Return the files, notes of jobs and the clock of `remote` in its answer.

    Lines that imgkit does not know are left out.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    rows = output.decode(errors="replace").splitlines()
    clock = re.fullmatch(r"clock (\d{1,12})", rows[0]) if rows else None
    if clock is None or rows[-1] != "end":
        raise unreadable(remote, output)
    files: list[StoredFile] = []
    changed_s: dict[str, dict[str, float]] = {"run": {}, "job": {}}
    lines: dict[str, list[str]] = {}
    for row in rows[1:-1]:
        if match := re.fullmatch(r"file (\d{1,12})(?:\.\d*)? (\d{1,18}) (.+)", row):
            if _PATH.fullmatch(match[3]):
                files.append(StoredFile(path=match[3], size_bytes=int(match[2]), used_s=int(match[1])))
        elif match := re.fullmatch(r"(run|job) (\d{1,12})(?:\.\d*)? (.+)", row):
            changed_s[match[1]][match[3]] = int(match[2])
        elif match := re.fullmatch(r"note jobs/([^:]+):(.*)", row):
            lines.setdefault(match[1], []).append(match[2])
    notes = []
    for name, time_s in changed_s["job"].items():
        if not is_job_id(name):
            continue
        system, job, *paths = [*lines.get(name, []), "", ""]
        used_s = max(time_s, changed_s["run"].get(f"{job}-{name}", 0))
        notes.append(JobNote(id=name, system=system, files=tuple(filter(None, paths)), used_s=used_s))
    return tuple(files), tuple(notes), float(clock[1])


def choose(
    files: Iterable[StoredFile],
    notes: Sequence[JobNote],
    waiting: Mapping[str, Collection[str] | str],
    before_s: float,
) -> Unused:
    """Return what nothing uses.

    Parameters
    ----------
    waiting : system -> ids of its jobs that have not ended; a text: why nobody knows, and each job may wait.
    before_s : what was used since then is in use.
    """
    used: set[str] = set()
    ended_jobs = []
    for note in notes:
        ids = waiting[note.system]
        if isinstance(ids, str) or note.id in ids or note.used_s >= before_s:
            used.update(note.files)
        else:
            ended_jobs.append(note.id)
    all_files = tuple(files)
    unused = [file for file in all_files if file.path not in used and file.used_s < before_s]
    unused.sort(key=lambda file: (file.used_s, file.path))
    return Unused(
        files=tuple(unused),
        used=len(all_files) - len(unused),
        ended_jobs=tuple(ended_jobs),
        before_s=before_s,
        unknown=tuple(reason for reason in waiting.values() if isinstance(reason, str)),
    )


def unfinished(connection: Connection, name: str) -> Collection[str] | str:
    """Return the ids of all jobs of a system that have not ended; a text: why nobody knows them.

    Parameters
    ----------
    name : as in `JobNote`.
    """
    name, _, cluster = name.partition(";")
    try:
        system = systems.named(name)
    except (UsageError, ToolFailed) as error:
        return error.what
    if not system.unfinished_ids:
        return f"{name} lists no jobs"
    argv = [word.format(cluster=cluster) for word in system.unfinished_ids if cluster or "{" not in word]
    result = jobs.finished(connection, argv)
    if result.returncode != 0:
        return f"{argv[0]} failed with exit code {result.returncode}: {result.tail()}"
    return frozenset(result.output.split())
