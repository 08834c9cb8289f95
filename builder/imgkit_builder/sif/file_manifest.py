"""The file manifest of a .sif or .sqsh: a line for each name in it, written while the files pass by.

It is one gzip file, in a data object of a .sif and behind the squashfs of a .sqsh. Its first line is
`BakedFacts`: what imgkit and pip noted in the image, so that nobody has to read the squashfs for that. Each
further line is a JSON list: a path and the fields of `FileRecord`. A hard link has the type ``h`` and the
path of its file, which comes before it. The record of the .sif has size and digest of the manifest.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import posixpath
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from imgkit_builder.archive.stored import hashed
from imgkit_builder.archive.tar_read import (
    BLOCK,
    CAPABILITY,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    REGULAR,
    SYMLINK,
)
from imgkit_builder.base import files
from imgkit_builder.oci import manifest
from imgkit_builder.sif import image, sqsh
from imgkit_builder.sif.entries import ImageEntry
from imgkit_entrypoints import json_text, system
from imgkit_entrypoints.errors import CheckFailed

_TYPES = {REGULAR: "f", DIRECTORY: "d", SYMLINK: "l", CHARACTER: "c", BLOCK: "b", FIFO: "p", HARD_LINK: "h"}
_MODES = {
    "f": stat.S_IFREG,
    "d": stat.S_IFDIR,
    "l": stat.S_IFLNK,
    "c": stat.S_IFCHR,
    "b": stat.S_IFBLK,
    "p": stat.S_IFIFO,
}
_MANIFEST, _SYSTEM, _LOCK = (
    path.lstrip("/") for path in (manifest.MANIFEST_JSON, str(system.SYSTEM_JSON), manifest.LOCK_TOML)
)
_DISTRIBUTION = re.compile(r"(.*)/python3[^/]*/(?:site|dist)-packages/([^/]+)-[^/-]+\.dist-info")
BAKED_FILES = (_MANIFEST, _SYSTEM)
_ORIGIN = ".dist-info/direct_url.json"
_SCHEMA = 1
_MOST_FACTS_BYTES = 4 << 20
_MOST_BYTES = 1 << 30
"""Of the plain text; 5 million files have less."""
_DAMAGED = "its file manifest is damaged"


class FileRecord(NamedTuple):
    """What the manifest says of one name. Two of them are equal where the files are."""

    type: str
    """As of ``find -type``: f, d, l, c, b or p."""
    mode: int
    uid: int
    gid: int
    size_bytes: int
    content: str
    """sha256 of a file, target of a symlink, ``MAJOR,MINOR`` of a device."""
    capability: str
    """Hex bytes of security.capability, the only extended attribute that imgkit stores."""

    @property
    def mode_text(self) -> str:
        """Type and mode as ``ls -l`` writes them."""
        return stat.filemode(_MODES[self.type] | self.mode)


_Line = tuple[str, str, int, int, int, int, str, str]
"""A path and the fields of `FileRecord`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A Python package that a Python on the image's PATH finds."""

    name: str
    """As its .dist-info spells it."""
    folder: str = ""
    """Where an editable installation leads (PEP 610); empty for any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BakedFacts:
    """What imgkit and pip noted in an image."""

    manifest: str = ""
    """Text of `manifest.MANIFEST_JSON`; empty where imgkit did not build the image."""
    system: str = ""
    """Text of system.json."""
    distributions: tuple[Distribution, ...] | None = None
    """Sorted by name; None: unknown. An image that a lock built has only those whose origin pip noted."""


class BakedFactsCollector:
    """Collect `BakedFacts` from the names and the small files of an image, in any order."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._names: set[str] = set()

    def observed(self, entries: Iterable[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield `entries` as they are; keep a copy of what counts."""
        for entry in entries:
            for name in entry.names:
                self.add_name(name)
            if entry.kind == REGULAR and self.wants(entry.name) and entry.size_bytes <= _MOST_FACTS_BYTES:
                data = entry.read()
                self.add(entry.name, data)
                entry = entry.passed_on((data,))
            yield entry

    def wants(self, name: str) -> bool:
        """Return whether the content of the file `name` counts."""
        return name in BAKED_FILES or name.endswith(_ORIGIN)

    def add(self, name: str, data: bytes) -> None:
        """Take the content of a file for which `wants` is true."""
        self._texts[name] = data

    def add_name(self, name: str) -> None:
        """Take the name of a file."""
        if name == _LOCK or name.endswith(".dist-info/METADATA"):
            self._names.add(name)

    def facts(self, path: str) -> BakedFacts:
        """Return the facts of an image whose variable PATH is `path`."""
        return BakedFacts(
            manifest=self._text(_MANIFEST),
            system=self._text(_SYSTEM),
            distributions=tuple(sorted(self._distributions(path), key=lambda one: (one.name, one.folder))),
        )

    def _text(self, name: str) -> str:
        return self._texts.get(name, b"").decode("utf-8", "replace")

    def _distributions(self, path: str) -> Iterator[Distribution]:
        libs = library_folders(path)
        folders = {name.removesuffix("/direct_url.json") for name in self._texts if name.endswith(_ORIGIN)}
        # An image that was built by a lock has no origin of what the lock names, whatever pip wrote.
        if _LOCK not in self._names:
            folders |= {name.removesuffix("/METADATA") for name in self._names}
        for folder in folders:
            match = _DISTRIBUTION.fullmatch(folder)
            if match and match[1] in libs:
                origin = self._texts.get(f"{folder}/direct_url.json", b"")
                yield Distribution(name=match[2], folder=_editable_folder(origin))


def library_folders(path: str) -> list[str]:
    """Return the ``lib`` folders of the prefixes on `path`, a variable PATH; relative, each once."""
    prefixes = dict.fromkeys(posixpath.dirname(folder).strip("/") for folder in path.split(":"))
    return [f"{prefix}/{lib}".lstrip("/") for prefix in prefixes for lib in ("lib", "local/lib")]


def _editable_folder(direct_url: bytes) -> str:
    """Return the folder of an editable installation (PEP 610); empty for any other."""
    try:
        origin = json_text.parse(direct_url)
        return unquote(urlsplit(origin["url"]).path) if origin["dir_info"].get("editable") else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


class ManifestWriter:
    """Write the lines of a manifest to a temporary file while entries pass."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = files.create(path)
        self._gzip = zlib.compressobj(6, zlib.DEFLATED, 31)

    def recorded(self, entries: Iterable[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield `entries`, whose contents must be read to the end before the next one."""
        for entry in entries:
            digest = hashlib.sha256()
            if entry.kind == REGULAR:
                yield entry.passed_on(hashed(entry.content, digest))
            else:
                yield entry
            self._write_line(entry.name, file_record(entry, digest.hexdigest()))
            for name in entry.names[1:]:
                self._write_line(name, _hard_link(entry.name))

    def _write_line(self, name: str, record: FileRecord) -> None:
        line = json.dumps((name, *record), separators=(",", ":")) + "\n"
        self._stream.write(self._gzip.compress(line.encode()))

    def finish(self, facts: BakedFacts) -> bytes:
        """Return the whole manifest, and remove the temporary file."""
        self._stream.write(self._gzip.flush())
        self._stream.close()
        first = json.dumps({"schema": _SCHEMA, **asdict(facts)}, sort_keys=True) + "\n"
        with files.open_regular(self._path) as stream:
            data = gzip.compress(first.encode(), mtime=0) + stream.read()
        self._path.unlink()
        return data


def file_record(entry: ImageEntry, sha256: str = "") -> FileRecord:
    """Return what a manifest says of the first name of `entry`; `sha256` is the hex digest of a file."""
    if entry.kind == HARD_LINK:
        return _hard_link(entry.link)
    content = entry.link
    if entry.kind == REGULAR:
        content = sha256
    elif entry.kind in (CHARACTER, BLOCK):
        content = "{},{}".format(*entry.device)
    return FileRecord(
        type=_TYPES[entry.kind],
        mode=0o777 if entry.kind == SYMLINK else entry.mode & 0o7777,
        uid=entry.uid,
        gid=entry.gid,
        size_bytes=entry.size_bytes,
        content=content,
        capability=entry.xattrs.get(CAPABILITY, b"").hex(),
    )


def _hard_link(target: str) -> FileRecord:
    return FileRecord(type="h", mode=0, uid=0, gid=0, size_bytes=0, content=target, capability="")


def read(path: Path) -> bytes | None:
    """Return the manifest in a .sif or .sqsh as it lies there; None where there is none.

    Raises
    ------
    CheckFailed : it is damaged, or the file is.
    """
    if image.is_sif(path):
        sif = image.read(path)
        record, offset = sif.record, sif.manifest_offset
    else:
        record, offset = sqsh.record(path), sqsh.manifest_offset(path)
    if record is None or not record.manifest_sha256:
        return None
    with files.open_regular(path) as stream:
        stream.seek(offset)
        # A forged size may be larger than the file.
        data = stream.read(min(record.manifest_bytes, path.stat().st_size))
    refuse_other(data, record.manifest_sha256, where=str(path))
    return data


def refuse_other(data: bytes, sha256: str, *, where: str) -> None:
    """Raise CheckFailed if the manifest `data` has another digest than is recorded."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckFailed(
            f"{_DAMAGED}: it has another sha256 than recorded", where=where, hint="copy it again"
        )


def parse_facts(data: bytes, *, where: str) -> BakedFacts:
    """Return the first line of a manifest.

    Raises
    ------
    CheckFailed : damaged, or of a later version.
    """
    try:
        values = json_text.parse(next(_lines(data), b""))
        if values.pop("schema") != _SCHEMA:
            raise CheckFailed(
                "a later version of imgkit wrote its manifest", where=where, hint="update imgkit"
            )
        facts: BakedFacts = json_text.read(BakedFacts, values, "it", closed=True)
        return facts
    except (ValueError, TypeError, KeyError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise CheckFailed(f"{_DAMAGED}: {error}", where=where, hint="copy it again") from error


def parse_records(data: bytes, *, where: str) -> dict[str, FileRecord]:
    """Return what a manifest says of each name; a hard link has the record of its file.

    Raises
    ------
    CheckFailed : damaged.
    """
    records: dict[str, FileRecord] = {}
    try:
        lines = _lines(data)
        next(lines, None)
        for line in lines:
            name, *values = json_text.read(_Line, json_text.parse(line), "a line")
            record = FileRecord(*values)
            records[name] = records[record.content] if record.type == "h" else record
    except (ValueError, TypeError, KeyError, OSError, EOFError, zlib.error) as error:
        raise CheckFailed(f"{_DAMAGED}: {error}", where=where, hint="copy it again") from error
    return records


def _lines(data: bytes) -> Iterator[bytes]:
    """Yield the lines of a manifest; raise ValueError if it unpacks to more than any image needs."""
    left_bytes = _MOST_BYTES
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while line := stream.readline(_MOST_FACTS_BYTES):
            left_bytes -= len(line)
            if left_bytes < 0 or not line.endswith(b"\n"):
                raise ValueError("a line without an end, or too many")
            yield line
