"""Read a .sif file by parsing its structs, and write a new one; neither needs singularity.

The format is that of https://github.com/apptainer/sif (pkg/sif). All integers are little-endian::

    +-----------------------------+  byte 0
    | launch script line, magic   |
    | global header               |  128 bytes: architecture, UUID, place of the table
    +-----------------------------+
    | descriptor table            |  585 bytes per data object: kind, group, place, size, name
    +-----------------------------+
    | definition file, JSON, ...  |
    | root partition (squashfs)   |
    | overlay partitions (deltas) |
    | JSON object "imgkit"        |  `ImgkitRecord`
    | "imgkit-coverage"           |  digests of all of the above, see `coverage`
    | signatures                  |  those that a runtime added
    +-----------------------------+

The same content gives the same bytes, on any machine and at any time: times, owners and the UUID are zero,
which the runtimes accept (``apptainer build --reproducible`` writes such files too). `table` edits a file
that exists.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import entries, table
from imgkit_builder.sif.table import (
    DESCRIPTOR,
    HEADER,
    MAGIC,
    MAGIC_OFFSET,
    Entry,
    Header,
    NewObject,
    SifTable,
)
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

IMGKIT_OBJECT = "imgkit"
"""Name of the JSON object that imgkit adds."""

_PARTITION = struct.Struct("<ii3s")
_FS_SQUASHFS = 1
_FS_ENCRYPTED = 5
PARTITION_ALIGN_BYTES = 4096
"""A runtime mounts a partition only at such a place."""
_SQUASHFS = struct.Struct("<4sIIIIHHHHHHQQ")
SQUASHFS_MAGIC = b"hsqs"
DELTA_MARK = b"IMGDELTA"
"""Ends a delta, which begins as a squashfs does."""
_MAX_JSON_BYTES = 4 << 20

ARCHS: tuple[str, ...] = (
    "unknown",
    "386",
    "amd64",
    "arm",
    "arm64",
    "ppc64",
    "ppc64le",
    "mips",
    "mipsle",
    "mips64",
    "mips64le",
    "s390x",
    "riscv64",
)
"""Position is the number that a header stores as two digits and that ``sif add --partarch`` takes."""

COMPRESSORS: tuple[str, ...] = ("unknown", "gzip", "lzma", "lzo", "xz", "lz4", "zstd")
"""Position is the number in a squashfs superblock."""

GROUP = 1
"""Every object is in it, so that one signature covers all."""
_LAUNCH = b"#!/usr/bin/env run-singularity\n"
_VERSION = b"01"
_TABLE_AT = 4096
_DESCRIPTORS = 48
_DATA_AT = _TABLE_AT + _DESCRIPTORS * DESCRIPTOR.size


class DataType(IntEnum):
    """Kinds of data objects that imgkit looks at; the others stay plain numbers."""

    DEFFILE = 0x4001
    PARTITION = 0x4004
    SIGNATURE = 0x4005
    JSON = 0x4006


class PartitionType(IntEnum):
    """What a partition is for."""

    SYSTEM = 1
    PRIMARY = 2
    DATA = 3
    OVERLAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One data object."""

    datatype: int
    id: int
    group: int
    offset: int
    size_bytes: int
    name: str
    partition: int = 0
    """A `PartitionType` number; 0 where the object is no partition."""
    arch: str = ""
    """Architecture of a partition; empty for other objects."""
    encrypted: bool = False
    """Whether it is a partition that a runtime mounts only with a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """Superblock of the root partition."""

    compressor: str
    block_bytes: int
    inodes: int
    used_bytes: int
    mkfs_time_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImgkitRecord:
    """The JSON object ``imgkit`` of a .sif or .sqsh: its source, and how it was converted."""

    image_id: str
    """``sha256:...`` of the image configuration; empty if the source does not state it (a registry)."""
    diff_ids: tuple[str, ...]
    """``sha256:...`` of each uncompressed layer, lowest first."""
    root_sha256: str
    """Hex digest of the squashfs. The whole file is no identity: headers of a .sif hold times and a UUID."""
    runtime: str
    """``apptainer 1.4.5``."""
    compression: str
    """``zstd 3``, ``gzip 6``, or ``runtime`` if the runtime chose."""
    route: str
    """Where the files came from: ``layers``, ``export``, or ``flatten`` for a .sif with deltas."""
    imgkit: str
    """Version of imgkit."""
    source: str = ""
    """Name of the image, for people."""
    deltas: tuple[str, ...] = ()
    """Hex sha256 of the deltas on the root partition, lowest first."""
    arch: str = ""
    """Architecture, in the record of a .sqsh; the header of a .sif has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifImage:
    """A parsed .sif."""

    path: Path
    arch: str
    uuid: str
    descriptors: tuple[Descriptor, ...]
    size_bytes: int
    record: ImgkitRecord | None

    @property
    def root(self) -> Descriptor | None:
        """The primary system partition."""
        for descriptor in self.descriptors:
            if descriptor.partition == PartitionType.PRIMARY:
                return descriptor
        return None

    @property
    def encrypted(self) -> bool:
        """Whether the root partition can be read only with a key."""
        return self.root is not None and self.root.encrypted

    @property
    def overlays(self) -> tuple[Descriptor, ...]:
        """The overlay partitions that a runtime lays over the root partition, lowest first.

        It silently ignores those of another group.
        """
        root = self.root
        return tuple(
            one
            for one in self.descriptors
            if root and one.partition == PartitionType.OVERLAY and one.group == root.group
        )

    @property
    def signatures(self) -> tuple[Descriptor, ...]:
        """The signature objects; each covers one group."""
        return tuple(one for one in self.descriptors if one.datatype == DataType.SIGNATURE)


