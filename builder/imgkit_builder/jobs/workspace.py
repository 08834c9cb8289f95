"""Bring today's code into a run's copy of the code when the run is resumed.

Today's code is the user's code as it is now. Files that the run has changed or created stay as they are. For
that, three versions of each file are compared: the version that was sent, today's version, and the version in
the run's copy. A file of the copy is unchanged if it has the size and the time of the file in the store. The
time is reliable because it follows from the content of the file (`code_tree`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.jobs.job import RunScript
from imgkit_builder.jobs.request import CodeRecord, ResumedRun
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError, join_names
from imgkit_entrypoints.system import WORKSPACE

# Number of changed files that an error names, so that it stays readable.
_MAX_NAMES = 5
# The format of find's -printf. For each file, it prints two texts: the path, and then the kind, size, time,
# mode and link target. For example: "./train.py" and "f 1024 1700000000.0000000000 644 ".
_FIELDS = "%p\\0%y %s %T@ %m %l\\0"

# This script prints three lists of files, each after its title: the code that was sent, today's code, and the
# run's copy. Its arguments are the run folder, the folder with all versions of the code, and the digest of
# today's code, which may be empty. The file code.json names the version of which the copy was made. Folders
# are listed only if they are empty, because data may be mounted there. From the copy, only files that are
# also in the code are listed, because a run can create any number of other files.
LIST = f"""\
cd -- "$1/workspace" 2> /dev/null || {{ printf 'end\\0\\0'; exit 0; }}
sent=$(sed -n 's/.*"sha256": "\\([0-9a-f]\\{{64\\}}\\)".*/\\1/p' ../code.json 2> /dev/null)
list_code() {{
    cd -- "$2/workspace" 2> /dev/null || return 0
    printf '%s\\0\\0' "$1"
    find . -mindepth 1 \\( ! -type d -o -empty \\) -printf '{_FIELDS}'
}}
list_names() {{
    if cd -- "$1/workspace" 2> /dev/null; then find . -mindepth 1 \\( ! -type d -o -empty \\) -print0; fi
}}
(list_code sent "$2/$sent")
if [ -n "$3" ]; then (list_code today "$2/$3"); fi
printf 'current\\0\\0'
for digest in "$sent" $3; do (list_names "$2/$digest"); done |
    xargs -0 -r sh -c 'find "$@" -maxdepth 0 -printf "{_FIELDS}"' sh 2> /dev/null
printf 'end\\0\\0'
"""
# This script copies files of today's code into the run's copy, and removes other files from the copy. Its
# arguments are the run folder, the folder of today's code, the size of the list of files to copy, and the new
# text of code.json. Its standard input is the list of files to copy, followed by the list of files to remove.
# tar creates a new file for each copied file, so that no file shares an inode with the store. If the archive
# is cut short, the script stops.
_UPDATE = """\
set -e
archive=$1/.imgkit-update.tar
trap 'rm -f -- "$archive"' EXIT
cd -- "$2/workspace"
head -c "$3" | tar --null --no-recursion --mode=u+w -cf "$archive" --files-from=-
cd -- "$1/workspace"
tar --no-same-owner -xf "$archive"
xargs -0 -r sh -c '
    for name; do
        rm -f -- "$name" 2> /dev/null || rmdir --ignore-fail-on-non-empty -- "$name" || exit 1
    done' sh
printf '%s\\n' "$4" > ../code.json
"""

# The values by which two versions of a file are compared, as `_parse_version` returns them. For a file, they
# are ("f", SIZE, TIME, EXECUTABLE), for a link ("l", TARGET), and for an empty folder ("d",).
Version = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of the code and of a run's copy, by path.

    Each file has the values by which it is compared.
    """

    has_copy: bool
    """Whether the run has a copy of the code. If its job has not started, it has none."""
    sent: Mapping[str, Version]
    """The files that were sent and of which the copy was made.

    It is empty if the store no longer has them.
    """
    today: Mapping[str, Version]
    """The files of today's code."""
    current: Mapping[str, Version]
    """The files of the run's copy, except for those that are neither in `sent` nor in `today`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The changes that bring today's code into a run's copy, and that keep what the run has changed."""

    copied: tuple[str, ...]
    """Files of today's code that the user has created or edited since the code was sent."""
    removed: tuple[str, ...]
    """Files that were sent, but that today's code no longer contains."""
    conflicts: tuple[str, ...]
    """Files that both the run and the user have changed, so that no update is possible."""


