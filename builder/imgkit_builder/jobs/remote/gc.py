"""Find what nothing uses any more in a store, and remove it; whatever imgkit has not named stays.

An image or a folder of code is in use if it was sent or chosen lately, if a job that has not ended names it,
or if a run of late used it. ``jobs/ID`` in the store, which the submission writes, says what a job names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.quoting import is_job_id
from imgkit_builder.jobs.remote import jobs
from imgkit_builder.jobs.remote.connection import Connection, unreadable
from imgkit_builder.jobs.remote.store import IMAGE_NAME, SIF, RemoteImage
from imgkit_entrypoints.errors import ToolFailed, UsageError

DAY_S = 86400
_NAME = rf"(?:{IMAGE_NAME.pattern}|[0-9a-f]{{64}})"
# A complete folder, one that a removal has put aside, and one that arrives.
_PATH = re.compile(rf"(images|code)/(\.incoming/)?({_NAME}|\.{_NAME}\.gone)")
"""Names that imgkit gives to folders in a store."""

# The time of an image's .sif counts as well as that of its folder: a submission renews it.
_LIST = f"""\
cd -- "$folder" 2> /dev/null || {{ echo "clock $(date +%s)"; echo end; exit 0; }}
echo "clock $(date +%s)"
for path in images/* images/.*.gone images/.incoming/* images/.incoming/.*.gone \\
    code/* code/.*.gone code/.incoming/* code/.incoming/.*.gone; do
    if [ -d "$path" ] && [ ! -L "$path" ]; then
        times=$(find "$path" -maxdepth 1 \\( -path "$path" -o -name {SIF} \\) -printf '%T@\\n')
        time=$(printf '%s\\n' "$times" | sort -n | tail -n 1)
        links=$(find "$path" -maxdepth 1 -name {SIF} -printf %n)
        echo "folder ${{time%%.*}} $(($(du -sk "$path" | cut -f 1) * 1024)) ${{links:-1}} $path"
    fi
done
if [ -d runs ]; then
    find runs/ -mindepth 1 -maxdepth 1 -printf 'run %T@ %f\\n'
    for file in runs/*/result; do
        if [ -f "$file" ]; then echo "result $(tail -n 1 "$file" | head -c 200) $file"; fi
    done
    for checkpoint in runs/*/checkpoints/step-*; do
        if [ -d "$checkpoint" ]; then echo "checkpoint $checkpoint"; fi
    done
fi
if [ -d jobs ]; then
    find jobs/ -maxdepth 1 -type f -printf 'job %T@ %f\\n'
    find jobs/ -maxdepth 1 -type f -exec grep '' /dev/null {{}} + | sed 's/^/note /'
fi
echo end
"""
# A folder is put aside first: a submission that chooses it meanwhile either renews its time, or misses it and
# says so. In both cases no job waits for a file that is gone.
_REMOVE = f"""\
cd -- "$folder" || exit 1
while IFS= read -r path; do
    name=${{path##*/}}
    case $name in .*.gone) aside=$path ;; *) aside=${{path%/*}}/.$name.gone ;; esac
    if [ "$aside" != "$path" ]; then mv -T -f -- "$path" "$aside" 2> /dev/null || continue; fi
    if [ -n "$(find "$aside" -maxdepth 1 \\( -path "$aside" -o -name {SIF} \\) -newermt "@$before")" ]; then
        mv -T -f -- "$aside" "$path"
    elif rm -rf -- "$aside"; then
        echo "removed $path"
    fi
done
for id; do rm -f -- "jobs/$id"; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFolder:
    """An image or a folder of code in a store."""

    path: str
    """Relative to the remote's folder."""
    size_bytes: int
    used_s: float
    """Time at which it was last used, by the remote's clock."""
    is_linked: bool = False
    """Whether the image's file has another name, which somebody gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """What the store knows of a job."""

    id: str
    system: str
    """The system, or ``SYSTEM;CLUSTER``."""
    folders: tuple[str, ...]
    """Paths of the image and of the code that the job uses, as in `StoredFolder`."""
    used_s: float
    """Time of its submission, or of the last change in its run folder."""
    is_resumable: bool = False
    """Whether its run folder has a checkpoint, and no word that the program ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListing:
    """All that is in a store."""

    folders: tuple[StoredFolder, ...]
    notes: tuple[JobNote, ...]
    clock_s: float
    """The time there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """What a store could lose."""

    folders: tuple[StoredFolder, ...]
    """Oldest first."""
    used: int
    """Number of folders in use."""
    ended_jobs: tuple[str, ...]
    """Ids of old jobs whose notes are needed no more."""
    before_s: float
    """What was used since then is in use."""
    unknown: tuple[str, ...]
    """Why the folders of some jobs all count as in use; empty where the scheduler has answered."""


def find_unused(connection: Connection, days: int) -> Unused:
    """Return everything that no run of the last `days` days used and no waiting or running job names.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot list its files.
    ToolFailed : its answer is cut short.
    """
    listing = _list(connection)
    return choose(listing, _waiting_jobs(connection, listing), listing.clock_s - days * DAY_S)


def find_superseded(
    connection: Connection, images: Sequence[RemoteImage], current: RemoteImage
) -> tuple[Unused, Mapping[str, RemoteImage]]:
    """Return the older images of the project of `current` that nobody needs, and all older ones by their
    paths.

    The newest of them stays, so that a step back sends nothing. An image stays as well if a job that has not
    ended or a run that can be resumed uses it, or if its file has another name.

    Parameters
    ----------
    images : those in the store, the newest first.

    Raises
    ------
    As of `find_unused`.
    """
    older = [image for image in images if image.project == current.project and image.name != current.name]
    by_path = {f"images/{image.name}": image for image in older[1:]}
    if not by_path:
        return Unused(folders=(), used=0, ended_jobs=(), before_s=0, unknown=()), {}
    listing = _list(connection)
    waiting = _waiting_jobs(connection, listing)
    needed: set[str] = set()
    for note in listing.notes:
        if note.is_resumable or _may_run(note, waiting):
            needed.update(note.folders)
    folders = tuple(
        folder
        for folder in listing.folders
        if folder.path in by_path and folder.path not in needed and not folder.is_linked
    )
    unused = Unused(
        folders=folders,
        used=len(by_path) - len(folders),
        ended_jobs=(),
        before_s=listing.clock_s,
        unknown=_reasons(waiting),
    )
    return unused, by_path


def remove(connection: Connection, unused: Unused) -> tuple[str, ...]:
    """Remove these folders; return the paths of those that nothing has used meanwhile.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached; the same call resumes.
    """
    if not unused.folders and not unused.ended_jobs:
        return ()
    names = "".join(f"{folder.path}\n" for folder in unused.folders)
    values = {"folder": connection.remote.folder, "before": str(int(unused.before_s))}
    output = connection.answer(
        connection.stream(_REMOVE, values, args=unused.ended_jobs, data=[names.encode()])
    )
    rows = output.decode(errors="replace").splitlines()
    return tuple(row.removeprefix("removed ") for row in rows if row.startswith("removed "))


def _list(connection: Connection) -> StoreListing:
    return parse(connection.run(_LIST, {"folder": connection.remote.folder}), connection.remote.name)


def parse(output: bytes, remote: str) -> StoreListing:
    """Return what the answer of `remote` says about its store; lines that imgkit does not know are left out.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    rows = output.decode(errors="replace").splitlines()
    clock = re.fullmatch(r"clock (\d{1,12})", rows[0]) if rows else None
    if clock is None or rows[-1] != "end":
        raise unreadable(remote, output)
    folders: list[StoredFolder] = []
    changed_s: dict[str, dict[str, float]] = {"run": {}, "job": {}}
    lines: dict[str, list[str]] = {}
    ended_well: set[str] = set()
    saved: set[str] = set()
    for row in rows[1:-1]:
        if match := re.fullmatch(r"folder (\d{1,12}) (\d{1,18}) (\d{1,9}) (.+)", row):
            if _PATH.fullmatch(match[4]):
                folder = StoredFolder(
                    path=match[4],
                    size_bytes=int(match[2]),
                    used_s=int(match[1]),
                    is_linked=int(match[3]) > 1,
                )
                folders.append(folder)
        elif match := re.fullmatch(r"(run|job) (\d{1,12})(?:\.\d*)? (.+)", row):
            changed_s[match[1]][match[3]] = int(match[2])
        elif match := re.fullmatch(r"result \S+ 0 runs/(.+)/result", row):
            ended_well.add(match[1])
        elif match := re.fullmatch(r"checkpoint runs/(.+)/checkpoints/step-\d+", row):
            saved.add(match[1])
        elif match := re.fullmatch(r"note jobs/([^:]+):(.*)", row):
            lines.setdefault(match[1], []).append(match[2])
    notes = []
    for name, time_s in changed_s["job"].items():
        if not is_job_id(name):
            continue
        system, job, *paths = [*lines.get(name, []), "", ""]
        run = f"{job}-{name}"
        note = JobNote(
            id=name,
            system=system,
            folders=tuple(path.removesuffix(f"/{SIF}") for path in paths if path),
            used_s=max(time_s, changed_s["run"].get(run, 0)),
            is_resumable=run in saved and run not in ended_well,
        )
        notes.append(note)
    return StoreListing(folders=tuple(folders), notes=tuple(notes), clock_s=float(clock[1]))


def choose(listing: StoreListing, waiting: Mapping[str, Collection[str] | str], before_s: float) -> Unused:
    """Return what nothing uses.

    Parameters
    ----------
    waiting : system -> ids of its jobs that have not ended; a text: why nobody knows, and each job may wait.
    before_s : what was used since then is in use.
    """
    used: set[str] = set()
    ended_jobs = []
    for note in listing.notes:
        if _may_run(note, waiting) or note.used_s >= before_s:
            used.update(note.folders)
        else:
            ended_jobs.append(note.id)
    unused = [folder for folder in listing.folders if folder.path not in used and folder.used_s < before_s]
    unused.sort(key=lambda folder: (folder.used_s, folder.path))
    return Unused(
        folders=tuple(unused),
        used=len(listing.folders) - len(unused),
        ended_jobs=tuple(ended_jobs),
        before_s=before_s,
        unknown=_reasons(waiting),
    )


def _may_run(note: JobNote, waiting: Mapping[str, Collection[str] | str]) -> bool:
    """Return whether the job has not ended, or nobody knows."""
    ids = waiting[note.system]
    return isinstance(ids, str) or note.id in ids


def _reasons(waiting: Mapping[str, Collection[str] | str]) -> tuple[str, ...]:
    """Return why nobody knows the waiting jobs of some systems."""
    return tuple(reason for reason in waiting.values() if isinstance(reason, str))


def _waiting_jobs(connection: Connection, listing: StoreListing) -> Mapping[str, Collection[str] | str]:
    """Return `unfinished` of each system that a job of the listing names."""
    names = dict.fromkeys(note.system for note in listing.notes)
    return {name: unfinished(connection, name) for name in names}


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
    if not system.queue.unfinished_ids:
        return f"{name} lists no jobs"
    argv = [
        word.format(cluster=cluster) for word in system.queue.unfinished_ids if cluster or "{" not in word
    ]
    result = jobs.finished(connection, argv)
    if result.returncode != 0:
        return f"{argv[0]} failed with exit code {result.returncode}: {result.tail()}"
    return frozenset(result.output.split())