def store_name(record: ImgkitRecord) -> str:
    """The name that the .sif with `record` has in the store of a remote.

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


def is_sif(path: Path) -> bool:
    """Whether the file starts like a .sif; False also if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            stream.seek(MAGIC_OFFSET)
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read(path: Path) -> SifImage:
    """Parse `path`.

    Raises
    ------
    CheckFailed : not a .sif, cut short, or with an impossible table.
    """
    try:
        with files.open_regular(path) as stream:
            return _read(path, stream)
    except FileNotFoundError as error:
        raise CheckFailed("there is no such file", where=str(path)) from error
    except OSError as error:
        raise CheckFailed(f"cannot be read: {error.strerror}", where=str(path)) from error


def _read(path: Path, stream: BinaryIO) -> SifImage:
    found = table.read(path, stream)
    descriptors = tuple(_descriptor(entry) for entry in found.entries)
    record = next((d for d in descriptors if d.name == IMGKIT_OBJECT and d.datatype == DataType.JSON), None)
    return SifImage(
        path=path,
        arch=_arch(found.header.arch),
        uuid=found.header.uuid.hex(),
        descriptors=descriptors,
        size_bytes=os.fstat(stream.fileno()).st_size,
        record=parse_record(path, _data(stream, record)) if record else None,
    )


def _descriptor(entry: Entry) -> Descriptor:
    system, partition, arch = 0, 0, ""
    if entry.datatype == DataType.PARTITION:
        system, partition, code = _PARTITION.unpack_from(entry.extra)
        arch = _arch(code)
    return Descriptor(
        datatype=entry.datatype,
        id=entry.id,
        # The four high bits mark "is a group"; tools show the rest.
        group=entry.group & ~table.GROUP,
        offset=entry.offset,
        size_bytes=entry.size_bytes,
        name=entry.label,
        partition=partition,
        arch=arch,
        encrypted=system == _FS_ENCRYPTED,
    )


def _arch(code: bytes) -> str:
    digits = code.rstrip(b"\0")
    number = int(digits) if digits.isdigit() and len(digits) < 4 else 0
    return ARCHS[number] if number < len(ARCHS) else "unknown"


def partition_extra(kind: PartitionType, arch: str) -> bytes:
    """The last field of the descriptor of a partition with a squashfs for `arch`."""
    return _PARTITION.pack(_FS_SQUASHFS, kind, _arch_code(arch))


def _arch_code(arch: str) -> bytes:
    """How a header and a partition write `arch`."""
    return b"%02d" % ARCHS.index(arch)


def _data(stream: BinaryIO, descriptor: Descriptor) -> bytes:
    stream.seek(descriptor.offset)
    return stream.read(min(descriptor.size_bytes, _MAX_JSON_BYTES))


def data(image: SifImage, descriptor: Descriptor) -> bytes:
    """Content of a small data object (at most 4 MiB of it)."""
    with files.open_regular(image.path) as stream:
        return _data(stream, descriptor)


def record_text(record: ImgkitRecord) -> bytes:
    """The JSON of `record`."""
    values = dataclasses.asdict(record)
    if not record.arch:
        del values["arch"]
    return json.dumps({"schema": 1, **values}, indent=1, sort_keys=True).encode()


def parse_record(path: Path, raw: bytes) -> ImgkitRecord:
    """Read what `record_text` wrote; `path` is for messages.

    Raises
    ------
    CheckFailed : it is not the record of an image, or of a later version.
    """
    try:
        values = json_text.parse(raw)
        if values.pop("schema") != 1:
            raise CheckFailed(
                "a later version of imgkit wrote its imgkit object", where=str(path), hint="update imgkit"
            )
        record: ImgkitRecord = json_text.read(ImgkitRecord, values, "it", closed=True)
        return record
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its imgkit object cannot be read: {error}", where=str(path)) from error


