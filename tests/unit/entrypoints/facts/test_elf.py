"""Names and versions of shared objects: as readelf prints them, and refused where a file is damaged."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path

import pytest
from shared_object import shared_object

from imgkit_entrypoints.facts import elf

NEEDS = {"libc.so.6": ("GLIBC_2.2.5", "GLIBC_2.38"), "libcxi.so.1": ("CXI_1.0",)}
LIBRARY = shared_object(
    "libx.so.1", needed=("libz.so.1",), needs=NEEDS, defines=("X_1.0", "X_1.1"), rpath="/a:/b"
)


def put(folder: Path, data: bytes) -> Path:
    path = folder / "libx.so.1"
    path.write_bytes(data)
    return path


def loaded() -> list[Path]:
    """Libraries that this Python has loaded, of glibc and others."""
    maps = Path("/proc/self/maps").read_text()
    return [Path(path) for path in sorted(set(re.findall(r"(/\S+\.so[.0-9]*)$", maps, re.MULTILINE)))]


def test_names_and_versions_are_read(tmp_path):
    library = elf.read(put(tmp_path, LIBRARY))
    assert (library.soname, library.machine, library.rpath, library.runpath) == (
        "libx.so.1",
        "x86_64",
        ("/a", "/b"),
        (),
    )
    assert library.needed == ("libz.so.1", *NEEDS)
    assert library.needs == NEEDS
    assert library.defines == ("X_1.0", "X_1.1")


@pytest.mark.programs("readelf")
@pytest.mark.parametrize("path", loaded(), ids=lambda path: path.name)
def test_real_library_reads_as_by_readelf(path):
    text = subprocess.run(["readelf", "-dVW", path], capture_output=True, text=True, check=True).stdout
    library = elf.read(path)
    assert list(library.needed) == re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert [library.soname] == (re.findall(r"\(SONAME\).*\[(.*)\]", text) or [""])
    before, _, needs = text.partition("Version needs section")
    names = re.findall(r"Name: (\S+)\s+Flags: (?!WEAK)\S+", needs)
    assert sorted(version for versions in library.needs.values() for version in versions) == sorted(names)
    assert sorted(library.needs) == sorted(re.findall(r"File: (\S+)", needs))
    _, _, defines = before.partition("Version definition section")
    rows = re.findall(r"Flags: (\S+).*Cnt: [1-9]\d*\s+Name: (\S+)", defines)
    assert list(library.defines) == [name for flags, name in rows if flags != "BASE"]


@pytest.mark.parametrize("length", [0, 3, 15, 40, 63, 100, 175, 200, 300, len(LIBRARY) - 1])
def test_truncated_file_is_refused(tmp_path, length):
    with pytest.raises(elf.NotShared):
        elf.read(put(tmp_path, LIBRARY[:length]))


def changed(offset: int, layout: str, value: int) -> bytes:
    data = bytearray(LIBRARY)
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#!/bin/sh\nexec true # a script that is as long as a header\n", "is not an ELF file"),
        (b"GROUP ( /lib/libc.so.6 ) /* a script of the linker */", "is not an ELF file"),
        (changed(4, "<B", 1), "is not a 64-bit little-endian ELF file"),
        (changed(5, "<B", 2), "is not a 64-bit little-endian ELF file"),
        (changed(16, "<H", 2), r"is not a shared object \(ELF type 2\)"),
        (changed(56, "<H", 65535), "has 65535 program headers of 56 bytes"),
        (changed(32, "<Q", 1 << 63), "is truncated: bytes"),
        (changed(120, "<I", 4), "has no dynamic section"),
        (changed(128, "<Q", 1 << 62), "is truncated: bytes"),
        (changed(152, "<Q", 16), "has a dynamic section without an end"),
        (changed(96, "<Q", 8), "which no segment holds"),
    ],
)
def test_other_file_is_refused_by_name(tmp_path, data, message):
    with pytest.raises(elf.NotShared, match=message):
        elf.read(put(tmp_path, data))


def test_chain_without_an_end_is_refused(tmp_path):
    many = {"libc.so.6": tuple(f"GLIBC_2.{number}" for number in range(4097))}
    with pytest.raises(elf.NotShared, match="more than 4096 versions"):
        elf.read(put(tmp_path, shared_object("libx.so.1", needs=many)))


def test_name_with_control_characters_is_refused(tmp_path):
    with pytest.raises(elf.NotShared, match="control characters"):
        elf.read(put(tmp_path, shared_object("lib\x1b[2J.so.1")))


def test_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "libx.so.1")
    with pytest.raises(OSError, match="not a regular file"):
        elf.read(tmp_path / "libx.so.1")
