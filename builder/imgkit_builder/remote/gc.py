"""Find what nothing uses any more in a store, and remove it; whatever imgkit has not named stays.

A file is in use if it was written or chosen lately, if a job that has not ended names it, or if a run of late
used it. ``jobs/ID`` in the store, which the submission writes, says what a job names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.base import files
from imgkit_builder.job import systems
from imgkit_builder.job.quoting import is_job_id
from imgkit_builder.remote import jobs, store
from imgkit_builder.remote.connection import Connection, odd
from imgkit_entrypoints.errors import ToolFailed, UsageError

DAY_S = 86400
_MADE = r"([0-9a-f]{64}-[0-9a-f]{12}\.(sif|imgdelta)|code-[0-9a-f]{64}(-[0-9a-f]{12})?\.imgdelta)"
_PART = rf"{re.escape(files.TEMPORARY)}[0-9a-f]{{12}}\.{_MADE}\.part"
_PATH = re.compile(rf"({'|'.join(store.PLACES)})/({_MADE}|\.{_MADE}\.gone|{_PART}(\.gone)?)")
"""Names that imgkit gives: a whole file, a part of one, and one that a removal has put aside."""

_LIST = """\
cd -- "$folder" 2> /dev/null || { echo "clock $(date +%s)"; echo end; exit 0; }
echo "clock $(date +%s)"
for place in {places}; do
    if [ -d "$place" ]; then find "$place/" -maxdepth 1 -type f -printf 'file %T@ %s %p\\n'; fi
done
if [ -d runs ]; then find runs/ -mindepth 1 -maxdepth 1 -printf 'run %T@ %f\\n'; fi
if [ -d jobs ]; then
    find jobs/ -maxdepth 1 -type f -printf 'job %T@ %f\\n'
    find jobs/ -maxdepth 1 -type f -exec grep '' /dev/null {} + | sed 's/^/says /'
