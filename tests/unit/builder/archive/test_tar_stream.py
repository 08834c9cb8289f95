"""Tars are read as tarfile reads them, whatever the chunks; damage is an error."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile

import pytest
from refusals import refused
from tars import TarEntry, changed_header, chunks, tar_entry, tar_of_entries

from imgkit_builder.archive.tar_read import TarLimits, TarStream, read_headers
from imgkit_builder.archive.tar_write import pax_header, ustar_header
from imgkit_entrypoints.errors import CheckFailed

every_form = pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
FILE = ustar_header(name=b"one", kind=b"0")
SIZE, UID = slice(124, 136), slice(108, 116)
LONG = "d" * 90 + "/" + "f" * 120


def sample(form: int) -> bytes:
    def entry(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: object) -> TarEntry:
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        return tar_entry(name, data, kind, mode=0o4751, mtime=946684800, **fields)

    return tar_of_entries(
        [
            entry("./dir", kind=tarfile.DIRTYPE),
            entry("dir/empty"),
            entry("dir/file", 1000),
            entry("dir/block", 512),
            entry("dir/ünïcode\n", 1),
            entry(LONG, 700),
            entry("link", kind=tarfile.SYMTYPE, linkname="../" + LONG),
            entry("hard", kind=tarfile.LNKTYPE, linkname=LONG),
            entry("device", kind=tarfile.CHRTYPE),
            entry("big owner", 3, uid=3_000_000),
        ],
        form=form,
    )


@every_form
@pytest.mark.parametrize("size", [1, 511, 512, 513, 1 << 20])
def test_same_as_tarfile(form, size):
    data = sample(form)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [
            (
                member.name.removeprefix("./"),
                member.type,
                member.linkname,
                member.mode,
                int(member.mtime),
                tar.extractfile(member).read() if member.isreg() else b"",  # type: ignore[union-attr]
            )
            for member in tar
        ]
    stream = TarStream(chunks(data, size), name="x")
    members = [
        (member.name, member.kind, member.link, member.mode, member.mtime_s, b"".join(stream.body()))
        for member in stream
    ]
    assert members == expected


def raw_members(stream: TarStream) -> bytes:
    return b"".join(
        member.extended + member.header + b"".join(stream.body()) + bytes(-member.size_bytes % 512)
        for member in stream
    )


@every_form
def test_raw_blocks_make_the_same_tar(form):
    data = sample(form)
    raw = raw_members(TarStream(chunks(data, 700), name="x"))
    assert data.startswith(raw)
    assert not data[len(raw) :].strip(b"\0")


def test_unread_bodies_are_skipped():
    stream = TarStream(chunks(sample(tarfile.PAX_FORMAT), 100), name="x")
    assert len([member.name for member in stream]) == 10


def test_base_256_size_read():
    header = changed_header(FILE, (SIZE, b"\x80" + (9 << 30).to_bytes(11, "big")))
    member = next(iter(TarStream(iter([header]), name="x")))
    assert member.size_bytes == 9 << 30


def test_own_headers_read_by_tarfile():
    data = pax_header({"mtime": b"5.5", "path": b"p" * 200})
    data += ustar_header(name=b"short", kind=b"2", mode=0o777, link=b"target") + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (member,) = tar.getmembers()
    assert (member.name, member.linkname, member.mtime) == ("p" * 200, "target", 5.5)


def test_too_long_name_refused():
    with pytest.raises(ValueError, match="too long"):
        ustar_header(name=b"n" * 101, kind=b"0")


def test_size_beyond_any_file_is_cut_short(tmp_path):
    """No file has a position of 64 bits, so reading there is an OverflowError."""
    path = tmp_path / "x.tar"
    path.write_bytes(changed_header(FILE, (SIZE, b"\x80\0\0\0" + (2**63 - 1).to_bytes(8, "big"))))
    with pytest.raises(CheckFailed, match="cut short"):
        list(read_headers(path))


@pytest.mark.parametrize("cut", [1, 100, 512, 600, 5000])
def test_cut_anywhere_refused(cut):
    data = sample(tarfile.PAX_FORMAT)
    content = len(data.rstrip(b"\0"))
    with pytest.raises(CheckFailed, match="cut short"):
        list(TarStream(chunks(data[: content - cut], 512), name="x"))


def test_missing_end_refused():
    assert len(list(TarStream(iter([FILE, bytes(512)]), name="x"))) == 1
    with pytest.raises(CheckFailed, match="cut short, at byte 512"):
        list(TarStream(iter([FILE]), name="where"))


def test_wrong_checksum_refused():
    data = bytearray(sample(tarfile.GNU_FORMAT))
    data[3] ^= 1
    with refused(CheckFailed, "checksum is wrong, at byte 512", where="a.tar"):
        list(TarStream(iter([bytes(data)]), name="a.tar"))


def test_huge_extended_header_refused():
    header = ustar_header(name=b"x", kind=b"x", size_bytes=1 << 30)
    with pytest.raises(CheckFailed, match="extended headers of more than 1048576 bytes"):
        list(TarStream(iter([header]), name="x"))


@pytest.mark.parametrize("records", [b"99999 a=b\n", b"x a=b\n", b"0 a=b\n", b"2 a=b\n"])
def test_bad_pax_records_refused(records):
    data = ustar_header(name=b"x", kind=b"x", size_bytes=len(records)) + records.ljust(512, b"\0")
    data += FILE + bytes(1024)
    with pytest.raises(CheckFailed, match="pax header that cannot be read"):
        list(TarStream(iter([data]), name="x"))


@pytest.mark.parametrize(
    "data",
    [
        pax_header({"size": b"-1"}) + FILE,
        pax_header({"size": b"9" * 5000}) + FILE,
        pax_header({"size": "\u00b2".encode()}) + FILE,
        pax_header({"size": b"1_0"}) + FILE + bytes(512),
        pax_header({"mtime": b"inf"}) + FILE,
        pax_header({"path": b"a\0b"}) + FILE,
        pax_header({"path": b"p" * 5000}) + FILE,
        pax_header({"uid": b"4294967296"}) + FILE,
        changed_header(FILE, (SIZE, b"\xff" * 12)),
        changed_header(FILE, (SIZE, b"\x80" + b"\xff" * 11)),
        changed_header(FILE, (SIZE, b"-0000000001\0")),
        changed_header(FILE, (UID, b"0o17777\0")),
        pax_header({"comment": b"c" * 1000}) * 1100 + FILE,
        pax_header({"GNU.sparse.map": b"5,1", "GNU.sparse.size": b"3"}) + FILE,
        pax_header({"GNU.sparse.map": b"9,1,0,1", "GNU.sparse.size": b"20"}) + FILE,
        pax_header({"GNU.sparse.major": b"1", "GNU.sparse.realsize": b"3"}) + FILE,
    ],
)
def test_lying_number_refused(data):
    with pytest.raises(CheckFailed, match="an incomplete or damaged tar archive"):
        list(TarStream(iter([data + bytes(1024)]), name="x"))


def test_no_step_for_a_size_that_lies():
    """A body that is not there is noticed at once, not counted down."""
    stream = TarStream(iter([pax_header({"size": b"9223372036854775807"}) + FILE, bytes(1024)]), name="x")
    with pytest.raises(CheckFailed, match="cut short"):
        list(stream)


@pytest.mark.parametrize(
    ("limits", "says"),
    [(TarLimits(entries=3), "more than 3 entries"), (TarLimits(hole_bytes=10**9), "more than 1 GB")],
)
def test_tar_beyond_a_limit_is_refused(limits, says):
    holes = pax_header({"GNU.sparse.map": b"0,0", "GNU.sparse.size": b"300000000"}) + FILE
    with pytest.raises(CheckFailed, match=says):
        list(TarStream(iter([holes * 4 + bytes(1024)]), name="x", limits=limits))


@pytest.mark.parametrize(
    "flags",
    [
        ["--format=gnu"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_sparse_file_as_gnu_tar_writes_it(tmp_path, flags):
    content = bytearray(3 << 20)
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(len(content))
        for number in range(30):
            text = b"%d" % number * 4096
            os.pwrite(file.fileno(), text, number * 100_000)
            content[number * 100_000 : number * 100_000 + len(text)] = text
    (tmp_path / "after").write_text("after")
    archive = subprocess.run(
        ["tar", "-S", *flags, "-C", str(tmp_path), "-c", "holes", "after"], check=True, stdout=subprocess.PIPE
    ).stdout
    stream = TarStream(chunks(archive, 1000), name="x")
    files = {member.name: (member.content_bytes, b"".join(stream.content())) for member in stream}
    assert files == {"holes": (len(content), bytes(content)), "after": (5, b"after")}
    raw = raw_members(TarStream(chunks(archive, 1000), name="x"))
    assert archive.startswith(raw)
    assert len(archive) - len(raw) <= 10240
    assert len(archive) < 1 << 20
