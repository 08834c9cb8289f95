"""A .sif is intact as long as its squashfs, its record and what imgkit wrote around them are as written."""

from __future__ import annotations

import struct
from pathlib import Path

import bit_flips
import pytest
import small_sif

from imgkit_builder.base import checks
from imgkit_builder.examine.verify import verify_file
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_builder.sif import image, objects
from imgkit_builder.sif.baked_facts import BakedFacts, Distribution
from imgkit_builder.sif.conversion import Format
from imgkit_builder.sif.image import DataType, ImgkitRecord, PartitionType
from imgkit_builder.sif.objects import NewObject, Sif
from imgkit_builder.sif.sqsh import Sqsh
from imgkit_entrypoints.errors import CheckFailed

CONFIG = parse_config(
    b'{"architecture": "amd64", "config": {"Env": ["A=1"]}, "rootfs": {"diff_ids": ["sha256:%064d"]}}' % 1,
    where="x",
)
SQUASHFS = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 1 << 20, 0, 6, 20, 0, 1, 4, 0, 0, 300) + bytes(
    range(1, 253)
)


FACTS = BakedFacts(manifest="{}", distributions=(Distribution(name="torch"),))


def write(path: Path, format: Format, *, route: str = "stream") -> ImgkitRecord:
    """Write a file of `format` as a conversion does."""
    offset = format.squashfs_offset(CONFIG)
    path.write_bytes(bytes(offset) + SQUASHFS)
    format.complete(path, CONFIG)
    record = ImgkitRecord(
        image_id=CONFIG.image_id,
        diff_ids=CONFIG.diff_ids,
        root_sha256="",
        runtime="imgkit 0",
        compression="zstd 3",
        route=route,
        imgkit="0",
        facts=FACTS,
    )
    record, checksum = format.put_record(path, record, lambda *_: None)
    if checksum:
        Path(f"{path}.sha256").write_text(f"{checksum}  {path.name}\n")
    return record


def is_intact(path: Path, config: ImageConfig = CONFIG) -> bool:
    return Sif().intact_record(path, config, is_this_image) is not None


def is_this_image(record: ImgkitRecord) -> bool:
    return (record.image_id, record.diff_ids) == (CONFIG.image_id, CONFIG.diff_ids)


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    write(tmp_path / "x.sif", Sif())
    return tmp_path / "x.sif"


def extents(path: Path) -> list[range]:
    """Where header, descriptors and objects are, without the record."""
    sif = image.read(path)
    written = [descriptor for descriptor in sif.descriptors if descriptor.name != image.IMGKIT_OBJECT]
    ranges = [range(descriptor.offset, descriptor.end) for descriptor in written]
    table = sif.header.table_offset
    return [range(128), range(table, table + (len(ranges) - 1) * image.DESCRIPTOR.size), *ranges]


def test_flipped_bit_in_what_imgkit_wrote_is_noticed(sif):
    counts = (*range(72, 80), *range(80, 88), *range(120, 128))  # signing changes them
    assert is_intact(sif)
    for extent in extents(sif):
        for byte in (*extent[:: max(len(extent) // 60, 1)], extent[-1]):
            bit_flips.flip(sif, byte * 8 + byte % 8)
            assert is_intact(sif) is False or byte in counts, byte
            bit_flips.flip(sif, byte * 8 + byte % 8)
    assert is_intact(sif)


def test_flipped_bit_in_the_record_is_noticed(sif):
    (record,) = (item for item in image.read(sif).descriptors if image.is_record(item))
    for byte in range(record.offset, record.end):
        bit_flips.flip(sif, byte * 8 + byte % 8)
        assert not is_intact(sif), byte
        assert not checks.passed(verify_file(sif)), byte
        bit_flips.flip(sif, byte * 8 + byte % 8)
    assert is_intact(sif)


def test_signed_file_and_added_objects_are_no_difference(sif):
    small_sif.sign(sif)
    small_sif.sign(sif, b"another")
    objects.add_object(sif, NewObject(datatype=DataType.JSON, name="notes", data=b"{}"))
    assert is_intact(sif)
    assert len(image.read(sif).signatures) == 2


def overlay(path: Path) -> None:
    extra = image.partition_extra(PartitionType.OVERLAY, "amd64")
    objects.add_object(
        path, NewObject(datatype=DataType.PARTITION, name="o", data=b"x", extra=extra, align=4096)
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def no_record(path: Path) -> None:
    objects.remove_objects(path, [image.read(path).descriptors[-1].id])


def no_sif(path: Path) -> None:
    path.write_text("mine")


@pytest.mark.parametrize("change", [overlay, cut, no_record, no_sif, Path.unlink])
def test_file_that_shows_something_else_is_not_intact(sif, change):
    change(sif)
    assert not is_intact(sif)


def test_definition_of_another_image_is_a_difference(sif):
    changed_config = parse_config(CONFIG.raw.replace(b"A=1", b"A=2"), where="x")
    assert not is_intact(sif, changed_config)


def test_only_squashfs_and_record_count_where_a_runtime_built(tmp_path):
    path = small_sif.write(tmp_path / "x.sif")

    def any_record(_: ImgkitRecord) -> bool:
        return True

    assert Sif().intact_record(path, CONFIG, any_record) == image.read(path).record
    root = image.read(path).require_root()
    bit_flips.flip(path, (root.end - 1) * 8)
    assert Sif().intact_record(path, CONFIG, any_record) is None
    with pytest.raises(CheckFailed, match="damaged"):
        image.refuse_damaged(path)


def test_same_content_gives_same_bytes(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    assert write(first, Sif()) == write(second, Sif()) == image.read(first).record
    assert first.read_bytes() == second.read_bytes()


def test_flipped_bit_in_a_sqsh_is_noticed(tmp_path):
    path = tmp_path / "x.sqsh"
    write(path, Sqsh())
    for byte in range(0, path.stat().st_size, 7):
        bit_flips.flip(path, byte * 8)
        assert Sqsh().intact_record(path, CONFIG, is_this_image) is None, byte
        bit_flips.flip(path, byte * 8)
    assert Sqsh().intact_record(path, CONFIG, is_this_image)


def test_replaced_record_leaves_no_old_bytes(sif):
    before, record = sif.read_bytes(), image.read(sif).record
    assert record
    objects.put_record(sif, record)
    assert sif.read_bytes() == before


def test_full_table_is_an_error(tmp_path):
    path = small_sif.write(tmp_path / "x.sif")
    for number in range(small_sif.SLOTS - 4):
        small_sif.sign(path, b"%d" % number)
    with pytest.raises(CheckFailed, match="all 12 descriptors"):
        small_sif.sign(path)
