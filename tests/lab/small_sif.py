"""A .sif of a few kilobytes, written without a runtime: definition, configuration, root partition, record."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import image, objects
from imgkit_builder.sif.image import (
    ARCHS,
    DESCRIPTOR,
    HEADER,
    DataType,
    Header,
    ImgkitRecord,
    PartitionType,
)
from imgkit_builder.sif.objects import NewObject

SLOTS = 12
TABLE_AT = 4096
DATA_AT = TABLE_AT + SLOTS * DESCRIPTOR.size
ROOT = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 1 << 20, 0, 6, 20, 0, 1, 4, 0, 0, 96) + bytes(range(256))
"""Has the superblock of a squashfs, and nothing else of one."""
CREATED_S = 1710892800
CONFIG = ImageConfig(
    image_id="sha256:" + "0" * 64,
    raw=b"{}",
    os="linux",
    arch="amd64",
    diff_ids=(),
    labels={},
    created="2024-03-20T00:00:00Z",
)
"""Of an image without layers that was built at `CREATED_S`."""


def write(
    path: Path, root: bytes | Path = ROOT, *, arch: str = "amd64", recorded: bool = True, seed: int = 1
) -> Path:
    """Write a .sif with the root partition `root`; another `seed` gives another one.

    Only imgkit's have its record. `root` is then bytes.
    """
    code = b"%02d\0" % ARCHS.index(arch)
    header = Header(
        launch=b"#!/usr/bin/env run-singularity\n",
        magic=image.MAGIC,
        version=b"01\0",
        arch=code,
        uuid=bytes([seed]) * 16,
        created_s=1_700_000_000,
        modified_s=1_700_000_000,
        free=SLOTS,
        total=SLOTS,
        table_offset=TABLE_AT,
        table_bytes=SLOTS * DESCRIPTOR.size,
        data_offset=DATA_AT,
        data_bytes=0,
    )
    path.write_bytes(HEADER.pack(*header).ljust(DATA_AT, b"\0"))
    objects.add_object(
        path, NewObject(datatype=DataType.DEFFILE, name="def", group=1, data=b"bootstrap: oci\n")
    )
    objects.add_object(
        path, NewObject(datatype=DataType.JSON, name="oci-config.json", group=1, data=b'{"a": 1}')
    )
    extra = struct.pack("<ii3s", 1, PartitionType.PRIMARY, code)
    objects.add_object(
        path,
        NewObject(datatype=DataType.PARTITION, name="root", group=1, data=root, extra=extra, align=4096),
    )
    if recorded:
        assert isinstance(root, bytes)
        objects.put_record(path, record(root))
    return path


def record(root: bytes = ROOT) -> ImgkitRecord:
    return ImgkitRecord(
        image_id=f"sha256:{'1' * 64}",
        diff_ids=(f"sha256:{'2' * 64}",),
        root_sha256=hashlib.sha256(root).hexdigest(),
        runtime="apptainer 1.4.5",
        compression="zstd 3",
        route="layers",
        imgkit="0.3.0",
        source="small:1",
    )


def sign(path: Path, data: bytes = b"-----BEGIN PGP SIGNED MESSAGE-----\n") -> None:
    """Add an object as a runtime adds a signature: in no group, and linked to group 1."""
    entry = objects.add_object(path, NewObject(datatype=DataType.SIGNATURE, name="", group=0, data=data))
    header = image.read(path).header
    with path.open("r+b") as stream:
        stream.write(HEADER.pack(*header._replace(modified_s=1_800_000_000)))
        stream.seek(header.table_offset + (entry.id - 1) * DESCRIPTOR.size)
        stream.write(DESCRIPTOR.pack(*entry._replace(link=image.GROUP_FLAG | 1)))
