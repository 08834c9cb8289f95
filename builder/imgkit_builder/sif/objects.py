"""Write a .sif around a squashfs, and add or remove data objects of a .sif, without singularity.

The module `image` describes the layout of a .sif and reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig, creation_time_s
from imgkit_builder.sif import image, runtime_files
from imgkit_builder.sif.conversion import AddedFiles, Format
from imgkit_builder.sif.image import DESCRIPTOR, HEADER, Advance, DataType, Descriptor, Header
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

GROUP = 1
"""The group of every object that imgkit writes. A signature covers one group, so one signature covers all."""
PARTITION_ALIGN_BYTES = 4096
"""A runtime mounts a partition only if its offset is a multiple of this number."""
# The values that Singularity and Apptainer write, too.
_LAUNCH = b"#!/usr/bin/env run-singularity\n"
_VERSION = b"01"
_TABLE_OFFSET = 4096
_DESCRIPTORS = 48
_DATA_OFFSET = _TABLE_OFFSET + _DESCRIPTORS * DESCRIPTOR.size


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """A data object that is added to a .sif."""

    datatype: int
    name: str
    group: int = GROUP
    """Number of the group, without the bits of `image.GROUP_FLAG`. A signature covers one group."""
    data: bytes | Path = field(repr=False)
    extra: bytes = b""
    align: int = 1
    """The object begins at a multiple of this number. A partition needs `PARTITION_ALIGN_BYTES`."""

    @property
    def size_bytes(self) -> int:
        """Size of the object's data."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return self.data.stat().st_size


def put_record(path: Path, record: image.ImgkitRecord) -> None:
    """Write imgkit's `record` as the last object of the .sif `path`, and remove an older record.

    Raises
    ------
    CheckFailed : the table is full, or the record cannot be read back.
    """
    sif = image.read(path)
    old_ids = [descriptor.id for descriptor in sif.descriptors if image.is_record(descriptor)]
    # Remove the old record first, so that the new one takes its place in the table. Then writing the same
    # record twice gives the same file.
    remove_objects(path, old_ids)
    new = NewObject(
        datatype=DataType.JSON,
        name=image.IMGKIT_OBJECT,
        group=sif.require_root().group,
        data=image.record_text(record),
    )
    add_object(path, new)
    if image.read(path).record != record:
        raise CheckFailed("its record cannot be read back", where=str(path), hint="please report this")


def add_object(path: Path, new: NewObject) -> Descriptor:
    """Add the object `new` after the last object of the .sif `path`, and return its descriptor.

    The file then ends with the new object. The object gets the time of the header, so that the same content
    gives the same bytes.

    Raises
    ------
    CheckFailed : the file is not a .sif, or its table has no free descriptor.
    """
    with path.open("r+b") as stream:
        sif = image.parse(path, stream)
        unused_id = _find_unused_id(sif)  # raises CheckFailed if the table is full
        descriptor = _make_descriptor(
            new, new.size_bytes, id=unused_id, end=sif.end, time_s=sif.header.created_s
        )
        # Bytes of a removed object may follow the last object. They must not end up in the padding. After
        # `truncate`, the system fills the gap before `offset` with zeros.
        stream.truncate(sif.end)
        stream.seek(descriptor.offset)
        stream.writelines(_chunks(new.data))
        # In this order, a killed run leaves no descriptor without its object.
        _write_descriptor(stream, sif, descriptor.id, DESCRIPTOR.pack(*descriptor))
        _write_header(stream, sif.header, free=sif.header.free - 1, end=descriptor.end)
    return descriptor


def _find_unused_id(sif: image.SifImage) -> int:
    """Return the id of the first unused descriptor. An id is the index in the table plus 1.

    Raises
    ------
    CheckFailed : all descriptors are in use. Runtimes and imgkit write tables of 48 descriptors.
    """
    for id, descriptor in enumerate(sif.table, 1):
        if not descriptor.used:
            return id
    raise CheckFailed(f"all {len(sif.table)} descriptors of the .sif are in use", where=str(sif.path))


