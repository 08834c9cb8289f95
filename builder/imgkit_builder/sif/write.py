"""Write a new .sif without a runtime: the same content gives the same bytes, on any machine and at any time.

`image` draws the format, `table` edits a file that exists. Times, owners and the UUID are zero, which the
runtimes accept (``apptainer build --reproducible`` writes such files too).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import image, own_files, table
from imgkit_builder.sif.image import DataType, PartitionType
from imgkit_builder.sif.table import DESCRIPTOR, HEADER, Header, NewObject, SifTable
from imgkit_entrypoints import json_text

GROUP = 1
"""Every object is in it, so that one signature covers all."""
_LAUNCH = b"#!/usr/bin/env run-singularity\n"
_VERSION = b"01"
_TABLE_AT = 4096
_DESCRIPTORS = 48
_DATA_AT = _TABLE_AT + _DESCRIPTORS * DESCRIPTOR.size


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
        return -(-end // image.PARTITION_ALIGN_BYTES) * image.PARTITION_ALIGN_BYTES


def frame(config: ImageConfig) -> Frame:
    """The frame of an image with this configuration."""
    # An engine adds empty values that the image's own configuration lacks, where BuildKit made it.
    settings = {
        name: value for name, value in (json_text.parse(config.raw).get("config") or {}).items() if value
    }
    return Frame(
        arch=config.arch,
        definition=own_files.definition(config).encode(),
        oci_config=json.dumps(settings, indent=1, sort_keys=True).encode(),
    )


def surround(part: Path, around: Frame) -> None:
    """Put header, table and objects around the root partition, which fills `part` from `Frame.root_at` on."""
    root = NewObject(
        datatype=DataType.PARTITION,
        name="root.sqfs",
        group=GROUP,
        data=b"",
        extra=image.partition_extra(PartitionType.PRIMARY, around.arch),
        align=image.PARTITION_ALIGN_BYTES,
    )
    end = part.stat().st_size
    made = SifTable(header=_header(around.arch), slots=(bytes(DESCRIPTOR.size),) * _DESCRIPTORS)
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


def _header(arch: str) -> Header:
    return Header(
        launch=_LAUNCH,
        magic=table.MAGIC,
        version=_VERSION,
        arch=image.arch_code(arch),
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