fi
echo end
""".replace("{places}", " ".join(store.PLACES))
# A file is put aside first: a submission that chooses it meanwhile either renews its time, or misses it and
# says so. In both cases no job waits for a file that is gone.
_REMOVE = """\
cd -- "$folder" || exit 1
while IFS= read -r file; do
    name=${file##*/}
    case $name in .*.gone) aside=$file ;; *) aside=${file%/*}/.${name#.}.gone ;; esac
    if [ "$aside" != "$file" ]; then mv -f -- "$file" "$aside" 2> /dev/null || continue; fi
    if [ -n "$(find "$aside" -newermt "@$before")" ]; then
        mv -f -- "$aside" "$file"
    elif rm -f -- "$aside"; then
        echo "removed $file"
    fi
done
for id; do rm -f -- "jobs/$id"; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file of imgkit's in a store."""

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

    files: tuple[KeptFile, ...]
    """Oldest first."""
    kept: int
    """Number of files in use."""
    ended: tuple[str, ...]
    """Ids of old jobs whose notes are needed no more."""
    before_s: float
    """What was used since then is in use."""
    unknown: tuple[str, ...]
    """Why the files of some jobs all count as in use; empty where the scheduler has answered."""


def find_unused(connection: Connection, days: int) -> Unused:
    """Everything that no run of the last `days` days used and no waiting or running job names.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot list its files.
    ToolFailed : its answer is cut short.
    """
    output = connection.run(_LIST, folder=connection.remote.folder)
    files, notes, clock_s = parse(output, connection.remote.name)
    waiting: dict[str, Collection[str] | None] = {}
    unknown = []
    for name in dict.fromkeys(note.system for note in notes):
        waiting[name], why = unfinished(connection, name)
        unknown += [why] if why else []
    return choose(files, notes, waiting, clock_s - days * DAY_S, tuple(unknown))


def remove(connection: Connection, unused: Unused) -> tuple[str, ...]:
    """Remove these files; the result are the paths of those that nothing has used meanwhile.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached; the same call resumes.
    """
    if not unused.files and not unused.ended:
        return ()
    names = "".join(f"{file.path}\n" for file in unused.files)
    values = {"folder": connection.remote.folder, "before": str(int(unused.before_s))}
    output = connection.answer(connection.stream(_REMOVE, values, words=unused.ended, data=[names.encode()]))
    rows = output.decode(errors="replace").splitlines()
    return tuple(row.removeprefix("removed ") for row in rows if row.startswith("removed "))


def parse(output: bytes, remote: str) -> tuple[tuple[KeptFile, ...], tuple[JobNote, ...], float]:
    """Files, notes of jobs and the clock of `remote` in its answer.

    Lines that imgkit does not know are left out.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    rows = output.decode(errors="replace").splitlines()
    clock = re.fullmatch(r"clock (\d{1,12})", rows[0]) if rows else None
    if clock is None or rows[-1] != "end":
        raise odd(remote, output)
    files: list[KeptFile] = []
    runs: dict[str, float] = {}
    times: dict[str, float] = {}
    said: dict[str, list[str]] = {}
    for row in rows[1:-1]:
        if found := re.fullmatch(r"file (\d{1,12})(?:\.\d*)? (\d{1,18}) (.+)", row):
            if _PATH.fullmatch(found[3]):
                files.append(KeptFile(path=found[3], size_bytes=int(found[2]), used_s=int(found[1])))
        elif found := re.fullmatch(r"(run|job) (\d{1,12})(?:\.\d*)? (.+)", row):
            (runs if found[1] == "run" else times)[found[3]] = int(found[2])
        elif found := re.fullmatch(r"says jobs/([^:]+):(.*)", row):
            said.setdefault(found[1], []).append(found[2])
    notes = []
    for name, time_s in times.items():
        if not is_job_id(name):
            continue
        system, job, *paths = [*said.get(name, []), "", ""]
        used_s = max(time_s, runs.get(f"{job}-{name}", 0))
        notes.append(JobNote(id=name, system=system, files=tuple(filter(None, paths)), used_s=used_s))
    return tuple(files), tuple(notes), float(clock[1])


def choose(
    files: Iterable[KeptFile],
    notes: Sequence[JobNote],
    waiting: Mapping[str, Collection[str] | None],
    before_s: float,
    unknown: tuple[str, ...] = (),
) -> Unused:
    """Choose what nothing uses.

    Parameters
    ----------
    waiting : system -> ids of its jobs that have not ended; None: nobody knows, and each job may wait.
    before_s : what was used since then is in use.
    unknown : why some of `waiting` are None.
    """
    used: set[str] = set()
    ended = []
    for note in notes:
        known = waiting.get(note.system)
        if known is None or note.id in known or note.used_s >= before_s:
            used.update(note.files)
        else:
            ended.append(note.id)
    free, kept = [], 0
    for file in files:
        if file.path in used or file.used_s >= before_s:
            kept += 1
        else:
            free.append(file)
    free.sort(key=lambda file: (file.used_s, file.path))
    return Unused(files=tuple(free), kept=kept, ended=tuple(ended), before_s=before_s, unknown=unknown)


def unfinished(connection: Connection, name: str) -> tuple[Collection[str] | None, str]:
    """Ids of all jobs of a system that have not ended; or None, and why nobody knows them.

    Parameters
    ----------
    name : as in `JobNote`.
    """
    name, _, cluster = name.partition(";")
    try:
        system = systems.named(name)
    except (UsageError, ToolFailed) as error:
        return None, error.what
    if not system.unfinished_ids:
        return None, f"{name} lists no jobs"
    words = (*system.unfinished_ids, *((f"{system.cluster_option}{cluster}",) if cluster else ()))
    done = jobs.finished(connection, words)
    if done.returncode != 0:
        return None, f"{words[0]} failed with exit code {done.returncode}: {done.tail()}"
    return frozenset(done.output.split()), ""