def parse_listing(output: bytes) -> Listing:
    """Parse the output of the script `LIST`, which prints three lists of files.

    The output consists of texts that end with a null byte. Each list begins with its title and an empty text.
    Each file in a list has two texts: the path, and the fields such as kind, size and time.

    Raises
    ------
    ToolFailed : the output is cut short.
    """
    texts = [os.fsdecode(text) for text in output.split(b"\0")]
    if texts[-3:] != ["end", "", ""]:
        raise ToolFailed("the list of the run's files is cut short", hint="run the command again")
    # Drop the end marker: "end", an empty text, and the rest after the last null byte.
    texts = texts[:-3]
    # The code as it was sent, the user's code of today, and the run's copy.
    lists: dict[str, dict[str, Version]] = {"sent": {}, "today": {}, "current": {}}
    list_name = ""  # stays empty without a copy, because the script then prints only the end
    # The texts come in pairs. A pair whose second text is empty begins a new list.
    for path, fields in zip(texts[::2], texts[1::2], strict=True):
        if fields:
            lists[list_name][path.removeprefix("./")] = _parse_version(fields)
        else:
            list_name = path
    return Listing(has_copy=list_name != "", **lists)


def _parse_version(fields: str) -> Version:
    """Return the values by which two versions of a file are compared.

    ``f 1024 1700000000.5 755 `` -> ``("f", "1024", "1700000000.5", "True")``.

    Parameters
    ----------
    fields : the second text that `LIST` prints for a file: its kind, size, time, mode and link target.
    """
    kind, size, time, mode, target = fields.split(" ", 4)
    if kind == "l":
        return (kind, target)
    if kind == "d":
        return (kind,)
    # Files in the store are read-only, and files in the copy are not. So only the executable bit of the owner
    # is compared, and not the whole mode.
    is_executable = bool(int(mode, 8) & 0o100)
    return (kind, size, time, str(is_executable))


def plan_update(listing: Listing) -> Update:
    """Return the changes that bring today's code (the user's current files) into the run's copy.

    A file is copied or removed only if the user has changed it since it was sent. If the run has changed the
    same file too, the file is a conflict. There is one exception: if the user has removed a file that the run
    has changed, the run's version stays and there is no conflict.
    """
    copied = []
    removed = []
    conflicts = []
    for name in sorted({*listing.sent, *listing.today}):
        # None means that the file does not exist in this version of the code.
        sent = listing.sent.get(name)
        today = listing.today.get(name)
        current = listing.current.get(name)
        if today in (sent, current):  # the user has not changed the file, or the copy already has the change
            continue
        is_changed_by_run = current != sent
        # No branch below handles a file that the user has removed and the run has changed, because it stays.
        if today is None and not is_changed_by_run:
            removed.append(name)
        elif today is not None and is_changed_by_run:
            conflicts.append(name)
        elif today is not None:
            copied.append(name)
    return Update(copied=tuple(copied), removed=tuple(removed), conflicts=tuple(conflicts))


def update_workspace(resumed: ResumedRun, store: Path, today: CodeRecord, run_script: RunScript) -> None:
    """Bring today's code into the run's copy. Files that the run has changed or created stay.

    If the run has no copy yet, nothing is done, because the job's script then creates the copy from today's
    code.

    Parameters
    ----------
    store : the folder with all versions of the code, on the machine that has the run folder.
    today : the user's code as it is now, which `store` already contains.
    run_script : runs the scripts `LIST` and `_UPDATE` on that machine.

    Raises
    ------
    UsageError : both the run and the user have changed a file.
    CheckFailed : the store no longer has the code that was sent, so the changes of the run are unknown.
    ToolFailed : the files cannot be listed or written.
    """
    run_folder = str(resumed.folder)
    hint = f"to go on with the run's code: imgkit resume {resumed.job} --same-code"
    listing = parse_listing(run_script(LIST, (run_folder, str(store), today.sha256), ()))
    if not listing.has_copy:  # the job has not started, so nothing has to be updated
        return
    if not listing.sent:
        raise CheckFailed(
            "the code that the run was sent is no longer there, so its changes are not known",
            where=str(store),
            hint=hint,
        )
    update = plan_update(listing)
    if update.conflicts:
        shown_names = join_names(update.conflicts, _MAX_NAMES)
        raise UsageError(
            f"the run has changed what today's code has in another version: {shown_names}",
            where=str(resumed.folder / WORKSPACE),
            hint=hint,
        )
    copied_names = _null_separated(update.copied)
    # The script reads both lists from one input, so it needs the length of the first list.
    args = (run_folder, str(store / today.sha256), str(len(copied_names)), today.text)
    run_script(_UPDATE, args, (copied_names, _null_separated(update.removed)))


def _null_separated(names: Iterable[str]) -> bytes:
    """Return a list of files in the form that tar and xargs read: ``["a.py"]`` -> ``b"./a.py\\0"``.

    The prefix ``./`` keeps a name that begins with "-" from being read as an option.
    """
    return b"".join(os.fsencode(f"./{name}\0") for name in names)
