"""Read a .sif file by parsing its structs, without singularity. The module `objects` writes .sif files.

The format is that of https://github.com/apptainer/sif (pkg/sif/sif.go). All integers are little-endian::

    +-----------------------------+  byte 0
    | launch script line, magic   |
    | global header               |  128 bytes: architecture, UUID, position of the table
    +-----------------------------+
    | descriptor table            |  585 bytes per data object: kind, group, position, size, name
    +-----------------------------+
    | definition file, JSON, ...  |
    | root partition (squashfs)   |
    | JSON object "imgkit"        |  `ImgkitRecord`
    | signatures                  |  those that a runtime added
    +-----------------------------+

The same content gives the same bytes, on any machine and at any time, because times, owners and the UUID are
zero. The runtimes accept that (``apptainer build --reproducible`` writes such files too).
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imgkit_builder.base import files
from imgkit_builder.sif.baked_facts import BakedFacts
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

IMGKIT_OBJECT = "imgkit"
"""Name of the JSON object that imgkit adds."""
RECORD_SCHEMA = 2
"""Version of that object's form. Version 1 had no `ImgkitRecord.facts`."""
MAGIC = b"SIF_MAGIC\0"
MAGIC_OFFSET = 32
"""The line of the launch script comes before the magic bytes."""
GROUP_FLAG = 0xF0000000
"""Descriptors store the number of a group with these high bits set. Tools show the number without them."""
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<iBIII7q128s384s")
_PARTITION = struct.Struct("<ii3s")
# What a partition's descriptor says about its file system (sif.go: FsSquash, FsEncryptedSquashfs).
_FS_SQUASHFS = 1
_FS_ENCRYPTED = 5
SUPERBLOCK = struct.Struct("<4sIIIIH10xQQQ8xQQQQ")
SQUASHFS_MAGIC = b"hsqs"
# The limits protect against a damaged or hostile file, whose header can contain any numbers. Runtimes write
# 48 descriptors.
_MAX_DESCRIPTORS = 4096
_MAX_JSON_BYTES = 4 << 20

ARCHS = (
    *("unknown", "386", "amd64", "arm", "arm64", "ppc64", "ppc64le"),
    *("mips", "mipsle", "mips64", "mips64le", "s390x", "riscv64"),
)
"""A header stores an architecture as its position in this tuple, as two digits. ``sif add --partarch`` takes
the same number."""

COMPRESSORS = ("unknown", "gzip", "lzma", "lzo", "xz", "lz4", "zstd")
"""A squashfs superblock stores a compressor as its position in this tuple."""

Advance = Callable[[int, "int | None"], None]
"""A function that receives the number of bytes done and the total number."""


class DataType(IntEnum):
    """Types of data objects that imgkit reads or writes. Descriptors of other types keep plain numbers."""

    DEFFILE = 0x4001
    PARTITION = 0x4004
    SIGNATURE = 0x4005
    JSON = 0x4006


class PartitionType(IntEnum):
    """What a partition is for."""

    PRIMARY = 2
    OVERLAY = 4


class Header(NamedTuple):
    """The global header of a .sif. The fields are in the order of its bytes."""

    launch: bytes
    magic: bytes
    version: bytes
    arch: bytes
    uuid: bytes
    created_s: int
    modified_s: int
    free: int
    """Number of unused descriptors."""
    total: int
    table_offset: int
    table_bytes: int
    data_offset: int
    data_bytes: int


class _PartitionFields(NamedTuple):
    """The fields in `Descriptor.extra` of a partition, in the order of its bytes."""

    file_system: int
    kind: int
    arch_code: bytes


class Descriptor(NamedTuple):
    """The description of one data object, in the order of its bytes. Its index in the table is its id - 1."""

    datatype: int
    used: int
    id: int
    flagged_group: int
    """Number of the object's group, with the bits of `GROUP_FLAG` set."""
    link: int
    """Group or object that a signature covers, with the bits of `GROUP_FLAG` for a group."""
    offset: int
    size_bytes: int
    padded_bytes: int
    """Size including the padding before the object."""
    created_s: int
    modified_s: int
    uid: int
    gid: int
    raw_name: bytes
    extra: bytes

    @property
    def name(self) -> str:
        """Name of the object as text."""
        return self.raw_name.split(b"\0", 1)[0].decode("utf-8", "replace")

    @property
    def group(self) -> int:
        """Number of the object's group, as tools show it."""
        return self.flagged_group & ~GROUP_FLAG

    @property
    def end(self) -> int:
        """Position of the first byte after the object."""
        return self.offset + self.size_bytes

    @property
    def partition(self) -> int:
        """The type of the partition, a number as in `PartitionType`, or 0 if it is not a partition."""
        if self.datatype != DataType.PARTITION:
            return 0
        return self._partition_fields().kind

    @property
    def arch(self) -> str:
        """Architecture of the partition, or ``""`` if the object is not a partition."""
        if not self.partition:
            return ""
        return _arch_name(self._partition_fields().arch_code)

    @property
    def encrypted(self) -> bool:
        """Whether the object is a partition that a runtime can mount only with a key."""
        return bool(self.partition) and self._partition_fields().file_system == _FS_ENCRYPTED

    def _partition_fields(self) -> _PartitionFields:
        return _PartitionFields._make(_PARTITION.unpack_from(self.extra))


