"""imgkit's folder on a remote, and what is in it.

::

    images/IMAGE-ROOT/image.sif     a whole .sif: the image's id, and the start of its content's digest
    images/IMAGE-ROOT/image.json    `RemoteImage`
    code/DIGEST/                    a folder of code that jobs bind
    runs/NAME-ID/                   the files of a job
    jobs/ID                         what a job uses, for `gc`

Each image has a folder of its own because rsync finds an older version of a file only under the same name. A
folder without a leading dot is complete: it got its name by one rename.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, unreadable
from imgkit_builder.sif import image
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

FOLDERS = ("images", "code")
"""Folders of what imgkit sends."""
SIF = "image.sif"
NOTE = "image.json"
IMAGE_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{12}")
"""The name of an image's folder."""
_NOTE_SCHEMA = 1
_MOST_NOTE_BYTES = 1 << 16
"""A note with 500 layers has 40 kB."""

FIND_OWNER = """\
owner=
if [ -e "$folder" ] && [ ! -O "$folder" ]; then
    owner=$(find -H "$folder" -maxdepth 0 -printf %u) && echo "owner $owner"
fi
"""
"""Names the folder's owner if that is another user, who could exchange what this user's jobs start."""

# Code and output of a run may be private, and a umask may be wide: what imgkit makes is closed. `imgkit
# remote gc` spares code that was chosen lately, by its time.
_LOOK = (
    FIND_PROGRAM
    + """\
umask 077
mkdir -p -- "$folder" || exit 1
"""
    + FIND_OWNER
    + f"""\
if [ -n "$owner" ]; then echo end; exit 0; fi
cd -- "$folder" && mkdir -p {" ".join(FOLDERS)} runs jobs || exit 1
echo "home $(pwd -P)"
if command -v "$program" > /dev/null 2>&1; then echo "program there"; fi
ls -t code | sed 's/^/code /'
touch -c -- "code/$code" 2> /dev/null
ls -t images | while IFS= read -r name; do
    note=images/$name/{NOTE}
    if [ -f "images/$name/{SIF}" ] && size=$(wc -c < "$note"); then
        echo "image $((size)) $name"
        cat "$note"
    fi
done
echo end
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """An image in a store: the content of the file `NOTE` beside its .sif."""

    image_id: str
    """``sha256:...`` of the image's configuration; of an image that imgkit did not build, of its content."""
    root_sha256: str
    """Hex digest of the root partition."""
    root_offset: int
    """Byte of the .sif at which the root partition begins."""
    root_bytes: int
    sif_bytes: int
    arch: str
    diff_ids: tuple[str, ...] = ()
    """``sha256:...`` of each layer, lowest first; empty for an image that imgkit did not build."""
    title: str = ""
    """The .sif's name where it was sent from, for people: ``letters.sif``."""
    input_sha256: str = ""
    """Digest of the build's input, if `imgkit run` built the image; empty for a file that was named."""
    project: str = ""
    """The project whose run sent the image: host and folder."""

    @property
    def name(self) -> str:
        """Return the name of the image's folder in ``images``."""
        return f"{self.image_id.removeprefix('sha256:')}-{self.root_sha256[:12]}"

    @property
    def path(self) -> str:
        """Return the path of the .sif below the remote's folder."""
        return f"images/{self.name}/{SIF}"

    def to_json(self) -> bytes:
        """Return the text of the note."""
        return json.dumps({"schema": _NOTE_SCHEMA, **dataclasses.asdict(self)}).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What a remote has."""

    home: str
    """Absolute path of imgkit's folder there."""
    has_program: bool
    """Whether the scheduler's program is there."""
    images: tuple[RemoteImage, ...]
    """The image that changed last comes first."""
    code: tuple[str, ...]
    """Digests of the folders of code, the last used first."""

    def find_image(self, image_id: str, root_sha256: str = "") -> RemoteImage | None:
        """Return an image with this id, and with this content if `root_sha256` is not empty."""
        for stored in self.images:
            if stored.image_id == image_id and root_sha256 in ("", stored.root_sha256):
                return stored
        return None

    def find_built(self, input_sha256: str) -> RemoteImage | None:
        """Return the image that was built from this input."""
        for stored in self.images:
            if input_sha256 and stored.input_sha256 == input_sha256:
                return stored
        return None

    def closest_image(self, new: RemoteImage) -> RemoteImage | None:
        """Return the image that has most layers of `new`, or else its title. Return None if there is none."""
        closest = None
        best = (0, False)
        for stored in self.images:
            if stored.arch != new.arch:
                continue
            likeness = (len({*stored.diff_ids} & {*new.diff_ids}), stored.title == new.title)
            if likeness > best:
                closest, best = stored, likeness
        return closest


def describe_sif(path: Path, *, input_sha256: str = "", project: str = "") -> RemoteImage:
    """Return the note about a .sif that is here. The digest of an image of others stands for its id.

    Raises
    ------
    CheckFailed : it is no .sif, or has no root partition.
    """
    sif = image.read(path)
    root, record = sif.require_root(), sif.record
    root_sha256 = record.root_sha256 if record else image.root_sha256(path)
    return RemoteImage(
        image_id=(record.image_id if record else "") or f"sha256:{root_sha256}",
        root_sha256=root_sha256,
        root_offset=root.offset,
        root_bytes=root.size_bytes,
        sif_bytes=sif.size_bytes,
        arch=sif.arch,
        diff_ids=record.diff_ids if record else (),
        title=path.name,
        input_sha256=input_sha256,
        project=project,
    )


def look(connection: Connection, *, program: str, code: str = "") -> Store:
    """Make the store where it is absent, and see what it has: one round trip.

    Parameters
    ----------
    program : the scheduler's program.
    code : digest of the code that the job uses.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the folder cannot be made.
    ToolFailed, UsageError : as of `read`.
    """
    values = {"folder": connection.remote.folder, "program": program, "code": code}
    return read(connection.run(_LOOK, values), connection.remote)


def read(output: bytes, remote: Remote) -> Store:
    """Return what the answer `output` says about the store of `remote`.

    Raises
    ------
    ToolFailed : the answer is cut short, or not that of imgkit's script.
    UsageError : the folder belongs to another user, or its path cannot be used in a job.
    """
    values = {"home": "", "owner": "", "program": ""}
    code: list[str] = []
    images: list[RemoteImage] = []
    for key, value, note in _rows(output, remote):
        if key in values:
            values[key] = value
        elif key == "code" and re.fullmatch(r"[0-9a-f]{64}", value):
            code.append(value)
        elif key == "image":
            stored = _parse_note(note)
            if stored is not None and stored.name == value and IMAGE_NAME.fullmatch(value):
                images.append(stored)
    if not values["home"] and not values["owner"]:
        raise unreadable(remote.name, output)
    if error := home_error(values["home"], values["owner"], remote):
        raise error
    return Store(
        home=values["home"], has_program=bool(values["program"]), images=tuple(images), code=tuple(code)
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
    """Yield the lines of the answer: a key, its value, and the note that follows the line of an image.

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
        note = b""
        if key == "image":
            size, _, value = value.partition(" ")
            if not re.fullmatch(r"\d{1,9}", size, re.ASCII):
                break
            note = output[position : position + int(size)]
            position += int(size)
        yield key, value, note
    raise unreadable(remote.name, output)


def _parse_note(note: bytes) -> RemoteImage | None:
    """Return the image that a note describes. Return None if the note is damaged or of another version."""
    try:
        values = json_text.parse(note, most_bytes=_MOST_NOTE_BYTES)
        if values.pop("schema") != _NOTE_SCHEMA:
            return None
        stored: RemoteImage = json_text.read(RemoteImage, values, "it", closed=True)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return stored
