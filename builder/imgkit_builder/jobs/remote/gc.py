"""Find the images and the folders of code and data that no job uses any more, and remove them from a store.

An image or a folder is in use in three cases. First, it was sent or chosen in the last days. Second, a job
that has not ended uses it. Third, a run that used it has changed its own files in the last days. The
submission of a job writes the file ``jobs/ID`` to the store (a `JobNote`), which lists the image, the code
and the data of the job. Files and folders with names that imgkit does not use are never removed.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.quoting import is_job_id
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote.connection import Connection, unreadable_answer
from imgkit_builder.jobs.remote.store import IMAGE_NAME, SIF, RemoteImage, UsedPaths
from imgkit_entrypoints.errors import ToolFailed, UsageError

DAY_S = 86400
# The name of a folder with an image, data or code. Folders with images and data have names of the same form.
_NAME = rf"(?:{IMAGE_NAME.pattern}|[0-9a-f]{{64}})"
_PATH = re.compile(rf"(images|code|data)/(\.incoming/)?({_NAME}|\.{_NAME}\.gone)")
"""The paths that imgkit uses for folders in a store.

``images/NAME`` is complete. ``images/.incoming/NAME`` is still being sent. ``images/.NAME.gone`` is a folder
that ``_REMOVE`` is about to remove.
"""

# The lines that the script `_LIST` prints, such as "folder 1764400000 805306368 1 images/NAME", "run
# 1764400000.5 NAME" and "note jobs/4711:slurm". For the file jobs/4711, it prints one line "note" for each
# line of the file.
_CLOCK = re.compile(r"clock (?P<time_s>\d{1,12})")
_FOLDER = re.compile(r"folder (?P<time_s>\d{1,12}) (?P<size_bytes>\d{1,18}) (?P<links>\d{1,9}) (?P<path>.+)")
_CHANGE = re.compile(r"(?P<kind>run|job) (?P<time_s>\d{1,12})(?:\.\d*)? (?P<name>.+)")
# "result JOB_ID EXIT_CODE FILE"
_SUCCESS = re.compile(r"result \S+ 0 runs/(?P<run>.+)/result")
_CHECKPOINT = re.compile(r"checkpoint runs/(?P<run>.+)/checkpoints/step-\d+")
_NOTE_LINE = re.compile(r"note jobs/(?P<id>[^:]+):(?P<text>.*)")


# The script that lists the store. The time of a folder is the newer one of two times: that of the folder and
# that of its .sif, because a submission renews only the time of the .sif. The size is the size on disk, and
# `links` is the number of hard links to the .sif.
_LIST = f"""\
cd -- "$folder" 2> /dev/null || {{ echo "clock $(date +%s)"; echo end; exit 0; }}
echo "clock $(date +%s)"
for path in images/* images/.*.gone images/.incoming/* images/.incoming/.*.gone \\
    code/* code/.*.gone code/.incoming/* code/.incoming/.*.gone \\
    data/* data/.*.gone data/.incoming/* data/.incoming/.*.gone; do
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
# The script that removes the folders in its standard input and the notes in its arguments. It renames a
# folder before it removes it, because a submission may choose the folder at the same time. If the submission
# has renewed the time of the folder before the rename, the folder gets its name back. Otherwise the
# submission does not find the folder, and fails with an error. In both cases, no job is in the queue whose
# files are gone.
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
    """An image, or a folder of code or data, in a store."""

    path: str
    """The path relative to imgkit's folder, in one of the forms of `_PATH`."""
    size_bytes: int
    used_s: float
    """Unix time of the last use, by the remote's clock."""
    is_linked: bool = False
    """Whether the .sif of the image has a second hard link, by which somebody wants to keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """A job that was submitted with imgkit, as the file ``jobs/ID`` in the store describes it."""

    id: str
    system: str
    """The system, or ``SYSTEM;CLUSTER`` if Slurm manages several clusters."""
    folders: tuple[str, ...]
    """Paths of the image, the code and the data that the job uses, as in `StoredFolder`."""
    used_s: float
    """Unix time of the job's submission, or of the last change in its run folder if that was later."""
    is_resumable: bool = False
    """Whether the job's run folder contains a checkpoint, and no result with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedJobs:
    """The jobs of a system that are waiting or running."""

    ids: frozenset[str] = frozenset()
    unknown_reason: str = ""
    """The reason why the ids are unknown, or "" if they are known.

    With a reason, any job may still be running.
    """

    def may_contain(self, job_id: str) -> bool:
        """Return whether the job is waiting or running, or may be."""
        return self.unknown_reason != "" or job_id in self.ids


UnfinishedBySystem = Mapping[str, UnfinishedJobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListing:
    """All folders and job notes of a store."""

    folders: tuple[StoredFolder, ...]
    notes: tuple[JobNote, ...]
    clock_s: float
    """Unix time by the remote's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """The folders and job notes that can be removed from a store."""

    folders: tuple[StoredFolder, ...]
    """The unused folders, the oldest first."""
    used: int = 0
    """Number of folders in use."""
    ended_jobs: tuple[str, ...] = ()
    """Ids of old jobs that have ended. Their notes are no longer needed."""
    before_s: float = 0
    """Unix time on the remote. A folder that was used at this time or later is in use."""
    unknown: tuple[str, ...] = ()
    """The reason for each system whose unfinished jobs are unknown.

    All folders of its jobs count as in use.
    """


def find_unused(connection: Connection, days: int) -> Unused:
    """Return the folders in the store that no unfinished job uses, and no run of the last `days` days.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot list its files.
    ToolFailed : the remote's answer is cut short.
    """
    # The schedulers are asked after the listing, so they report each job of the listing that has not ended.
    # The other order would take a job for ended that was submitted in between. For jobs that are submitted
    # later, `remove_unused` compares the times of the folders again.
    listing = _list_store(connection)
    unfinished = _unfinished_by_system(connection, listing)
    before_s = listing.clock_s - days * DAY_S
    return select_unused(listing, unfinished, before_s)


def find_superseded(
    connection: Connection, images: Sequence[RemoteImage], current: RemoteImage
) -> tuple[Unused, Mapping[str, RemoteImage]]:
    """Return the older images of a project that no job needs any more, after a new image was sent.

    The newest of the older images is always kept, so that the user can return to the previous version without
    a transfer. An image is also kept if a job that has not ended uses it, or a run that can be resumed. It is
    kept as well if its file has a second hard link, by which somebody wants to keep it.

    Parameters
    ----------
    images : the images in the store, the newest first.
    current : the image that the project uses now.

    Returns
    -------
    The folders that can be removed, and all images that were considered, by their paths in the store. The
    latter are the project's older images, except for the newest of them.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or cannot list its files.
    ToolFailed : the remote's answer is cut short.
    """
    # `images` is in order of age, so the first of these is the newest.
    older = [image for image in images if image.project == current.project and image.name != current.name]
    by_path = {f"images/{image.name}": image for image in older[1:]}  # without the newest one
    if not by_path:
        return Unused(folders=()), {}
    # In this order, for the reason that `find_unused` gives: no job of the listing may be taken for ended.
    listing = _list_store(connection)
    unfinished = _unfinished_by_system(connection, listing)
    needed_paths = _paths_of_jobs_to_run(listing, unfinished)
    folders = []
    for folder in listing.folders:
        is_needed = folder.is_linked or folder.path in needed_paths
        if folder.path in by_path and not is_needed:
            folders.append(folder)
    unused = Unused(
        folders=tuple(folders),
        used=len(by_path) - len(folders),
        before_s=listing.clock_s,  # a folder that a job uses from now on is kept
        unknown=_unknown_reasons(unfinished),
    )
    return unused, by_path


def _paths_of_jobs_to_run(listing: StoreListing, unfinished: UnfinishedBySystem) -> Collection[str]:
    """Return the paths of the folders that are used by jobs which may still run or can be resumed."""
    paths: set[str] = set()
    for note in listing.notes:
        if note.is_resumable or unfinished[note.system].may_contain(note.id):
            paths.update(note.folders)
    return paths


def remove_unused(connection: Connection, unused: Unused) -> tuple[str, ...]:
    """Remove the folders and job notes of `unused` from the store.

    A job note is the file ``jobs/ID``, which lists what a job uses. If a job has started to use a folder
    since `unused` was determined, the folder stays, because the script compares its time with
    ``unused.before_s`` again. If the connection is lost, call this function again with the same argument.

    Returns
    -------
    The paths of the folders that were removed.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or has no folder of imgkit.
    """
    if not unused.folders and not unused.ended_jobs:
        return ()
    script_variables = {"folder": connection.remote.folder, "before": str(int(unused.before_s))}
    # The script reads the paths of the folders from its standard input, and the job ids from its arguments.
    paths = [f"{folder.path}\n".encode() for folder in unused.folders]
    stream = connection.stream(_REMOVE, script_variables, args=unused.ended_jobs, data=paths)
    output = connection.answer(stream).decode(errors="replace")
    removed_paths = []
    for line in output.splitlines():
        if line.startswith("removed "):
            removed_paths.append(line.removeprefix("removed "))
    return tuple(removed_paths)


def _list_store(connection: Connection) -> StoreListing:
    """Return the folders and job notes (the files ``jobs/ID``) in the store, imgkit's folder on the remote.

    If the remote has no folder of imgkit, there are none.
    """
    output = connection.run(_LIST, {"folder": connection.remote.folder})
    return parse_listing(output, connection.remote.name)


def parse_listing(output: bytes, remote: str) -> StoreListing:
    """Return the folders and job notes from `output`, which the script `_LIST` prints.

    Lines of an unknown form are left out.

    Parameters
    ----------
    remote : the name of the remote, for the error.

    Raises
    ------
    ToolFailed : the output is cut short, or is not the output of imgkit's script.
    """
    lines = output.decode(errors="replace").splitlines()
    clock = _CLOCK.fullmatch(lines[0]) if lines else None
    # The first line is the clock and the last line is "end". Otherwise the output is incomplete.
    if clock is None or lines[-1] != "end":
        raise unreadable_answer(remote, output)
    return StoreListing(
        folders=_parse_folders(lines),
        notes=_parse_job_notes(lines),
        clock_s=float(clock["time_s"]),
    )


def _match_lines(pattern: re.Pattern[str], lines: Sequence[str]) -> Iterator[re.Match[str]]:
    """Yield a match for each line that `pattern` matches completely."""
    for line in lines:
        match = pattern.fullmatch(line)
        if match is not None:
            yield match


def _parse_folders(lines: Sequence[str]) -> tuple[StoredFolder, ...]:
    """Return the folders in the lines that the script `_LIST` prints.

    Folders with paths that imgkit does not use are left out.
    """
    folders = []
    for match in _match_lines(_FOLDER, lines):
        if not _PATH.fullmatch(match["path"]):
            continue
        folder = StoredFolder(
            path=match["path"],
            size_bytes=int(match["size_bytes"]),
            used_s=int(match["time_s"]),
            is_linked=int(match["links"]) > 1,
        )
        folders.append(folder)
    return tuple(folders)


def _parse_job_notes(lines: Sequence[str]) -> tuple[JobNote, ...]:
    """Return the job notes in the lines that the script `_LIST` prints.

    A job note says what a job uses. It combines the lines about a file in ``jobs`` with the lines about the
    job's folder in ``runs``, which does not exist before the job starts. A file whose name is not a job id is
    left out.
    """
    note_lines = collections.defaultdict[str, list[str]](list)  # by job id, the lines of the file in "jobs"
    for match in _match_lines(_NOTE_LINE, lines):
        note_lines[match["id"]].append(match["text"])
    run_times_s = _change_times_s("run", lines)
    # A run that has succeeded has nothing left to do, even if it has checkpoints.
    resumable_runs = _matching_runs(_CHECKPOINT, lines) - _matching_runs(_SUCCESS, lines)
    notes = []
    for job_id, submitted_s in _change_times_s("job", lines).items():
        if not is_job_id(job_id):
            continue
        used = UsedPaths.parse(note_lines[job_id])
        run_name = used.run_name(job_id)
        note = JobNote(
            id=job_id,
            system=used.system,
            folders=used.folders,
            used_s=max(submitted_s, run_times_s.get(run_name, 0)),  # 0: there is no run folder yet
            is_resumable=run_name in resumable_runs,
        )
        notes.append(note)
    return tuple(notes)


def _matching_runs(pattern: re.Pattern[str], lines: Sequence[str]) -> set[str]:
    """Return the names of the run folders in the lines that `pattern` matches.

    Parameters
    ----------
    pattern : `_CHECKPOINT` or `_SUCCESS`.
    """
    return {match["run"] for match in _match_lines(pattern, lines)}


def _change_times_s(kind: str, lines: Sequence[str]) -> dict[str, int]:
    """Return the Unix time of the last change, by name, of all folders in ``runs`` or all files in ``jobs``.

    Parameters
    ----------
    kind : ``run`` for the folders in ``runs``, or ``job`` for the files in ``jobs``.
    """
    times_s = {}
    for match in _match_lines(_CHANGE, lines):
        if match["kind"] == kind:
            times_s[match["name"]] = int(match["time_s"])
    return times_s


def select_unused(listing: StoreListing, unfinished: UnfinishedBySystem, before_s: float) -> Unused:
    """Return the folders and job notes of `listing` that are not in use.

    A job note is in use if its job may still run, or if the job has changed files recently. A folder is in
    use if such a job uses it, or if it was itself sent or chosen recently.

    Parameters
    ----------
    unfinished : the jobs that have not ended, for each system in `listing`.
    before_s : Unix time on the remote. "Recently" means at this time or later.
    """
    # The notes come first, because a folder is unused only if none of them uses it.
    used_paths: set[str] = set()
    ended_jobs = []
    for note in listing.notes:
        if unfinished[note.system].may_contain(note.id) or note.used_s >= before_s:
            used_paths.update(note.folders)
        else:
            ended_jobs.append(note.id)
    folders = []
    for folder in listing.folders:
        if folder.path not in used_paths and folder.used_s < before_s:
            folders.append(folder)
    # The oldest folder comes first. Folders of equal age are in the order of their paths.
    folders.sort(key=lambda folder: (folder.used_s, folder.path))
    return Unused(
        folders=tuple(folders),
        used=len(listing.folders) - len(folders),
        ended_jobs=tuple(ended_jobs),
        before_s=before_s,
        unknown=_unknown_reasons(unfinished),
    )


def _unknown_reasons(unfinished: UnfinishedBySystem) -> tuple[str, ...]:
    """Return the reason for each system whose unfinished jobs are unknown."""
    return tuple(jobs.unknown_reason for jobs in unfinished.values() if jobs.unknown_reason)


def _unfinished_by_system(connection: Connection, listing: StoreListing) -> UnfinishedBySystem:
    """Return the jobs that have not ended, for each system that occurs in a job note of `listing`."""
    unfinished: dict[str, UnfinishedJobs] = {}
    for note in listing.notes:
        if note.system not in unfinished:
            unfinished[note.system] = unfinished_jobs(connection, note.system)
    return unfinished


def unfinished_jobs(connection: Connection, name: str) -> UnfinishedJobs:
    """Return the jobs of a system that have not ended, or the reason why they are unknown.

    With such a reason, the caller takes every job of the system for unfinished, and keeps its files.

    Parameters
    ----------
    name : the system, such as ``slurm``, or ``SYSTEM;CLUSTER`` if Slurm manages several clusters.

    Raises
    ------
    Cut : the remote cannot be reached.
    """
    system_name, _, cluster = name.partition(";")
    try:
        system = systems.get_system(system_name)
    except (UsageError, ToolFailed) as error:
        return UnfinishedJobs(unknown_reason=error.what)
    if not system.queue.unfinished_ids:
        return UnfinishedJobs(unknown_reason=f"{system_name} lists no jobs")
    argv = _fill_in_cluster(system.queue.unfinished_ids, cluster)
    finished = remote_jobs.run_scheduler_command(connection, argv)
    if finished.returncode != 0:  # its output may lack jobs
        reason = f"{argv[0]} failed with exit code {finished.returncode}: {finished.tail()}"
        return UnfinishedJobs(unknown_reason=reason)
    return UnfinishedJobs(ids=frozenset(finished.output.split()))


def _fill_in_cluster(argv: Sequence[str], cluster: str) -> list[str]:
    """Return `argv` with the name of the cluster: ``--clusters={cluster}`` -> ``--clusters=gpu``.

    If `cluster` is empty, the site has only one cluster, and arguments with ``{cluster}`` are left out.
    """
    arguments = []
    for argument in argv:
        if cluster or "{cluster}" not in argument:
            arguments.append(argument.format(cluster=cluster))
    return arguments