class Superblock(NamedTuple):
    """The fields of a squashfs superblock that imgkit uses, in their order.

    The offsets of tables count from the start of the squashfs.
    """

    magic: bytes
    inodes: int
    mkfs_time_s: int
    block_bytes: int
    fragments: int
    compressor_number: int
    root_inode: int
    """Position of the root folder's inode. The low 16 bits are its offset in a block. The higher bits are the
    offset of that block in the inode table."""
    used_bytes: int
    owner_table: int
    inode_table: int
    directory_table: int
    fragment_table: int
    export_table: int

    @property
    def compressor(self) -> str:
        """Name of the compression."""
        if self.compressor_number >= len(COMPRESSORS):
            return "unknown"
        return COMPRESSORS[self.compressor_number]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImgkitRecord:
    """The JSON object ``imgkit`` of a .sif or .sqsh: its source, and how it was converted."""

    image_id: str
    """``sha256:...`` of the image configuration; empty if the source does not state it (a registry)."""
    diff_ids: tuple[str, ...]
    """``sha256:...`` of each uncompressed layer, lowest first."""
    root_sha256: str
    """Hex digest of the squashfs. A digest of the whole file would not identify the image, because headers of
    a .sif hold times and a UUID."""
    runtime: str
    """``apptainer 1.4.5``."""
    compression: str
    """``zstd 3``, ``gzip 6``, or ``runtime`` if the runtime chose."""
    route: str
    """How the file was made. ``stream`` and ``export``: imgkit wrote it from an archive or an engine.
    ``layers`` and ``definition``: a runtime built it."""
    imgkit: str
    """Version of imgkit."""
    source: str = ""
    """Name of the image, for people."""
    facts: BakedFacts | None = None
    """What imgkit and pip recorded in the image. It is None if a runtime built the file, because imgkit does
    not read the files of the image then."""
    arch: str = ""
    """Architecture, only in the record of a .sqsh. A .sif has it in its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifImage:
    """A parsed .sif."""

    path: Path
    header: Header
    table: tuple[Descriptor, ...]
    """All descriptors, including unused ones."""
    size_bytes: int
    record: ImgkitRecord | None

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """The descriptors in use."""
        return tuple(descriptor for descriptor in self.table if descriptor.used)

    @property
    def arch(self) -> str:
        """Architecture in the header."""
        return _arch_name(self.header.arch)

    @property
    def end(self) -> int:
        """Position of the first byte after the last object."""
        return max((descriptor.end for descriptor in self.descriptors), default=self.header.data_offset)

    @property
    def root(self) -> Descriptor | None:
        """The root partition, which contains the files of the image, or None."""
        for descriptor in self.descriptors:
            if descriptor.partition == PartitionType.PRIMARY:
                return descriptor
        return None

    def require_root(self) -> Descriptor:
        """Return the root partition. Raise CheckFailed if there is none."""
        if self.root is None:
            raise CheckFailed("the .sif has no root partition", where=str(self.path))
        return self.root

    @property
    def encrypted(self) -> bool:
        """Whether the root partition can be read only with a key."""
        return self.root is not None and self.root.encrypted

    @property
    def overlays(self) -> tuple[Descriptor, ...]:
        """The overlay partitions that a runtime mounts over the root partition, lowest first.

        A runtime ignores overlays that are not in the group of the root partition.
        """
        root = self.root
        if root is None:
            return ()
        in_group = [descriptor for descriptor in self.descriptors if descriptor.group == root.group]
        return tuple(descriptor for descriptor in in_group if descriptor.partition == PartitionType.OVERLAY)

    @property
    def signatures(self) -> tuple[Descriptor, ...]:
        """The signature objects. Each covers one group."""
        return tuple(
            descriptor for descriptor in self.descriptors if descriptor.datatype == DataType.SIGNATURE
        )


def is_sif(path: Path) -> bool:
    """Return whether the file begins like a .sif. Return False if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            stream.seek(MAGIC_OFFSET)
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read(path: Path) -> SifImage:
    """Return the header, the table of data objects and imgkit's record of the .sif `path`.

    Raises
    ------
    CheckFailed : the file cannot be read, is not a .sif, is cut short, or has an impossible table.
    """
    try:
        with files.open_regular(path) as stream:
            return parse(path, stream)
    except FileNotFoundError as error:
        raise CheckFailed("there is no such file", where=str(path)) from error
    except OSError as error:
        raise CheckFailed(f"cannot be read: {error.strerror}", where=str(path)) from error


