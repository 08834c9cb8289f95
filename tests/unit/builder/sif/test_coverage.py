"""The coverage object sees every change of a .sif, and accepts added signatures."""

from __future__ import annotations

import secrets
from pathlib import Path

import bit_flips
import pytest
import small_sif

from imgkit_builder.sif import coverage, image, table
from imgkit_builder.sif.image import DataType
from imgkit_builder.sif.table import DESCRIPTOR, NewObject
from imgkit_entrypoints.errors import CheckFailed

MEANINGLESS = range(72, 80)
"""``modified_s`` of the header, as the module's docstring lists it."""
FLIPS = 400


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    return small_sif.write(tmp_path / "x.sif")


def noticed(path: Path) -> bool:
    try:
        return bool(coverage.check(path).faults)
    except CheckFailed:
        return True


def unnoticed(path: Path, flips: int, seed: int) -> list[int]:
    found = bit_flips.survivors(path, lambda: noticed(path), flips, seed)
    return [byte for byte in found if byte not in MEANINGLESS]


def test_whole_file_has_no_fault(sif: Path) -> None:
    found = coverage.check(sif)
    assert (found.covered, found.faults, found.objects) == (True, (), 5)


def test_every_flipped_bit_is_noticed(sif: Path) -> None:
    assert unnoticed(sif, FLIPS, seed=1) == []
    assert coverage.check(sif).faults == ()


def test_flip_of_each_header_byte_is_noticed(sif: Path) -> None:
    for byte in range(128):
        bit_flips.flip(sif, byte * 8 + byte % 8)
        assert noticed(sif) != (byte in MEANINGLESS), byte
        bit_flips.flip(sif, byte * 8 + byte % 8)


@pytest.mark.soak
def test_ten_thousand_flips_are_noticed(sif: Path) -> None:
    assert unnoticed(sif, 10_000, seed=secrets.randbits(32)) == []


def test_same_content_gives_same_bytes(tmp_path: Path) -> None:
    one, two = (small_sif.write(tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == two


def test_record_and_coverage_share_the_roots_group(sif: Path) -> None:
    found = image.read(sif)
    assert found.root is not None
    ours = [one for one in found.descriptors if one.name in (image.IMGKIT_OBJECT, coverage.NAME)]
    assert [one.group for one in ours] == [found.root.group] * 2


def test_added_signature_is_no_fault(sif: Path) -> None:
    small_sif.sign(sif)
    small_sif.sign(sif, b"another")
    assert coverage.check(sif).faults == ()
    assert len(image.read(sif).signatures) == 2


def test_file_of_another_tool_is_not_covered(tmp_path: Path) -> None:
    found = coverage.check(small_sif.write(tmp_path / "other.sif", covered=False))
    assert (found.covered, found.faults) == (False, ())


def test_lost_coverage_object_is_a_fault(sif: Path) -> None:
    coverage.clear(sif, names=(coverage.NAME,))
    assert coverage.check(sif).faults == ("its coverage object is missing",)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_added_object_is_named(sif: Path, group: int) -> None:
    table.add(sif, NewObject(datatype=DataType.JSON, name="extra", group=group, data=b"{}"))
    assert coverage.check(sif).faults == ("object 6 (extra) was added and is not a signature",)


def test_second_coverage_object_is_refused(sif: Path) -> None:
    content = image.read(sif)
    (coverage_object,) = (entry for entry in content.descriptors if entry.name == coverage.NAME)
    data = image.data(content, coverage_object)
    table.add(sif, NewObject(datatype=DataType.JSON, name=coverage.NAME, group=0, data=data))
    (fault,) = coverage.check(sif).faults
    assert "not the only one" in fault


def test_deleted_object_is_named(sif: Path) -> None:
    table.delete(sif, [2])
    assert "object 2 is missing" in coverage.check(sif).faults


@pytest.mark.parametrize("signed", [False, True])
def test_bytes_behind_the_end_are_counted(sif: Path, signed: bool) -> None:
    if signed:
        small_sif.sign(sif)
    with sif.open("ab") as stream:
        stream.write(b"more")
    assert coverage.check(sif).faults == ("4 bytes after the last object",)


def test_descriptor_that_points_elsewhere_is_named(sif: Path) -> None:
    """The other object has the same bytes, and the runtime would read it."""
    with sif.open("r+b") as stream:
        found = table.read(sif, stream)
        first = found.entries[0]
        stream.seek(small_sif.TABLE_AT)
        stream.write(DESCRIPTOR.pack(*first._replace(offset=first.offset + 1)))
    assert "the descriptor of object 1 (def)" in coverage.check(sif).faults


def test_bytes_hidden_before_a_signature_are_found(sif: Path) -> None:
    end = sif.stat().st_size
    table.add(sif, NewObject(datatype=DataType.SIGNATURE, name="", group=0, data=b"s", align=64))
    with sif.open("r+b") as stream:
        stream.seek(end)
        stream.write(b"x")
    assert any("bytes before object 6" in fault for fault in coverage.check(sif).faults)


def test_replaced_record_leaves_no_old_bytes(sif: Path) -> None:
    before = sif.read_bytes()
    coverage.put_record(sif, small_sif.record())
    assert sif.read_bytes() == before


def test_full_table_is_an_error(sif: Path) -> None:
    for number in range(small_sif.SLOTS - 5):
        small_sif.sign(sif, b"%d" % number)
    with pytest.raises(CheckFailed, match="all 12 descriptors"):
        small_sif.sign(sif)
