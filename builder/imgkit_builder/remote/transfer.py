"""Bring a file into the store, whole or not at all, through connections that may be cut.

The bytes go into a part file whose name follows from the content. A later attempt resumes at its end. Two
attempts at once write the same bytes to the same places, so neither harms the other. The part file is
renamed into place when its sha256 is that of the local file.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.remote.connection import Connection, Cut, ScriptFailed, odd
from imgkit_builder.remote.store import free_bytes
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

BLOCK_BYTES = 1 << 16
"""An attempt resumes at a multiple of it."""
"""Also what is sent at once where the speed is limited."""
_CHUNK_BYTES = 1 << 20
ATTEMPTS = 4
"""Attempts in a row that bring nothing before the transfer gives up."""
_KEY_BYTES = 1 << 16
_SMALL_BYTES = 1 << 18
"""A file up to this size, as most deltas are, goes in one round trip."""

_STATE = """\
cd -- "$home" || exit 1
echo "disk $(df -Pk . | tail -n 1)"
size=0
if [ -f "$part" ]; then size=$(wc -c < "$part") || exit 1; fi
echo "part $((size))"
"""
_SEND = """\
cd -- "$home" && dd of="$part" bs="$block" seek="$blocks" conv=notrunc,fsync > /dev/null || exit 1
"""
# Another transfer of the same file may give the part its name at any moment.
_KEEP = """\
cd -- "$home" || exit 1
set -- $(sha256sum 2> /dev/null < "$part")
if [ "$1" = "$sum" ]; then
    mv -f -- "$part" "$target" 2> /dev/null
    if [ -f "$target" ]; then echo kept; else echo "$target cannot be made" >&2; exit 1; fi
elif [ -f "$part" ]; then
    rm -f -- "$part" && echo "other $1"
elif [ -f "$target" ]; then
    echo kept
else
    echo lost