def parse(path: Path, stream: BinaryIO) -> SifImage:
    """Return the header, the table of data objects and imgkit's record of an open .sif.

    The record is a data object in which imgkit notes from which image and how it made the file. It is None in
    a file of another program. The function reads no other content, but checks that all objects are inside the
    file. `path` is only used in messages.

    Raises
    ------
    CheckFailed : the file is not a .sif, is cut short, or has an impossible table.
    """
    file_bytes = os.fstat(stream.fileno()).st_size
    header = _read_header(path, stream)
    table_bytes = header.total * DESCRIPTOR.size
    # A damaged header can contain an offset that is too large for `seek`.
    stream.seek(min(header.table_offset, file_bytes))
    raw_table = stream.read(table_bytes)
    if len(raw_table) < table_bytes:
        raise CheckFailed(f"cut short within its descriptor table, at {file_bytes} bytes", where=str(path))
    # One descriptor for each data object. It has the position and size of the object in the file.
    table = tuple(map(Descriptor._make, DESCRIPTOR.iter_unpack(raw_table)))
    sif = SifImage(path=path, header=header, table=table, size_bytes=file_bytes, record=None)
    # Check all descriptors before the record is read by one of them.
    for descriptor in sif.descriptors:
        if descriptor.offset < 0 or descriptor.size_bytes < 0 or descriptor.end > file_bytes:
            raise CheckFailed(
                f"data object {descriptor.id} ends at byte {descriptor.end}, the file at {file_bytes}: "
                "cut short",
                where=str(path),
            )
    for descriptor in sif.descriptors:
        if is_record(descriptor):
            record = parse_record(path, _read_data(stream, descriptor))
            return dataclasses.replace(sif, record=record)
    return sif


def _read_header(path: Path, stream: BinaryIO) -> Header:
    """Read the global header, and check its numbers.

    The file may be hostile or damaged, so the numbers are checked before they are used.

    Raises
    ------
    CheckFailed : the file is not a .sif, or its header describes an impossible table.
    """
    header_bytes = stream.read(HEADER.size)
    if len(header_bytes) < HEADER.size or not header_bytes.startswith(MAGIC, MAGIC_OFFSET):
        raise CheckFailed("not a .sif file (no SIF_MAGIC in its header)", where=str(path))
    header = Header._make(HEADER.unpack(header_bytes))
    is_count_possible = 0 <= header.free <= header.total <= _MAX_DESCRIPTORS
    is_table_behind_header = header.table_offset >= HEADER.size
    is_table_large_enough = header.table_bytes >= header.total * DESCRIPTOR.size
    if not (is_count_possible and is_table_behind_header and is_table_large_enough):
        raise CheckFailed(
            f"its header claims {header.total} descriptors, {header.free} free: damaged", where=str(path)
        )
    return header


def is_record(descriptor: Descriptor) -> bool:
    """Return whether the object is imgkit's record, the JSON of an `ImgkitRecord`."""
    return descriptor.datatype == DataType.JSON and descriptor.name == IMGKIT_OBJECT


def _arch_name(code: bytes) -> str:
    """Return the architecture for its two digits in a header: ``b"02"`` -> ``amd64``.

    Invalid bytes give ``unknown``.
    """
    digits = code.rstrip(b"\0")
    if not digits.isdigit() or int(digits) >= len(ARCHS):
        return ARCHS[0]
    return ARCHS[int(digits)]


def arch_code(arch: str) -> bytes:
    """Return the two digits that stand for `arch` in a header and a partition: ``amd64`` -> ``b"02"``."""
    return b"%02d" % ARCHS.index(arch)


def partition_extra(kind: PartitionType, arch: str) -> bytes:
    """Return the field `Descriptor.extra` for a squashfs partition of the type `kind` for `arch`."""
    return _PARTITION.pack(_FS_SQUASHFS, kind, arch_code(arch))


def _read_data(stream: BinaryIO, descriptor: Descriptor) -> bytes:
    stream.seek(descriptor.offset)
    return stream.read(min(descriptor.size_bytes, _MAX_JSON_BYTES))


def read_object(image: SifImage, descriptor: Descriptor) -> bytes:
    """Return the content of a small data object (at most 4 MiB of it).

    `image` was parsed earlier. `descriptor` has the position of the object in the file.
    """
    with files.open_regular(image.path) as stream:
        return _read_data(stream, descriptor)