def _make_descriptor(new: NewObject, size_bytes: int, *, id: int, end: int, time_s: int) -> Descriptor:
    """Return the descriptor of the object `new`: its entry in the table of a .sif.

    Parameters
    ----------
    size_bytes : size of the object.
    id : number of the object.
    end : position at which the object before it ends. The new object begins at the next multiple of its
        `align`, and padding fills the gap.
    time_s : time of creation and of the last change.
    """
    offset = _round_up(end, new.align)
    return Descriptor(
        datatype=new.datatype,
        used=1,
        id=id,
        flagged_group=image.GROUP_FLAG | new.group,
        link=0,
        offset=offset,
        size_bytes=size_bytes,
        padded_bytes=offset - end + size_bytes,
        created_s=time_s,
        modified_s=time_s,
        uid=0,
        gid=0,
        raw_name=new.name.encode(),
        extra=new.extra,
    )


def _round_up(position: int, align: int) -> int:
    """Return the smallest multiple of `align` that is not below `position`."""
    # Floor division of the negated number rounds up.
    return -(-position // align) * align


def _chunks(data: bytes | Path) -> Iterator[bytes]:
    """Yield `data` if it is bytes. If it is a path, yield the content of the file in chunks."""
    if isinstance(data, bytes):
        yield data
        return
    with files.open_regular(data) as stream:
        yield from iter(lambda: stream.read(files.CHUNK_BYTES), b"")


def remove_objects(path: Path, ids: Collection[int]) -> None:
    """Remove the objects `ids` from the .sif `path`. The file then ends with the last remaining object.

    An object in front of it is filled with zeros, because other objects are not moved.

    Raises
    ------
    CheckFailed : the file is not a .sif.
    """
    with path.open("r+b") as stream:
        sif = image.parse(path, stream)
        removed = [descriptor for descriptor in sif.descriptors if descriptor.id in ids]
        remaining = [descriptor for descriptor in sif.descriptors if descriptor.id not in ids]
        end = max((descriptor.end for descriptor in remaining), default=sif.header.data_offset)
        for descriptor in removed:
            # Zeros make the bytes independent of what was removed, and leave nothing to read for others. For
            # an object after `end`, there is nothing to write: `truncate` cuts it off.
            _write_zeros(stream, descriptor.offset, min(descriptor.end, end))
            _write_descriptor(stream, sif, descriptor.id, bytes(DESCRIPTOR.size))
        stream.truncate(end)
        _write_header(stream, sif.header, free=sif.header.free + len(removed), end=end)


def _write_zeros(stream: BinaryIO, start: int, end: int) -> None:
    """Overwrite the bytes from `start` to `end` with zeros, in chunks, so that memory stays small.

    If `end` is not after `start`, nothing is written.
    """
    stream.seek(start)
    for position in range(start, end, files.CHUNK_BYTES):
        stream.write(bytes(min(files.CHUNK_BYTES, end - position)))


def _write_descriptor(stream: BinaryIO, sif: image.SifImage, id: int, raw: bytes) -> None:
    """Replace the descriptor with the number `id` in the table by `raw`, a packed descriptor."""
    stream.seek(sif.header.table_offset + (id - 1) * DESCRIPTOR.size)
    stream.write(raw)


def _write_header(stream: BinaryIO, header: Header, *, free: int, end: int) -> None:
    """Write `header` with `free` as the number of unused descriptors and `end` as the end of the objects."""
    stream.seek(0)
    stream.write(HEADER.pack(*header._replace(free=free, data_bytes=end - header.data_offset)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SifMetadata:
    """The content of a .sif before its root partition: what its header and its data objects are made from.

    The root partition is the squashfs with the files of the image.
    """

    arch: str
    definition: bytes
    oci_config: bytes

    @property
    def objects(self) -> tuple[NewObject, ...]:
        """The objects before the root partition, in the order that the runtimes use."""
        definition = NewObject(datatype=DataType.DEFFILE, name="deffile", data=self.definition)
        if not self.oci_config:
            return (definition,)
        config = NewObject(datatype=DataType.JSON, name="oci-config.json", data=self.oci_config)
        return (definition, config)

    @property
    def root_offset(self) -> int:
        """Byte at which the root partition begins."""
        end = _DATA_OFFSET + len(self.definition) + len(self.oci_config)
        return _round_up(end, PARTITION_ALIGN_BYTES)


def make_metadata(config: ImageConfig) -> SifMetadata:
    """Return the architecture and the data objects for a .sif of an image with this configuration.

    Raises
    ------
    CheckFailed : the .sif format has no code for the architecture of the image.
    """
    allowed = image.ARCHS[1:]  # the first one is "unknown"
    if config.arch not in allowed:
        raise CheckFailed(
            f"no .sif can be for the architecture {config.arch!r}", hint=f"allowed: {', '.join(allowed)}"
        )
    # All settings, also those for which `ImageConfig` has no field.
    settings = json_text.parse(config.raw).get("config") or {}
    # An engine adds empty values to the configuration that BuildKit wrote. Without empty values, an image
    # gives the same .sif whether it comes from an engine or from an archive.
    settings = {name: value for name, value in settings.items() if value}
    return SifMetadata(
        arch=config.arch,
        definition=runtime_files.definition(config).encode(),
        oci_config=json.dumps(settings, indent=1, sort_keys=True).encode(),
    )


def write_metadata(path: Path, metadata: SifMetadata) -> None:
    """Write the header, table and objects of a .sif before the squashfs in the file `path`.

    The squashfs must have been written before. It fills the file from byte `SifMetadata.root_offset` to the
    end.
    """
    root_bytes = path.stat().st_size - metadata.root_offset
    descriptors = _make_descriptors(metadata, root_bytes)
    header = _make_header(metadata.arch, descriptors)
    with path.open("r+b") as stream:
        stream.write(HEADER.pack(*header).ljust(_TABLE_OFFSET, b"\0"))
        stream.write(_pack_table(descriptors).ljust(_DATA_OFFSET - _TABLE_OFFSET, b"\0"))
        # The last descriptor belongs to the root partition, which is not written here.
        for new, descriptor in zip(metadata.objects, descriptors[:-1], strict=True):
            stream.seek(descriptor.offset)
            stream.writelines(_chunks(new.data))


def has_metadata(sif: image.SifImage, metadata: SifMetadata) -> bool:
    """Return whether the header and objects of the .sif are still those that `write_metadata` writes.

    `metadata` contains the objects before the root partition, which is the squashfs with the image's files.
    A signature that was added later makes no difference. It changes two counts and the modification time in
    the header, so these three fields are not compared. The content of the root partition is not compared
    either, because the caller compares its digest.
    """
    if sif.root is None:
        return False
    expected_descriptors = _make_descriptors(metadata, sif.root.size_bytes)
    expected_header = _make_header(metadata.arch, expected_descriptors)
    # Later objects, such as signatures, follow these descriptors and are not compared.
    descriptors = sif.table[: len(expected_descriptors)]
    has_same_header = _pack_fixed_fields(sif.header) == _pack_fixed_fields(expected_header)
    has_same_table = _pack_table(descriptors) == _pack_table(expected_descriptors)
    if not has_same_header or not has_same_table:
        return False
    # The last descriptor is that of the root partition.
    for expected, descriptor in zip(metadata.objects, descriptors[:-1], strict=True):
        if image.read_object(sif, descriptor) != expected.data:
            return False
    return True


def _pack_table(descriptors: Iterable[Descriptor]) -> bytes:
    return b"".join(DESCRIPTOR.pack(*descriptor) for descriptor in descriptors)


def _pack_fixed_fields(header: Header) -> bytes:
    """Return the bytes of `header`, with zeros in the fields that change when an object is added."""
    return HEADER.pack(*header._replace(modified_s=0, free=0, data_bytes=0))


def _make_descriptors(metadata: SifMetadata, root_bytes: int) -> list[Descriptor]:
    """Return the descriptors of a new .sif, to which imgkit's record has not been added yet.

    The last descriptor is that of the root partition, whose size is `root_bytes`. All times are 0, so that
    the same content gives the same descriptors.
    """
    descriptors: list[Descriptor] = []
    end = _DATA_OFFSET
    for id, new in enumerate(metadata.objects, 1):
        descriptor = _make_descriptor(new, new.size_bytes, id=id, end=end, time_s=0)
        descriptors.append(descriptor)
        end = descriptor.end  # the next object follows without a gap
    root = NewObject(
        datatype=DataType.PARTITION,
        name="root.sqfs",
        data=b"",  # mksquashfs writes the partition
        extra=image.partition_extra(image.PartitionType.PRIMARY, metadata.arch),
        align=PARTITION_ALIGN_BYTES,  # the kernel mounts the partition from the file
    )
    descriptors.append(_make_descriptor(root, root_bytes, id=len(descriptors) + 1, end=end, time_s=0))
    return descriptors


def _make_header(arch: str, descriptors: Sequence[Descriptor]) -> Header:
    """Return the header of a .sif with the objects in `descriptors`.

    Times and UUID are zero, so that the same image always gives the same file.
    """
    return Header(
        launch=_LAUNCH,
        magic=image.MAGIC,
        version=_VERSION,
        arch=image.arch_code(arch),
        uuid=bytes(16),
        created_s=0,
        modified_s=0,
        free=_DESCRIPTORS - len(descriptors),
        total=_DESCRIPTORS,
        table_offset=_TABLE_OFFSET,
        table_bytes=_DESCRIPTORS * DESCRIPTOR.size,
        data_offset=_DATA_OFFSET,
        data_bytes=descriptors[-1].end - _DATA_OFFSET,
    )


class Sif(Format):
    """The .sif of Singularity and Apptainer."""

    name = "sif"
    is_started_here = True

    def matches(self, path: Path) -> bool:
        """Return whether the file begins as a .sif."""
        return image.is_sif(path)

    def added_files(self, config: ImageConfig, note: Callable[[str], None]) -> AddedFiles:
        """Return the files that a runtime expects, and the links and mount points to add if missing."""
        for name in runtime_files.skipped_variables(config):
            note(f"the image sets the variable {name!r}, which no shell can set: left out")
        created_s = creation_time_s(config.created)
        links = runtime_files.runtime_links(created_s)
        mount_points = runtime_files.mount_points(created_s)
        return AddedFiles(replacing=runtime_files.runtime_files(config), if_missing=links + mount_points)

    def squashfs_offset(self, config: ImageConfig) -> int:
        """Return the byte at which the squashfs begins, after the header and objects."""
        return make_metadata(config).root_offset

    def complete(self, path: Path, config: ImageConfig) -> None:
        """Write the header and objects before the squashfs, and check the structure of the file."""
        write_metadata(path, make_metadata(config))
        image.check_structure(path)

    def put_record(
        self, path: Path, record: image.ImgkitRecord, advance: Advance
    ) -> tuple[image.ImgkitRecord, str]:
        """Add the record to the file. The checksum is empty, as a .sif has no checksum file."""
        # The record needs no architecture, since the header of the .sif has it.
        record = replace(record, root_sha256=image.root_sha256(path, advance=advance), arch="")
        put_record(path, record)
        return record, ""

    def intact_record(
        self, path: Path, config: ImageConfig, accepts: Callable[[image.ImgkitRecord], bool]
    ) -> image.ImgkitRecord | None:
        """Return the record of the .sif `path` if the file need not be written again, else None.

        A record is a data object in which imgkit notes from which image and how it made the file. The file is
        kept if `accepts` is true for its record, and if the squashfs and the objects that imgkit wrote are
        undamaged. A damaged file is no error here, because it will be written again.
        """
        try:
            sif = image.read(path)
            record = sif.record
            # A runtime mounts overlay partitions over the image, so its files would differ.
            if record is None or sif.overlays or not accepts(record):
                return None
            # With the route "layers", a runtime wrote the headers. Their expected content is unknown.
            if record.route != "layers" and not has_metadata(sif, make_metadata(config)):
                return None
            # The slowest check comes last: the digest reads gigabytes.
            if image.root_sha256(path) != record.root_sha256:
                return None
        except CheckFailed:
            return None
        return record
