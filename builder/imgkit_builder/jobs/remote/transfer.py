"""Send a folder into the store with rsync, complete or not at all, through connections that break.

It arrives in ``.incoming`` beside its target, where a later attempt goes on with what is there, and gets its
name by one rename when all of it has been compared. Two attempts at once write the same bytes to the same
places, so neither harms the other.

An older image on the remote is the basis of a new one: rsync sends only the blocks that the basis lacks.
Tried with rsync 3.2.7:

* It looks for the basis under the same file name, in the folder that ``--copy-dest`` names.
* That folder must be an absolute path. 3.2.7 and 3.4.3 of Debian fail with a relative one that holds ``..``.
* What arrived of a file before the connection broke replaces the basis, and all the rest would be sent. So
  the rest of the basis is put behind it before the next attempt.
* Without ``--ignore-times``, a basis of the same size and time would be taken for the file itself.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.jobs.remote import rsync
from imgkit_builder.jobs.remote.connection import Connection, Cut, ScriptFailed, unreadable
from imgkit_builder.jobs.remote.rsync import Transferred
from imgkit_builder.jobs.remote.store import NOTE, SIF, RemoteImage, free_bytes
from imgkit_entrypoints.errors import CheckFailed

ATTEMPTS = 4
"""Attempts in a row that bring nothing before the transfer gives up."""
_WAIT_S = 60
"""Longest time for which a new attempt waits until the earlier one has ended on the remote."""
_FULL_DISK = re.compile(r"(No space left on device|Disk quota exceeded) \(\d+\)")
"""The text and number of the system's error, as rsync prints them: ``mkstemp "..." failed: TEXT (28)``."""

# When a connection is lost, rsync there moves what it has into the folder for partial files: at once, or at
# its time limit. Where it was killed, its temporary file stays beside that folder. The file `joined` holds
# the size of a partial image before the rest of the basis was put behind it, and after.
_PREPARE = f"""\
umask 077
cd -- "$home" || exit 1
arrived=0
if [ -d "$folder/.incoming/$name" ]; then
    arrived=$(($(du -sk "$folder/.incoming/$name" | cut -f 1) * 1024))
fi
mkdir -p -- "$folder/.incoming/$name" && cd -- "$folder/.incoming/$name" || exit 1
for second in $wait; do
    [ -n "$(find . -maxdepth 1 -name ".{SIF}.*" -mmin -1)" ] || break
    sleep 1
done
# rsync goes on in the part of a file, which its mode may forbid: code is read-only.
find . -type f -path "*/$partial/*" -exec chmod u+w {{}} + 2> /dev/null
for file in .{SIF}.*; do
    if [ -f "$file" ]; then mkdir -p "$partial" && mv -f -- "$file" "$partial/{SIF}"; fi
done
echo "disk $(df -Pk . | tail -n 1)"
if [ -f "$partial/{SIF}" ]; then
    arrived=$(wc -c < "$partial/{SIF}")
    read -r before after 2> /dev/null < "$partial/joined"
    if [ "$after" = "$((arrived))" ]; then arrived=$before; fi
fi
echo "arrived $((arrived))"
"""
_JOIN = f"""\
cd -- "$home/$folder/.incoming/$name/$partial" 2> /dev/null && [ -f {SIF} ] || exit 0
basis_file=$home/$folder/$basis/{SIF}
before=$(wc -c < {SIF}) && after=$(wc -c < "$basis_file") || exit 1
if [ "$before" -lt "$after" ]; then
    tail -c "+$((before + 1))" -- "$basis_file" >> {SIF} && echo "$((before)) $((after))" > joined
fi
"""
# Another transfer of the same content may do the rename at any moment.
_PUBLISH = f"""\
cd -- "$home/$folder" || exit 1
if [ -d ".incoming/$name" ]; then
    find ".incoming/$name" -name "$partial" -prune -exec rm -rf {{}} +
    if [ -n "$sum" ]; then
        set -- $(tail -c "+$start" ".incoming/$name/{SIF}" | head -c "$length" | sha256sum)
        if [ "$1" != "$sum" ]; then rm -rf -- ".incoming/$name" && echo different; exit; fi
        touch -c -- ".incoming/$name/{SIF}"
        sync -- ".incoming/$name/{SIF}" 2> /dev/null
    fi
    touch -c -- ".incoming/$name"
    mv -T -f -- ".incoming/$name" "$name" 2> /dev/null || rm -rf -- ".incoming/$name"
fi
if [ -e "$name" ]; then echo published; else echo "$name cannot be made" >&2; exit 1; fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder to send."""

    path: Path
    label: str
    """What messages call it."""
    size_bytes: int
    options: tuple[str, ...]
    """Options of rsync for this kind of content."""
    image: RemoteImage | None = None
    """The image whose .sif is in the folder; None for a folder of something else."""
    basis: str = ""
    """Name of an older image on the remote; empty if there is none."""