def squashfs(image: SifImage) -> Superblock | None:
    """Superblock of the root partition; None if there is none or not a squashfs."""
    root = image.root
    if root is None or root.size_bytes < _SQUASHFS.size:
        return None
    return superblock(image.path, root.offset)


def superblock(path: Path, offset: int = 0) -> Superblock | None:
    """Superblock of the squashfs at byte `offset` of `path`; None if there is none."""
    with files.open_regular(path) as stream:
        stream.seek(offset)
        head = stream.read(_SQUASHFS.size)
    if len(head) < _SQUASHFS.size:
        return None
    magic, inodes, time_s, block, _, number, _, _, _, _, _, _, used = _SQUASHFS.unpack(head)
    if magic != SQUASHFS_MAGIC:
        return None
    return Superblock(
        compressor=COMPRESSORS[number] if number < len(COMPRESSORS) else "unknown",
        block_bytes=block,
        inodes=inodes,
        used_bytes=used,
        mkfs_time_s=time_s,
    )


def root_sha256(path: Path, *, advance: Callable[[int, int | None], None] | None = None) -> str:
    """Hex digest of the root partition; `advance` gets bytes done and total.

    Raises
    ------
    CheckFailed : not a .sif, or without a root partition.
    """
    root = read(path).root
    if root is None:
        raise CheckFailed("the .sif has no root partition", where=str(path))
    if path.stat().st_size < root.offset + root.size_bytes:
        raise CheckFailed("cut short within its root partition", where=str(path))
    with files.open_regular(path) as stream:
        return files.sha256(stream, root.offset, root.size_bytes, advance=advance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a .sif has around its root partition."""

    arch: str
    definition: bytes
    oci_config: bytes

    @property
    def objects(self) -> tuple[NewObject, ...]:
        """The objects in front of the root partition, as the runtimes order them."""
        config = NewObject(datatype=DataType.JSON, name="oci-config.json", group=GROUP, data=self.oci_config)
        text = NewObject(datatype=DataType.DEFFILE, name="deffile", group=GROUP, data=self.definition)
        return (text, config) if self.oci_config else (text,)

    @property
    def root_at(self) -> int:
        """Byte at which the root partition begins."""
        end = _DATA_AT + len(self.definition) + len(self.oci_config)
        return -(-end // PARTITION_ALIGN_BYTES) * PARTITION_ALIGN_BYTES


def frame(config: ImageConfig) -> Frame:
    """The frame of an image with this configuration.

    Raises
    ------
    CheckFailed : a .sif has no number for its architecture.
    """
    if config.arch not in ARCHS:
        raise CheckFailed(
            f"no .sif can be for the architecture {config.arch!r}", hint=f"allowed: {', '.join(ARCHS[1:])}"
        )
    # An engine adds empty values that the image's own configuration lacks, where BuildKit made it.
    settings = {
        name: value for name, value in (json_text.parse(config.raw).get("config") or {}).items() if value
    }
    return Frame(
        arch=config.arch,
        definition=entries.definition(config).encode(),
        oci_config=json.dumps(settings, indent=1, sort_keys=True).encode(),
    )


def surround(part: Path, around: Frame) -> None:
    """Put header, table and objects around the root partition, which fills `part` from `Frame.root_at` on."""
    root = NewObject(
        datatype=DataType.PARTITION,
        name="root.sqfs",
        group=GROUP,
        data=b"",
        extra=partition_extra(PartitionType.PRIMARY, around.arch),
        align=PARTITION_ALIGN_BYTES,
    )
    end = part.stat().st_size
    made = SifTable(header=_new_header(around.arch), slots=(bytes(DESCRIPTOR.size),) * _DESCRIPTORS)
    with part.open("r+b") as stream:
        for number, one in enumerate((*around.objects, root)):
            data = b"" if isinstance(one.data, Path) else one.data
            size = end - around.root_at if one is root else len(data)
            entry = table.next_entry(part, made, one, size)
            stream.seek(entry.offset)
            stream.write(data)
            slots = (*made.slots[:number], DESCRIPTOR.pack(*entry), *made.slots[number + 1 :])
            made = SifTable(header=made.header, slots=slots)
        header = made.header._replace(free=_DESCRIPTORS - len(made.entries), data_bytes=made.end - _DATA_AT)
        stream.seek(0)
        stream.write(HEADER.pack(*header).ljust(_TABLE_AT, b"\0") + b"".join(made.slots))


def _new_header(arch: str) -> Header:
    return Header(
        launch=_LAUNCH,
        magic=table.MAGIC,
        version=_VERSION,
        arch=_arch_code(arch),
        uuid=bytes(16),
        created_s=0,
        modified_s=0,
        free=_DESCRIPTORS,
        total=_DESCRIPTORS,
        table_offset=_TABLE_AT,
        table_bytes=_DESCRIPTORS * DESCRIPTOR.size,
        data_offset=_DATA_AT,
        data_bytes=0,
    )
