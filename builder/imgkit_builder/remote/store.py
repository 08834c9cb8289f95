"""imgkit's folder on a remote: ``images``, ``deltas`` and ``runs``, and which image of it a job can use."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.job import fields
from imgkit_builder.remote.connection import FIND_PROGRAM, Connection
from imgkit_builder.sif import image
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

EDGE_BYTES = 32768
"""What is read from each end of a .sif: the table is in the first, imgkit's record in the last."""

_LOOK = (
    FIND_PROGRAM
    + """\
mkdir -p -- "$folder" && cd -- "$folder" && mkdir -p images deltas runs || exit 1
echo "home $(pwd -P)"
echo "disk $(df -Pk . | tail -n 1)"
if command -v "$program" > /dev/null 2>&1; then echo "program there"; fi
for file in images/"$image"-*.sif; do
    if [ -f "$file" ] && size=$(wc -c < "$file"); then
        echo "sif $((size)) ${file#images/}"
        head -c "$edge" "$file"
        tail -c "$edge" "$file"
    fi
done
echo end
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What a remote has for one image."""

    home: str
    """Absolute path of imgkit's folder there."""
    free_bytes: int | None
    has_program: bool
    """Whether the scheduler's program is there."""
    images: tuple[str, ...]
    """Names in ``images`` of whole .sif files of the image, by their own records."""


def name_of(record: ImgkitRecord) -> str:
    """The name that the .sif with `record` has in the store.

    Raises
    ------
    UsageError : the record does not say which image it is.
    """
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", record.image_id):
        raise UsageError("the .sif does not say which image it holds", hint="convert it again by imgkit sif")
    content = record.root_sha256
    if record.deltas:
        content = hashlib.sha256(" ".join((content, *record.deltas)).encode()).hexdigest()
    return f"{record.image_id[7:]}-{content[:12]}.sif"


def look(connection: Connection, *, image_id: str, program: str, wanted: str = "") -> Store:
    """Make the store where it is absent, and see what it has: one round trip.

    Parameters
    ----------
    image_id : ``sha256:...`` of the image's configuration; at most 64 KiB of each .sif of it are read.
    program : the scheduler's program.
    wanted : the one name that counts; default: any .sif of the image alone, without deltas.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the folder cannot be made.
    UsageError : the folder's path cannot stand in a job.
    """
    digest = image_id.removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"{image_id!r} is no image id", hint="imgkit build, or imgkit sif, makes one")
    output = connection.run(
        _LOOK, folder=connection.remote.folder, program=program, image=digest, edge=str(EDGE_BYTES)
    )
    home, free, there, names = "", None, False, []
    for word, value, body in _rows(output):
        if word == "home":
            home = value
        elif word == "disk":
            free = free_bytes(value)
        elif word == "program":
            there = True
        elif word == "sif":
            size, _, name = value.partition(" ")
            if _is_whole(name, int(size), body, wanted):
                names.append(name)
    if fault := fault_of_home(home):
        raise fault
    return Store(home=home, free_bytes=free, has_program=there, images=tuple(names))


def fault_of_home(home: str) -> UsageError | None:
    """Why the folder with the absolute path `home` cannot be that of jobs; None if it can."""
    try:
        fields.check("--directory", home)
    except UsageError as error:
        return UsageError(
            f"{home!r}, the folder's real path, cannot stand in a job",
            hint=f"{error.hint}; another folder: imgkit remote add NAME USER@HOST:/PATH --replace",
        )
    return None


def free_bytes(row: str) -> int | None:
    """Free space in a row of ``df -Pk``; None if it is none."""
    found = re.search(r"\s\d+\s+\d+\s+(-?\d+)\s+(?:\d+%|-)\s", row)
    return int(found[1]) * 1024 if found else None


def _rows(output: bytes) -> Iterator[tuple[str, str, bytes]]:
    """The lines of the answer: a word, its value, and both ends of a .sif behind a line of one.

    Raises
    ------
    ToolFailed : the answer is cut short.
    """
    at = 0
    while (end := output.find(b"\n", at)) >= 0:
        word, _, value = output[at:end].decode(errors="replace").partition(" ")
        at = end + 1
        if word == "end":
            return
        body = b""
        if word == "sif":
            size = re.match(r"\d{1,15} ", value)
            length = 2 * min(int(size[0]), EDGE_BYTES) if size else 0
            body = output[at : at + length]
            at += length
        yield word, value, body
    raise ToolFailed("the remote's answer is cut short", hint="the same command again")


def _is_whole(name: str, size: int, body: bytes, wanted: str) -> bool:
    """Whether the .sif with both ends in `body` is whole, and has the name that its record gives it."""
    edge = len(body) // 2
    with tempfile.TemporaryDirectory(prefix="imgkit-") as folder:
        # A file of that size with a hole between both ends: the reader of .sif files needs no other.
        path = Path(folder, "far.sif")
        with files.create(path) as stream:
            stream.write(body[:edge])
            stream.truncate(size)
            stream.seek(max(0, size - edge))
            stream.write(body[edge:])
        try:
            record = image.read(path).record
            if record is None or name != name_of(record):
                return False
            return name == wanted if wanted else not record.deltas
        except (CheckFailed, UsageError):
            return False
