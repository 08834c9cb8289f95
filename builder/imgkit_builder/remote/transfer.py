"""Send a file or a folder into the store with rsync, complete or not at all, through connections that break.

It arrives in ``.incoming`` beside its target, where a later attempt goes on with what is there, and gets its
name by one rename: a file when its sha256 is that of the local file, a folder when rsync has compared all of
it. Two attempts at once write the same bytes to the same places, so neither harms the other.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.remote import rsync
from imgkit_builder.remote.connection import Connection, Cut, ScriptFailed, unreadable
from imgkit_builder.remote.store import free_bytes
from imgkit_entrypoints.errors import CheckFailed

ATTEMPTS = 4
"""Attempts in a row that bring nothing before the transfer gives up."""
_WAIT_S = 60
"""Longest time for which a new attempt waits until the earlier one has ended on the remote."""
_FULL_DISK = re.compile(r"(No space left on device|Disk quota exceeded) \(\d+\)")
"""The text and number of the system's error, as rsync prints them: ``mkstemp "..." failed: TEXT (28)``."""

# When a connection is lost, rsync there moves what it has into the folder for partial files: at once, or at
# its time limit.
_PREPARE = """\
umask 077
cd -- "$home" && mkdir -p -- "$folder/.incoming" || exit 1
for second in $wait; do
    [ -n "$(find "$folder/.incoming" -maxdepth 1 -name ".$name.*" -mmin -1)" ] || break
    sleep 1
done
# rsync goes on in the part of a file, which its mode may forbid: code is read-only.
find "$folder/.incoming/$name" "$folder/.incoming/$partial/$name" -type f -path "*/$partial/*" \
    -exec chmod u+w {} + 2> /dev/null
echo "disk $(df -Pk "$folder" | tail -n 1)"
kib=0
for path in "$folder/.incoming/$name" "$folder/.incoming/$partial/$name"; do
    set -- $(du -sk "$path" 2> /dev/null)
    kib=$((kib + ${1:-0}))
done
echo "arrived $((kib * 1024))"
"""
# Another transfer of the same content may do the rename at any moment.
_PUBLISH = """\
cd -- "$home/$folder" || exit 1
if [ -d ".incoming/$name" ]; then
    find ".incoming/$name" -name "$partial" -prune -exec rm -rf {} +
elif [ -f ".incoming/$name" ]; then
    set -- $(sha256sum < ".incoming/$name")
    if [ "$1" != "$sum" ]; then rm -f -- ".incoming/$name" && echo different; exit; fi
fi
touch -c -- ".incoming/$name"
mv -T -f -- ".incoming/$name" "$name" 2> /dev/null
if [ -e "$name" ]; then echo published; else echo "$name cannot be made" >&2; exit 1; fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file or a folder to send."""

    path: Path
    label: str
    """What messages call it."""
    size_bytes: int
    similar: Sequence[str] = ()
    """Names of folders beside the target, whose equal files are linked there and not sent."""