fi
"""


@dataclass(slots=True, kw_only=True)
class _Sum:
    """The sha256 of what has been read of the file."""

    digest: str = ""


def upload(
    connection: Connection,
    source: Path,
    *,
    home: str,
    target: str,
    report: Reporter,
    most_per_s: float | None = None,
) -> None:
    """Make the file `source` appear as `target` in the folder `home` of the remote.

    Parameters
    ----------
    most_per_s : most bytes per second; None: as many as there can be.

    Raises
    ------
    Cut : the connection was lost too often; the same call resumes later.
    CheckFailed : the disk there is too full, or the file changes while it is read.
    ScriptFailed : a command there failed.
    """
    size = source.stat().st_size
    folder, _, name = target.rpartition("/")
    part = f"{folder}/{files.TEMPORARY}{_key(source)}.{name}.part"
    if size <= _SMALL_BYTES and not most_per_s:
        report.stage(f"send {source.name} to {connection.remote.name}")
        if _sent_at_once(connection, source, home, part, target):
            return
    reached, failures, wrong = -1, 0, 0
    while True:
        try:
            at = _state(connection, home, part, size, source)
            failures = 0 if at > reached else failures
            reached = max(reached, at)
            if reached:
                report.note(f"{at / 1e6:.1f} of {size / 1e6:.1f} MB were sent before")
            report.stage(f"send {source.name} to {connection.remote.name}")
            whole = _send(connection, source, home, part, at, size, report, most_per_s)
            report.stage(f"check it on {connection.remote.name}")
            answer = _keep(connection, home, part, target, whole.digest)
        except Cut as error:
            failures += 1
            if reached < 0 or failures >= ATTEMPTS:
                more = f"{error.hint}; the same command resumes the transfer" if reached > 0 else error.hint
                raise Cut(error.what, where=error.where, hint=more) from error
            report.note(f"the connection was lost, and imgkit connects again: {error.what}")
            time.sleep(failures - 1)
            continue
        if answer == "kept":
            return
        wrong += 1
        if wrong > 1 or source.stat().st_size != size:
            raise CheckFailed(
                f"what arrived on {connection.remote.name} differs from the file here",
                where=str(source),
                hint=f"if no program writes to it: imgkit verify {source}",
            )
        report.note("the partial file there does not match the file here: imgkit sends all of it")
        reached = -1


def _key(source: Path) -> str:
    """Text that differs for files of one name with other content."""
    with files.open_regular(source) as stream:
        start = stream.read(_KEY_BYTES)
    return hashlib.sha256(start + str(source.stat().st_size).encode()).hexdigest()[:12]


def _state(connection: Connection, home: str, part: str, size: int, source: Path) -> int:
    """Bytes of the part file that count: whole blocks."""
    output = connection.run(_STATE, by_transfer=True, home=home, part=part)
    answer = re.fullmatch(rb"disk (.*)\npart (\d{1,15})\n", output)
    if answer is None:
        raise odd(connection.remote.name, output)
    found = int(answer[2])
    at = min(found, size) // BLOCK_BYTES * BLOCK_BYTES
    free = free_bytes(answer[1].decode(errors="replace"))
    if free is not None and free < size - found:
        raise CheckFailed(
            f"{size / 1e9:.1f} GB to send to {connection.remote.name}, with {free / 1e9:.1f} GB free",
            where=home,
            hint="remove what you do not need there, or choose another folder: imgkit remote add NAME "
            f"USER@HOST:/PATH --replace (to send: {source})",
        )
    return at


def _send(
    connection: Connection,
    source: Path,
    home: str,
    part: str,
    at: int,
    size: int,
    report: Reporter,
    most_per_s: float | None,
) -> _Sum:
    """Send the file from byte `at` on; the sum is that of all of it."""
    whole = _Sum()
    values = {"home": home, "part": part, "block": str(BLOCK_BYTES), "blocks": str(at // BLOCK_BYTES)}
    with files.open_regular(source, buffering=0) as stream:
        data = _data(stream, at, size, whole, report, most_per_s)
        try:
            connection.answer(connection.stream(_SEND, values, data=data, by_transfer=True))
        except ScriptFailed as error:
            raise _explained(error, connection, f"{home}/{part}") from error
        for _ in data:  # dd may end first: the sum needs the rest
            pass
    return whole


def _sent_at_once(connection: Connection, source: Path, home: str, part: str, target: str) -> bool:
    """Send a small file in one round trip; False if it did not arrive whole, and the usual way decides."""
    data = files.read_bytes(source)
    values = {"home": home, "part": part, "target": target, "block": str(BLOCK_BYTES), "blocks": "0"}
    values["sum"] = hashlib.sha256(data).hexdigest()
    try:
        output = connection.answer(connection.stream(_SEND + _KEEP, values, data=[data], by_transfer=True))
    except Cut:
        return False
    except ScriptFailed as error:
        raise _explained(error, connection, f"{home}/{part}") from error
    return output.decode(errors="replace").strip() == "kept"


def _explained(error: ScriptFailed, connection: Connection, where: str) -> ToolFailed | CheckFailed:
    """Tell a full disk from other failures."""
    if "space" in error.said or "quota" in error.said.lower():
        return CheckFailed(f"the disk of {connection.remote.name} is full", where=where, hint=error.hint)
    return error


def _data(
    stream: BinaryIO, at: int, size: int, whole: _Sum, report: Reporter, most_per_s: float | None
) -> Iterator[bytes]:
    digest, done, began = hashlib.sha256(), 0, time.monotonic()
    while chunk := stream.read(BLOCK_BYTES if most_per_s else _CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        if done <= at:
            continue
        yield chunk[max(0, len(chunk) - (done - at)) :]
        report.advance(done, size)
        if most_per_s:
            time.sleep(max(0.0, (done - at) / most_per_s - (time.monotonic() - began)))
    whole.digest = digest.hexdigest()


def _keep(connection: Connection, home: str, part: str, target: str, digest: str) -> str:
    output = connection.run(_KEEP, by_transfer=True, home=home, part=part, target=target, sum=digest)
    answer = output.decode(errors="replace").strip().partition(" ")[0]
    if answer not in ("kept", "other", "lost"):
        raise odd(connection.remote.name, output)
    return answer
