"""imgkit's folder on a remote: its `PLACES`, ``runs`` and ``jobs``; and which image a job can use."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import BaseSif, Delta
from imgkit_builder.job import quoting
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import FIND_PROGRAM, Connection, odd
from imgkit_builder.sif import image
from imgkit_entrypoints.errors import CheckFailed, UsageError

EDGE_BYTES = 32768
"""What is read from each end of a .sif: the table is in the first, imgkit's record in the last."""

PLACES = ("images", "deltas")
"""Folders of files that imgkit sends."""

FIND_OWNER = """\
owner=
if [ -e "$folder" ] && [ ! -O "$folder" ]; then
    owner=$(find -H "$folder" -maxdepth 0 -printf %u) && echo "owner $owner"
fi
"""
"""Names the folder's owner if that is another user, who could exchange what this user's jobs start."""

# Code and output of a run may be private, and a umask may be wide: what imgkit makes is closed.
_LOOK = (
    FIND_PROGRAM
    + """\
umask 077
mkdir -p -- "$folder" || exit 1
"""
    + FIND_OWNER
    + """\
if [ -n "$owner" ]; then echo end; exit 0; fi
cd -- "$folder" && mkdir -p {places} runs jobs || exit 1
echo "home $(pwd -P)"
echo "disk $(df -Pk . | tail -n 1)"
if command -v "$program" > /dev/null 2>&1; then echo "program there"; fi
for file in images/*.sif; do echo "name ${file#images/}"; done
for file in deltas/code-*.imgdelta; do echo "code ${file#deltas/}"; done
for file in images/"$image"-*.sif deltas/"$image"-*.imgdelta; do
    if [ -f "$file" ] && size=$(wc -c < "$file"); then
        echo "file $((size)) ${file##*/}"
        head -c "$edge" "$file"
        tail -c "$edge" "$file"
        touch -c -- "$file" 2> /dev/null # imgkit remote gc spares what was chosen lately
    fi
done
echo end
""".replace("{places}", " ".join(PLACES))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDelta:
    """A delta that the remote has, over a .sif that it has."""

    name: str
    base: str
    """Name of the .sif."""
    delta: Delta


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
    deltas: tuple[HeldDelta, ...]
    """Deltas that make the image."""
    names: tuple[str, ...]
    """All names in ``images``; a file is renamed into place when it is complete."""
    codes: tuple[str, ...]
    """Names in ``deltas`` of code."""


def base_name(base: BaseSif) -> str:
    """The name of the .sif below a delta; empty if that has deltas itself."""
    return "" if base.deltas else f"{base.image_id[7:]}-{base.root_sha256[:12]}.sif"


def delta_name(delta: Delta) -> str:
    """The name of a delta in the store."""
    return f"{delta.image_id[7:]}-{delta.sha256[:12]}.imgdelta"


def look(connection: Connection, *, image_id: str, program: str, wanted: str = "") -> Store:
    """Make the store where it is absent, and see what it has: one round trip.

    Parameters
    ----------
    image_id : ``sha256:...`` of the image's configuration; at most 64 KiB of each .sif of it are read. Empty:
        the store has no part in the image.
    program : the scheduler's program.
    wanted : the one name that counts; default: any .sif of the image alone, without deltas.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the folder cannot be made.
    ToolFailed, UsageError : as of `read`.
    """
    digest = image_id.removeprefix("sha256:")
    if image_id and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"{image_id!r} is not an image id", hint="imgkit build, or imgkit sif, makes one")
    output = connection.run(
        _LOOK, folder=connection.remote.folder, program=program, image=digest, edge=str(EDGE_BYTES)
    )
    return read(output, connection.remote, wanted=wanted)