def record_text(record: ImgkitRecord) -> bytes:
    """Return the JSON of `record`."""
    values = dataclasses.asdict(record)
    # Only the record of a .sqsh has an architecture. A .sif has it in its header.
    if not record.arch:
        del values["arch"]
    # `seal` adds a digest of the values, which `parse_record` checks.
    values = json_text.seal({"schema": RECORD_SCHEMA, **values})
    return json.dumps(values, indent=1, sort_keys=True).encode()


def parse_record(path: Path, raw: bytes) -> ImgkitRecord:
    """Parse the JSON of a record, which `record_text` wrote. `path` is for messages.

    The JSON contains the fields of `ImgkitRecord`, the version of their schema, and a digest of all these.

    Raises
    ------
    CheckFailed : the JSON is damaged, is not a record, or has the schema of another version of imgkit.
    """
    try:
        values = json_text.parse(raw)
        # Before the other checks, because another schema may have other keys. `except` does not catch it.
        if values["schema"] != RECORD_SCHEMA:
            raise CheckFailed(
                f"its imgkit object has the form {values['schema']}, and this imgkit reads {RECORD_SCHEMA}",
                where=str(path),
                hint="convert the image again with this version: imgkit sif; or update imgkit",
            )
        json_text.unseal(values)  # checks the digest, and removes it from `values`
        del values["schema"]
        # `closed` makes a key an error that is not a field of the class.
        record: ImgkitRecord = json_text.build_value(ImgkitRecord, values, "it", closed=True)
        return record
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or other JSON
        raise CheckFailed(f"its imgkit object cannot be read: {error}", where=str(path)) from error


def root_superblock(image: SifImage) -> Superblock | None:
    """Return the superblock of the root partition, or None if there is no root partition with a squashfs."""
    root = image.root
    if root is None or root.size_bytes < SUPERBLOCK.size:
        return None
    return read_superblock(image.path, root.offset)


def read_superblock(path: Path, offset: int = 0) -> Superblock | None:
    """Return the superblock of the squashfs at byte `offset` of `path`, or None if no squashfs is there."""
    with files.open_regular(path) as stream:
        stream.seek(offset)
        raw = stream.read(SUPERBLOCK.size)
    if len(raw) < SUPERBLOCK.size or not raw.startswith(SQUASHFS_MAGIC):
        return None
    return Superblock(*SUPERBLOCK.unpack(raw))


def identify(path: Path, sif: SifImage) -> tuple[str, str]:
    """Return the image id of the .sif `path`, and the hex digest of its root partition.

    `sif` is the parsed file. A .sif that another tool wrote contains no image id. Then the id is made from
    the digest: ``sha256:DIGEST``. If imgkit wrote the file, the digest is the recorded one, and the root
    partition is not read.
    """
    if sif.record is None:  # another tool wrote the file
        digest = root_sha256(path)
        return f"sha256:{digest}", digest
    digest = sif.record.root_sha256
    # The record has no image id if the image came from a registry.
    return sif.record.image_id or f"sha256:{digest}", digest


def root_sha256(path: Path, *, advance: Advance | None = None) -> str:
    """Return the hex digest of the root partition of the .sif `path`.

    `advance` is called with the number of bytes read so far and the total.

    Raises
    ------
    CheckFailed : the file is not a .sif, or has no root partition.
    """
    root = read(path).require_root()
    with files.open_regular(path) as stream:
        return files.sha256(stream, root.offset, root.size_bytes, advance=advance)


def check_structure(path: Path) -> SifImage:
    """Parse a .sif that was just written, and check that its root partition is a complete squashfs.

    Raises
    ------
    CheckFailed : the squashfs is missing or cut short, or the file is not a .sif.
    """
    sif = read(path)
    superblock = root_superblock(sif)
    if superblock is None:
        raise CheckFailed("a .sif was written without a squashfs root partition", where=str(path))
    # The superblock, the header of the squashfs, says how many bytes the squashfs has.
    root_bytes = sif.require_root().size_bytes
    if superblock.used_bytes > root_bytes:
        raise CheckFailed(
            f"its root partition has {root_bytes} of {superblock.used_bytes} bytes: cut short",
            where=str(path),
        )
    return sif


def refuse_damaged(path: Path) -> None:
    """Raise CheckFailed if the sha256 of the squashfs in the .sif differs from the recorded one."""
    record = read(path).record
    # A .sif of another tool has no record, so its content cannot be verified.
    if record and root_sha256(path) != record.root_sha256:
        raise CheckFailed(
            "the .sif is damaged: its root partition has another sha256 than recorded",
            where=str(path),
            hint="copy it again",
        )