def send_folder(
    connection: Connection,
    path: Path,
    *,
    label: str,
    size_bytes: int,
    home: str,
    target: str,
    similar: tuple[str, ...] = (),
    report: Reporter,
) -> Transferred | None:
    """Make the folder `path` appear as `target`, ``FOLDER/NAME``, in the folder `home` of the remote.

    Parameters
    ----------
    label : what messages call it.
    similar : names of folders beside the target, whose equal files are linked there and not sent.

    Returns
    -------
    What was sent, as `rsync.run` says it.

    Raises
    ------
    Cut : the connection was lost too often; the same call resumes later.
    ToolMissing : there is no rsync, here or there.
    CheckFailed : the disk there is too full.
    ScriptFailed : a command there failed.
    """
    links = tuple(f"--link-dest={rsync.FOLDER}/{name}" for name in similar)
    options = ("--links", "--checksum", *links)
    source = Source(path=path, label=label, size_bytes=size_bytes, options=options)
    return _upload(connection, source, home=home, target=target, report=report)


def send_image(
    connection: Connection,
    sif: Path,
    image: RemoteImage,
    *,
    home: str,
    basis: RemoteImage | None,
    report: Reporter,
) -> Transferred | None:
    """Make the .sif appear as `image` in the folder `home` of the remote.

    Parameters
    ----------
    basis : an older image there, whose blocks need not be sent.

    Returns, raises
    ---------------
    As `send_folder`; CheckFailed also if the file changed while it was sent.
    """
    copies = (f"--copy-dest={rsync.FOLDER}/{basis.name}",) if basis else ()
    with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
        folder = Path(work, image.name)
        folder.mkdir()
        (folder / SIF).symlink_to(sif.absolute())
        files.put(folder / NOTE, image.to_json().decode())
        source = Source(
            path=folder,
            label="image",
            size_bytes=image.sif_bytes,
            options=("--copy-links", "--ignore-times", *copies),
            image=image,
            basis=basis.name if basis else "",
        )
        return _upload(connection, source, home=home, target=f"images/{image.name}", report=report)


def _upload(
    connection: Connection, source: Source, *, home: str, target: str, report: Reporter
) -> Transferred | None:
    """Send `source` until it has arrived, connecting again where the connection is lost."""
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
            answer = connection.run(_PUBLISH, {**values, **_root_values(source.image)}, by_transfer=True)
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
        path = (source.path / SIF).resolve()
        raise CheckFailed(
            f"what arrived on {remote} differs from the {source.label} here",
            where=str(path),
            hint=f"if no program writes to it: imgkit verify {shlex.quote(str(path))}",
        )


def _root_values(image: RemoteImage | None) -> dict[str, str]:
    """Return the variables of `_PUBLISH` that say what is compared: the root partition, with its digest."""
    if image is None:
        return {"sum": "", "start": "", "length": ""}
    # `tail` counts from 1.
    return {
        "sum": image.root_sha256,
        "start": str(image.root_offset + 1),
        "length": str(image.root_bytes),
    }


def _prepare(connection: Connection, values: Mapping[str, str], source: Source, *, is_retry: bool) -> int:
    """Return how many bytes of an image have arrived there, if all of it fits beside them.

    rsync makes the new file beside what has arrived of it, so that needs room of its own.
    """
    wait = " ".join(map(str, range(_WAIT_S))) if is_retry else ""
    output = connection.run(_PREPARE, {**values, "wait": wait}, by_transfer=True)
    answer = re.fullmatch(rb"disk (.*)\narrived (\d{1,15})\n", output)
    if answer is None:
        raise unreadable(connection.remote.name, output)
    arrived_bytes = min(int(answer[2]), source.size_bytes)
    free = free_bytes(answer[1].decode(errors="replace"))
    if free is not None and free < source.size_bytes:
        raise CheckFailed(
            f"{size_text(source.size_bytes)} to send to {connection.remote.name}, but {size_text(free)} free",
            where=values["home"],
            hint=_room_hint(connection),
        )
    # The joined file takes at most the room of the basis.
    if arrived_bytes and source.basis and (free is None or free > 2 * source.size_bytes):
        connection.run(_JOIN, {**values, "basis": source.basis}, by_transfer=True)
    return arrived_bytes


def _room_hint(connection: Connection) -> str:
    """Return the lines that make room on a remote."""
    name = connection.remote.name
    another = f"imgkit remote add {name} {connection.remote.address}:/PATH --replace"
    return f"what no job uses: imgkit remote gc {name} --delete; or another folder: {another}"


def _send(
    connection: Connection, values: Mapping[str, str], source: Source, report: Reporter
) -> Transferred | None:
    folder = f"{values['home']}/{values['folder']}"
    # Not -a: as root it would give the files to a user id of this machine.
    bytes_per_s = connection.max_bytes_per_s
    limit = (f"--bwlimit={max(1, round(bytes_per_s / 1024))}",) if bytes_per_s else ()
    args = (
        "-rpt",
        *limit,
        *source.options,
        f"{source.path.absolute()}/",
        f"remote:.incoming/{values['name']}/",
    )
    try:
        return rsync.run(connection, folder, args, report, source.size_bytes)
    except ScriptFailed as error:
        if _FULL_DISK.search(error.output):
            message = f"the disk of {connection.remote.name} is full"
            hint = f"{error.hint}\n{_room_hint(connection)}"
            raise CheckFailed(message, where=folder, hint=hint) from error
        raise