def read(output: bytes, remote: Remote, *, wanted: str = "") -> Store:
    """What the answer `output` says about the store of `remote`; `wanted` is as of `look`.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    UsageError : the folder belongs to another user, or its path cannot be used in a job.
    """
    home, owner, free, there = "", "", None, False
    names: list[str] = []
    codes: list[str] = []
    images: list[str] = []
    deltas: list[HeldDelta] = []
    for word, value, body in _rows(output, remote):
        if word == "home":
            home = value
        elif word == "owner":
            owner = value
        elif word == "disk":
            free = free_bytes(value)
        elif word == "program":
            there = True
        elif word == "name":
            names.append(value)
        elif word == "code":
            codes.append(value)
        elif word == "file":
            size, _, name = value.partition(" ")
            with _ends(int(size), body) as path:  # a size that `_rows` has read
                if name.endswith(".imgdelta"):
                    deltas += _held(path, name, names)
                elif _is_whole(path, name, wanted):
                    images.append(name)
    if not home and not owner:
        raise odd(remote.name, output)
    if fault := fault_of_home(home, owner, remote):
        raise fault
    return Store(
        home=home,
        free_bytes=free,
        has_program=there,
        images=tuple(images),
        deltas=tuple(deltas),
        names=tuple(names),
        codes=tuple(codes),
    )


def fault_of_home(home: str, owner: str, remote: Remote) -> UsageError | None:
    """Why the remote's folder, with the absolute path `home`, cannot be that of jobs; None if it can.

    Parameters
    ----------
    owner : the user to whom it belongs, if that is not this user.
    """
    again = f"imgkit remote add {remote.name} {remote.address}:{{}} --replace"
    if owner:
        return UsageError(
            f"{remote.folder} belongs to {owner}, who could replace what your jobs run",
            where=remote.name,
            hint=f"a folder of your own, for example below it: {again.format(f'{remote.folder}/YOU')}",
        )
    try:
        # An undecodable byte is another one in the script of a job.
        quoting.check("--directory", home.replace("\N{REPLACEMENT CHARACTER}", "\0"))
    except UsageError as error:
        return UsageError(
            f"{home!r}, the folder's real path, cannot be used in a job",
            hint=f"{error.hint}; another folder: {again.format('/PATH')}",
        )
    return None


def free_bytes(row: str) -> int | None:
    """Free space in a row of ``df -Pk``; None if it is none."""
    found = re.search(r"\s\d+\s+\d+\s+(-?\d{1,15})\s+(?:\d+%|-)\s", row)
    return int(found[1]) * 1024 if found else None


def _rows(output: bytes, remote: Remote) -> Iterator[tuple[str, str, bytes]]:
    """The lines of the answer: a word, its value, and both ends of a file behind its line.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    at = 0
    while (end := output.find(b"\n", at)) >= 0:
        word, _, value = output[at:end].decode(errors="replace").partition(" ")
        at = end + 1
        if word == "end":
            return
        body = b""
        if word == "file":
            size = re.match(r"\d{1,13} ", value, re.ASCII)  # file systems take a hole of 9 TB
            if size is None:
                break
            length = 2 * min(int(size[0]), EDGE_BYTES)
            body = output[at : at + length]
            at += length
        yield word, value, body
    raise odd(remote.name, output)


@contextlib.contextmanager
def _ends(size: int, body: bytes) -> Iterator[Path]:
    """Yield a file of that size with both ends of it in `body`, and a hole between them.

    The readers of .sif files and deltas need no more.
    """
    edge = len(body) // 2
    with tempfile.TemporaryDirectory(prefix="imgkit-") as folder:
        path = Path(folder, "far")
        with files.create(path) as stream:
            stream.write(body[:edge])
            stream.truncate(size)
            stream.seek(max(0, size - edge))
            stream.write(body[edge:])
        yield path


def _is_whole(path: Path, name: str, wanted: str) -> bool:
    """Whether the .sif is whole, and has the name that its record gives it; else it is `wanted`."""
    try:
        record = image.read(path).record
        if record is None:
            return name == wanted
        if name != image.store_name(record):
            return False
    except (CheckFailed, UsageError):
        return False
    return name == wanted if wanted else not record.deltas


def _held(path: Path, name: str, names: Sequence[str]) -> Iterator[HeldDelta]:
    """The delta, if it is whole, has the name that it gives itself, and lies over one of the .sif `names`."""
    try:
        delta = descriptor.read(path)
    except (CheckFailed, UsageError):
        return
    base = base_name(delta.base)
    if name == delta_name(delta) and base in names:
        yield HeldDelta(name=name, base=base, delta=delta)
