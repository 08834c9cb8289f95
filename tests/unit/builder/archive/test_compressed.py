"""gzip files of one member or of many unpack to the same bytes as Python's own reader gives."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from tars import chunks

from imgkit_builder.archive import compressed, write
from imgkit_builder.archive.compressed import Allowance
from imgkit_entrypoints.errors import CheckFailed

DRAWN = random.Random(1)  # noqa: S311 - no secret
TEXT = b"".join(b"line %d of a text\n" % number for number in range(150_000))
NOISE = DRAWN.randbytes(700_000)
MEMBERS = [gzip.compress(part, 1, mtime=0) for part in (TEXT, b"", NOISE, b"x", NOISE[:100], TEXT[:9])]
MEMBER = MEMBERS[3]


def unpacked(data: bytes, size: int = 1 << 20, allowance: Allowance | None = None) -> bytes:
    return b"".join(compressed.unpack_chunks(chunks(data, size), "gzip", name="x", allowance=allowance))


CASES = {
    "one member": gzip.compress(TEXT),
    "as imgkit writes it": b"".join(write._gzip_chunks(chunks(TEXT + NOISE))),
    "members of all sizes": b"".join(MEMBERS),
    "zeros behind the last": b"".join(MEMBERS) + bytes(2_000_000),
    "a member within a member": MEMBER + gzip.compress(NOISE + MEMBER * 3 + NOISE, 0, mtime=0) + MEMBER,
    "a start within a member": MEMBER + gzip.compress(compressed._MEMBER_START * 50 + NOISE, 0, mtime=0) * 2,
    "a member with a time": MEMBER + gzip.compress(NOISE, mtime=1) + MEMBER,
    "a member with a name": MEMBER + MEMBER[:3] + b"\x08" + MEMBER[4:10] + b"name\0" + MEMBER[10:] + MEMBER,
}


@pytest.mark.parametrize("size", [1 << 20, 4099])
@pytest.mark.parametrize("name", CASES)
def test_every_member_unpacks(name, size):
    assert unpacked(CASES[name], size) == gzip.decompress(CASES[name])


def test_members_are_unpacked_side_by_side(monkeypatch):
    """None of them comes from the reader that goes step by step."""
    monkeypatch.setattr(compressed.Gunzip, "feed", None)
    assert unpacked(b"".join(write._gzip_chunks(chunks(TEXT)))) == TEXT


@pytest.mark.parametrize("position", [5_000, -6, -1])
def test_damaged_member_is_refused(position):
    data = bytearray(b"".join(write._gzip_chunks(chunks(TEXT + NOISE))))
    data[position] ^= 0x40
    with pytest.raises(CheckFailed, match="the gzip data is damaged"):
        unpacked(bytes(data))


@pytest.mark.parametrize("missing", [1, 9, 50_000])
def test_cut_member_is_refused(missing):
    with pytest.raises(CheckFailed, match="the gzip data is cut short"):
        unpacked(b"".join(write._gzip_chunks(chunks(TEXT + NOISE)))[:-missing])


def test_rubbish_behind_a_member_is_refused():
    with pytest.raises(CheckFailed, match="the gzip data is damaged"):
        unpacked(MEMBER * 2 + b"rubbish")


def test_bomb_of_small_members_is_refused():
    packer = zlib.compressobj(9, wbits=31)
    bomb = packer.compress(bytes(50_000_000)) + packer.flush()
    with pytest.raises(CheckFailed, match="unpack to more than"):
        unpacked(MEMBER + bomb, allowance=Allowance(len(bomb), "x", 10_000_000))
    with pytest.raises(CheckFailed, match="unpack to more than"):
        unpacked(MEMBERS[5] * 100_000, allowance=Allowance(1, "x", 500_000))
