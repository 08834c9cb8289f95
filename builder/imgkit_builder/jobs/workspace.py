"""Bring today's code into a run's copy of its code when the run is resumed.

Files that the run has changed or made stay as they are.
Three versions of each file are compared: the one that was sent, today's, and that in the copy. A file of the
copy is as it was sent if it has the size and the time of the file in the store, because the times of code
follow from its content (`code_tree`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.jobs.job import RunScript
from imgkit_builder.jobs.request import CodeRecord, ResumedRun
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError
from imgkit_entrypoints.system import WORKSPACE

# Number of changed files that an error names, so that it stays readable.
_MAX_NAMES = 5
# The format of find's -printf. It prints two texts for each file: the path, and then the kind, size, time,
# mode and a link's target. For example: "./train.py" and "f 1024 1700000000.0000000000 644 ".
_FIELDS = "%p\\0%y %s %T@ %m %l\\0"

# Print the files of the code that was sent, of today's code and of the run's copy, each list after its title.
# The arguments are the run folder, the folder of all code in the store, and the digest of today's code, which
# may be empty. The file code.json names the code of which the copy was made. Of folders, only empty ones are
# listed, on which data is mounted. In the copy, only files that the code has are looked at, because a run can
# write any number of others.
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
# Copy files of today's code into the run's copy, and remove others from it. The arguments are the run folder,
# the folder of today's code, the size of the list of files to copy, and the new text of code.json. The list
# of files to copy is on standard input, followed by that of the files to remove. tar writes a new file for
# each, so that it has no inode in common with the store. An archive that is cut short stops the script.
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

# The values by which versions of a file are compared, as `_parse_version` returns them: ("f", SIZE, TIME,
# EXECUTABLE) for a file, ("l", TARGET) for a link, and ("d",) for an empty folder.
Version = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a run's copy and of the code in the store, each with its version, by their paths."""

    has_copy: bool
    """Whether the run has a copy. It has none if its job has not started."""
    sent: Mapping[str, Version]
    """The files of which the copy was made. It is empty if the store no longer has them."""
    today: Mapping[str, Version]
    """The files of today's code."""
    current: Mapping[str, Version]
    """The files of the copy, except those that neither `sent` nor `today` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The changes that bring today's code into a run's copy and keep what the run has changed."""

    copied: tuple[str, ...]
    """Files of today's code that are new or edited."""
    removed: tuple[str, ...]
    """Files that were sent and that today's code no longer has."""
    conflicts: tuple[str, ...]
    """Files that both the run and the user have changed, so that no update is possible."""


def parse_listing(output: bytes) -> Listing:
    """Return the three lists of files that the script `LIST` has printed, in `output`.

    The output consists of texts that end with a null byte. A list begins with its title and an empty text,
    and each of its files has two texts: the path, and the kind, size and time.

    Raises
    ------
    ToolFailed : the output is cut short.
    """
    texts = [os.fsdecode(text) for text in output.split(b"\0")]
    if texts[-3:] != ["end", "", ""]:
        raise ToolFailed("the list of the run's files is cut short", hint="run the command again")
    texts = texts[:-3]
    folders: dict[str, dict[str, Version]] = {"sent": {}, "today": {}, "current": {}}
    title = ""
    # Each file has two texts. The title of a list has an empty second one.
    for path, fields in zip(texts[::2], texts[1::2], strict=True):
        if fields:
            folders[title][path.removeprefix("./")] = _parse_version(fields)
        else:
            title = path
    return Listing(has_copy=title != "", **folders)


def _parse_version(fields: str) -> Version:
    """Return the version of a file from the second text of `_FIELDS`.

    ``f 1024 1700000000.5 755 `` -> ``("f", "1024", "1700000000.5", "True")``.
    """
    kind, size, time, mode, target = fields.split(" ", 4)
    if kind == "l":
        return (kind, target)
    if kind == "d":
        return (kind,)
    # The store has files that nobody may write. So of the mode, only this counts: may the owner execute it?
    is_executable = bool(int(mode, 8) & 0o100)
    return (kind, size, time, str(is_executable))


def plan_update(listing: Listing) -> Update:
    """Return the changes that bring today's code into the run's copy of its code.

    Each file has three versions: as it was sent, as it is in today's code, and as it is in the copy. A file
    is copied or removed only if the user has changed it since it was sent. If the run has changed the file
    too, it is a conflict; but if today's code no longer has it, the run's version stays.
    """
    copied = []
    removed = []
    conflicts = []
    for name in sorted({*listing.sent, *listing.today}):
        # None means that the file does not exist in this version of the code.
        sent = listing.sent.get(name)
        today = listing.today.get(name)
        current = listing.current.get(name)
        if today in (sent, current):  # the user has not changed the file, or the copy has the change already
            continue
        is_changed_by_run = current != sent
        if today is None and not is_changed_by_run:
            removed.append(name)
        elif today is not None and is_changed_by_run:
            conflicts.append(name)
        elif today is not None:
            copied.append(name)
    return Update(copied=tuple(copied), removed=tuple(removed), conflicts=tuple(conflicts))


def update_workspace(resumed: ResumedRun, store: Path, today: CodeRecord, run_script: RunScript) -> None:
    """Bring today's code into the run's copy. Files that the run has changed or made stay.

    Nothing is done if the run has no copy yet. The job's script then makes it from today's code.

    Parameters
    ----------
    store : the folder with all code, on the machine that has the run folder.
    today : today's code, which `store` has already.
    run_script : runs the scripts `LIST` and `_UPDATE` on that machine.

    Raises
    ------
    UsageError : the run has changed a file of which today's code has another version.
    CheckFailed : the store no longer has the code that was sent, so nobody knows what the run has changed.
    ToolFailed : the files cannot be listed or written.
    """
    run_folder = str(resumed.folder)
    hint = f"to go on with the run's code: imgkit resume {resumed.job} --same-code"
    listing = parse_listing(run_script(LIST, (run_folder, str(store), today.sha256), ()))
    if not listing.has_copy:
        return
    if not listing.sent:
        raise CheckFailed(
            "the code that the run was sent is no longer there, so its changes are not known",
            where=str(store),
            hint=hint,
        )
    update = plan_update(listing)
    if update.conflicts:
        shown_names = ", ".join(update.conflicts[:_MAX_NAMES])
        if len(update.conflicts) > _MAX_NAMES:
            shown_names += f" and {len(update.conflicts) - _MAX_NAMES} more"
        raise UsageError(
            f"the run has changed what today's code has in another version: {shown_names}",
            where=str(resumed.folder / WORKSPACE),
            hint=hint,
        )
    copied = _null_separated(update.copied)
    args = (run_folder, str(store / today.sha256), str(len(copied)), today.text)
    run_script(_UPDATE, args, (copied, _null_separated(update.removed)))


def _null_separated(names: Iterable[str]) -> bytes:
    """Return a list of files for tar and xargs: ``["a.py", "b.py"]`` -> ``./a.py``, null byte, and so on.

    ``./`` keeps a name that begins with "-" from being read as an option.
    """
    return b"".join(os.fsencode(f"./{name}\0") for name in names)
