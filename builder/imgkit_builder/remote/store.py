"""imgkit's folder on a remote: its `FOLDERS`, ``runs`` and ``jobs``; and which image a job can use."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.job import quoting
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import FIND_PROGRAM, Connection, unreadable
from imgkit_builder.sif import file_manifest, image
from imgkit_builder.sif.image import SifImage
from imgkit_entrypoints.errors import CheckFailed, UsageError

EDGE_BYTES = 32768
"""What is read from each end of a .sif: the table is in the first, imgkit's record in the last."""

FOLDERS = ("images", "deltas", "code")
"""Folders of what imgkit sends."""

FIND_OWNER = """\
owner=
if [ -e "$folder" ] && [ ! -O "$folder" ]; then
    owner=$(find -H "$folder" -maxdepth 0 -printf %u) && echo "owner $owner"
fi
"""
"""Names the folder's owner if that is another user, who could exchange what this user's jobs start."""

_SHOW = """\
show() {
    if [ -f "$1" ] && size=$(wc -c < "$1"); then
        echo "file $((size)) ${1##*/}"
        head -c "$edge" "$1"
        tail -c "$edge" "$1"
    fi
}
"""
"""Prints a file's size, name and both ends."""

# Code and output of a run may be private, and a umask may be wide: what imgkit makes is closed.
# imgkit remote gc spares what was chosen lately, by its time.
_LOOK = (
    FIND_PROGRAM
    + _SHOW
    + """\
umask 077
mkdir -p -- "$folder" || exit 1
"""
    + FIND_OWNER
    + """\
if [ -n "$owner" ]; then echo end; exit 0; fi
cd -- "$folder" && mkdir -p {folders} runs jobs || exit 1
echo "home $(pwd -P)"
if command -v "$program" > /dev/null 2>&1; then echo "program there"; fi
for file in images/*.sif; do echo "name ${file#images/}"; done
ls -t code | sed 's/^/code /'
touch -c -- "code/$code" 2> /dev/null
for file in images/"$image"-*.sif deltas/"$image"-*.imgdelta; do
    show "$file"
    touch -c -- "$file" 2> /dev/null
done
echo end
""".replace("{folders}", " ".join(FOLDERS))
)


_MOST_BASES = 8
_BASES = (
    _SHOW
    + """\
cd -- "$folder/images" || exit 1
ls -t | head -n "$most" | while IFS= read -r file; do show "./$file"; done
echo end
"""
)
_READ_MANIFEST = """\
tail -c "+$start" -- "$folder/images/$name" | head -c "$size"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDelta:
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
    has_program: bool
    """Whether the scheduler's program is there."""
    images: tuple[str, ...]
    """Names in ``images`` of complete .sif files of the image, by their own records."""
    deltas: tuple[StoredDelta, ...]
    """Deltas that make the image."""
    names: tuple[str, ...]
    """All names in ``images``; a file is renamed into place when it is complete."""
    code: tuple[str, ...]
    """Digests of the folders of code, the last used first."""


def delta_name(delta: Delta) -> str:
    """Return the name of a delta in the store."""
    return image.name_in_store(delta.image_id, delta.sha256, ".imgdelta")


def look(
    connection: Connection, *, image_id: str, program: str, file_name: str = "", code: str = ""
) -> Store:
    """Make the store where it is absent, and see what it has: one round trip.

    Parameters
    ----------
    image_id : ``sha256:...`` of the image's configuration; at most 64 KiB of each .sif of it are read. Empty:
        the store has no part in the image.
    program : the scheduler's program.
    file_name : the one name that counts; default: any .sif of the image alone, without a delta.
    code : digest of the code that the job uses.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the folder cannot be made.
    ToolFailed, UsageError : as of `read`.
    """
    digest = image_id.removeprefix("sha256:")
    if image_id and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"{image_id!r} is not an image id", hint="imgkit build, or imgkit sif, makes one")
    values = {"folder": connection.remote.folder, "program": program, "image": digest, "code": code}
    output = connection.run(_LOOK, {**values, "edge": str(EDGE_BYTES)})
    return read(output, connection.remote, file_name=file_name)


def closest_base(connection: Connection, diff_ids: Collection[str], arch: str) -> SifImage | None:
    """Return the .sif with a file manifest there that shares most layers; None if there is none.

    Only the `_MOST_BASES` last used ones are looked at, at 64 KiB each.

    Parameters
    ----------
    diff_ids : layers of the image that is to lie over it.

    Raises
    ------
    As `look`.
    """
    values = {"folder": connection.remote.folder, "edge": str(EDGE_BYTES), "most": str(_MOST_BASES)}
    closest, most_shared = None, 0
    for key, value, body in _rows(connection.run(_BASES, values), connection.remote):
        size, _, name = value.partition(" ")
        if key != "file":
            continue
        with _sparse_copy(int(size), body) as path:
            sif = _read_sif(path, name)
        record = sif.record if sif else None
        if sif and record and record.manifest_sha256 and not record.delta_sha256 and sif.arch == arch:
            shared = len({*record.diff_ids} & {*diff_ids})
            if shared > most_shared:
                closest, most_shared = dataclasses.replace(sif, path=Path(name)), shared
    return closest