def upload(connection: Connection, source: Source, *, home: str, target: str, report: Reporter) -> str:
    """Make `source` appear as `target`, ``FOLDER/NAME``, in the folder `home` of the remote.

    Returns
    -------
    What was sent, as `rsync.run` says it.

    Raises
    ------
    Cut : the connection was lost too often; the same call resumes later.
    ToolMissing : there is no rsync, here or there.
    CheckFailed : the disk there is too full, or the file changed while it was sent.
    ScriptFailed : a command there failed.
    """
    folder, _, name = target.rpartition("/")
    values = {"home": home, "folder": folder, "name": name, "partial": rsync.PARTIAL}
    remote = connection.remote.name
    failures, reached_bytes = 0, -1
    while True:
        try:
            arrived_bytes = _prepare(connection, values, source, is_retry=failures > 0)
            failures = 0 if arrived_bytes > reached_bytes else failures
            reached_bytes = max(reached_bytes, arrived_bytes)
            if arrived_bytes:
                report.note(f"{size_text(arrived_bytes)} of {size_text(source.size_bytes)} were sent before")
            report.stage(f"send the {source.label} to {remote}")
            sent = _send(connection, values, source, report)
            report.stage(f"check the {source.label} on {remote}")
            digest = _sha256(source) if source.path.is_file() else ""
            answer = connection.run(_PUBLISH, {**values, "sum": digest}, by_transfer=True)
        except Cut as error:
            failures += 1
            if reached_bytes < 0 or failures >= ATTEMPTS:
                resumes = "; the same command resumes the transfer" if reached_bytes > 0 else ""
                raise Cut(error.what, where=error.where, hint=f"{error.hint}{resumes}") from error
            report.note(f"the connection was lost, and imgkit connects again: {error.what}")
            time.sleep(failures - 1)
            continue
        if answer == b"published\n":
            return sent
        if answer != b"different\n":
            raise unreadable(remote, answer)
        raise CheckFailed(
            f"what arrived on {remote} differs from the {source.label} here",
            where=str(source.path),
            hint=f"if no program writes to it: imgkit verify {source.path}",
        )


def _sha256(source: Source) -> str:
    with files.open_regular(source.path, buffering=0) as stream:
        return files.sha256(stream, 0, source.path.stat().st_size)


def _prepare(connection: Connection, values: Mapping[str, str], source: Source, *, is_retry: bool) -> int:
    """Return how many bytes have arrived there, if the rest fits."""
    wait = " ".join(map(str, range(_WAIT_S))) if is_retry else ""
    output = connection.run(_PREPARE, {**values, "wait": wait}, by_transfer=True)
    answer = re.fullmatch(rb"disk (.*)\narrived (\d{1,15})\n", output)
    if answer is None:
        raise unreadable(connection.remote.name, output)
    arrived_bytes = min(int(answer[2]), source.size_bytes)
    free = free_bytes(answer[1].decode(errors="replace"))
    if free is not None and free < source.size_bytes - arrived_bytes:
        raise CheckFailed(
            f"{size_text(source.size_bytes)} to send to {connection.remote.name}, but {size_text(free)} free",
            where=values["home"],
            hint="remove what you do not need there, or choose another folder: imgkit remote add NAME "
            f"USER@HOST:/PATH --replace (to send: {source.path})",
        )
    return arrived_bytes


def _send(connection: Connection, values: Mapping[str, str], source: Source, report: Reporter) -> str:
    folder, name = f"{values['home']}/{values['folder']}", values["name"]
    # Not -a: as root it would give the files to a user id of this machine.
    bytes_per_s = connection.max_bytes_per_s
    limit = (f"--bwlimit={max(1, round(bytes_per_s / 1024))}",) if bytes_per_s else ()
    with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
        if source.path.is_dir():
            # Absolute: with ".." in the path, rsync 3.2.7-1+deb12u5 and 3.4.3 cannot open a file there as the
            # basis of an edited one (github.com/RsyncProject/rsync/issues/928).
            links = (f"--link-dest={rsync.FOLDER}/{similar}" for similar in source.similar)
            target = f"remote:.incoming/{name}/"
            args = ("--links", "--checksum", *links, f"{source.path.absolute()}/", target)
        else:
            # Old versions take only a folder as their destination: here the file has its name there. What an
            # earlier attempt left is compared, whatever its time.
            Path(work, name).symlink_to(source.path.absolute())
            args = ("--copy-links", "--ignore-times", f"{work}/{name}", "remote:.incoming/")
        try:
            return rsync.run(connection, folder, ("-rpt", *limit, *args), report, source.size_bytes)
        except ScriptFailed as error:
            if _FULL_DISK.search(error.output):
                message = f"the disk of {connection.remote.name} is full"
                raise CheckFailed(message, where=folder, hint=error.hint) from error
            raise