def read_manifest(connection: Connection, sif: SifImage) -> bytes:
    """Return the file manifest of a .sif there, which `closest_base` has found.

    Raises
    ------
    CheckFailed : it is not the one that the record of the .sif names.
    Cut, ScriptFailed : the remote cannot be reached, or the .sif cannot be read.
    """
    assert sif.record is not None  # noqa: S101 - the caller has looked
    size_bytes = sif.record.manifest_bytes
    values = {"folder": connection.remote.folder, "name": sif.path.name}
    values |= {"start": str(sif.manifest_offset + 1), "size": str(size_bytes)}
    data = bytearray()
    with contextlib.closing(connection.stream(_READ_MANIFEST, values)) as chunks:
        for chunk in chunks:
            data += chunk
            if len(data) > size_bytes:
                break
    file_manifest.refuse_other(bytes(data), sif.record.manifest_sha256, where=sif.path.name)
    return bytes(data)


def read(output: bytes, remote: Remote, *, file_name: str = "") -> Store:
    """Return what the answer `output` says about the store of `remote`; `file_name` is as of `look`.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    UsageError : the folder belongs to another user, or its path cannot be used in a job.
    """
    values = {"home": "", "owner": "", "program": ""}
    names, code, images, deltas = list[str](), list[str](), list[str](), list[StoredDelta]()
    for key, value, body in _rows(output, remote):
        if key in values:
            values[key] = value
        elif key == "name":
            names.append(value)
        elif key == "code" and re.fullmatch(r"[0-9a-f]{64}", value):
            code.append(value)
        elif key == "file":
            size, _, name = value.partition(" ")
            with _sparse_copy(int(size), body) as path:  # a size that `_rows` has read
                if name.endswith(".imgdelta"):
                    deltas += _read_delta(path, name, names)
                elif sif := _read_sif(path, name):
                    is_alone = sif.record is not None and not sif.record.delta_sha256
                    if name == file_name if file_name else is_alone:
                        images.append(name)
    if not values["home"] and not values["owner"]:
        raise unreadable(remote.name, output)
    if error := home_error(values["home"], values["owner"], remote):
        raise error
    return Store(
        home=values["home"],
        has_program=bool(values["program"]),
        images=tuple(images),
        deltas=tuple(deltas),
        names=tuple(names),
        code=tuple(code),
    )


def home_error(home: str, owner: str, remote: Remote) -> UsageError | None:
    """Return why the remote's folder, with the absolute path `home`, cannot be that of jobs.

    Parameters
    ----------
    owner : the user to whom it belongs, if that is not this user.
    """
    command = f"imgkit remote add {remote.name} {remote.address}:{{}} --replace"
    if owner:
        return UsageError(
            f"{remote.folder} belongs to {owner}, who could replace what your jobs run",
            where=remote.name,
            hint=f"a folder of your own, for example below it: {command.format(f'{remote.folder}/YOU')}",
        )
    try:
        # An undecodable byte is another one in the script of a job.
        quoting.check("--directory", home.replace("\N{REPLACEMENT CHARACTER}", "\0"))
    except UsageError as error:
        return UsageError(
            f"{home!r}, the folder's real path, cannot be used in a job",
            hint=f"{error.hint}; another folder: {command.format('/PATH')}",
        )
    return None


def free_bytes(row: str) -> int | None:
    """Return the free space in a row of ``df -Pk``; None if it is none."""
    match = re.search(r"\s\d+\s+\d+\s+(-?\d{1,15})\s+(?:\d+%|-)\s", row)
    return int(match[1]) * 1024 if match else None


def _rows(output: bytes, remote: Remote) -> Iterator[tuple[str, str, bytes]]:
    """Yield the lines of the answer: a key, its value, and both ends of a file behind its line.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    """
    position = 0
    while (end := output.find(b"\n", position)) >= 0:
        key, _, value = output[position:end].decode(errors="replace").partition(" ")
        position = end + 1
        if key == "end":
            return
        body = b""
        if key == "file":
            size = re.match(r"\d{1,13} ", value, re.ASCII)  # file systems take a hole of 9 TB
            if size is None:
                break
            length = 2 * min(int(size[0]), EDGE_BYTES)
            body = output[position : position + length]
            position += length
        yield key, value, body
    raise unreadable(remote.name, output)


@contextlib.contextmanager
def _sparse_copy(size: int, body: bytes) -> Iterator[Path]:
    """Yield a file of that size with both ends of it in `body`, and a hole between them.

    The readers of .sif files and deltas need no more.
    """
    edge = len(body) // 2
    with tempfile.TemporaryDirectory(prefix="imgkit-") as folder:
        path = Path(folder, "copy")
        with files.create(path) as stream:
            stream.write(body[:edge])
            stream.truncate(size)
            stream.seek(max(0, size - edge))
            stream.write(body[edge:])
        yield path


def _read_sif(path: Path, name: str) -> SifImage | None:
    """Return the .sif, if it is complete, and has the name that its record gives it, or no record."""
    try:
        sif = image.read(path)
        return sif if sif.record is None or name == image.store_name(sif.record) else None
    except (CheckFailed, UsageError):
        return None


def _read_delta(path: Path, name: str, images: list[str]) -> Iterator[StoredDelta]:
    """Yield the delta, if it is complete, has the name that it gives itself, and its base is in `images`."""
    try:
        delta = descriptor.read(path)
    except (CheckFailed, UsageError):
        return
    base = image.name_in_store(delta.base.image_id, delta.base.root_sha256)
    if name == delta_name(delta) and base in images:
        yield StoredDelta(name=name, base=base, delta=delta)
