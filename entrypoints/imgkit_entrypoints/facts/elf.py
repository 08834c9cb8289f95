"""Read the name, the needed libraries and the symbol versions of a shared object, as the dynamic linker does.

The System V gABI and glibc's elf.h define the format. A file may be damaged or hostile. So every offset is
compared with the size of the file, and the size of every table with a limit.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imgkit_entrypoints import files

# Limits for files that are damaged or hostile.
_MAX_SEGMENTS = 256
_MAX_ENTRIES = 4096
"""Largest number of entries in the dynamic section, and of needed or defined versions."""
_MAX_NAMES_BYTES = 8 << 20
"""Largest size of the string table. That of a large C++ library has 3 MB."""
_MAX_NAME_BYTES = 1024

# Constants from elf.h: the file type ET_DYN, the segment types PT_LOAD and PT_DYNAMIC, and the tags of the
# dynamic section.
_SHARED_OBJECT = 3
_LOAD, _DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_WEAK_FLAG, _BASE_FLAG = 2, 1
"""VER_FLG_WEAK and VER_FLG_BASE. A weak version may be missing. The base version is the name of the file."""
# Layouts for `struct` with the fields that are read. "x" skips a byte of a field that is not needed.
# Elf64_Verneed: vn_cnt, vn_file, vn_aux, vn_next. Elf64_Vernaux: vna_flags, vna_name, vna_next. Elf64_Verdef:
# vd_flags, vd_cnt, vd_aux, vd_next.
_VERNEED_ENTRY, _VERNAUX_ENTRY, _VERDEF_ENTRY = "<2xHIII", "<4xH2xII", "<2xH2xH4xII"
_ENTRY = struct.Struct("<qQ")
"""A tag of the dynamic section and its value (Elf64_Dyn)."""
# Name of the architecture by the number in e_machine (EM_X86_64, EM_AARCH64).
MACHINES = {62: "x86_64", 183: "aarch64"}


class NotShared(ValueError):
    """A file is not a complete 64-bit shared object.

    The text is the end of a sentence about the file, such as ``is not an ELF file``.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedObject:
    """The names and symbol versions in the dynamic section of a library."""

    machine: str
    """Architecture as ``uname -m`` prints it."""
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    """Folders that the dynamic linker searches before LD_LIBRARY_PATH; they may contain ``$ORIGIN``."""
    runpath: tuple[str, ...]
    """Folders that the dynamic linker searches after LD_LIBRARY_PATH."""
    needs: Mapping[str, tuple[str, ...]]
    """Needed symbol versions by the library that must define them: ``{"libc.so.6": ("GLIBC_2.34",)}``."""
    defines: tuple[str, ...]
    """Symbol versions that the library defines. Empty if its symbols have no versions."""


def read(path: Path) -> SharedObject:
    """Return the names and symbol versions in the shared object `path`, such as libfabric.so.1.

    Raises
    ------
    NotShared : the file is not a shared object, or it is damaged.
    OSError : the file cannot be read.
    """
    with files.open_regular(path) as file:
        return _Object(file).parse()


class _Segment(NamedTuple):
    """A part of the file that is loaded into memory, from a program header (Elf64_Phdr in elf.h)."""

    kind: int
    offset: int
    """Beginning of the segment in the file."""
    address: int
    """Beginning of the segment in memory."""
    file_size: int


class _Object:
    """A shared object that is open for reading. The constructor parses the header."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the header of an ELF file, and the table of segments (the parts that are loaded into memory).

        Raises
        ------
        NotShared : the file is not a shared object for a 64-bit little-endian machine.
        """
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        # Bytes 4 to 6 of e_ident must be ELFCLASS64, ELFDATA2LSB and EV_CURRENT.
        identity = self.read(0, 16)
        if identity[:4] != b"\x7fELF":
            raise NotShared("is not an ELF file")
        if identity[4:7] != b"\x02\x01\x01":
            raise NotShared("is not a 64-bit little-endian ELF file")
        # The fields e_type, e_machine, e_phoff, e_phentsize and e_phnum of Elf64_Ehdr. "x" skips the others.
        kind, machine, table, width, count = struct.unpack("<HH12xQ14xHH", self.read(16, 42))
        if kind != _SHARED_OBJECT:
            raise NotShared(f"is not a shared object (ELF type {kind})")
        # 56 is the size of Elf64_Phdr.
        if width != 56 or not 0 < count <= _MAX_SEGMENTS:
            raise NotShared(f"has {count} program headers of {width} bytes")
        self.machine = MACHINES.get(machine, f"ELF machine {machine}")
        # The fields p_type, p_offset, p_vaddr and p_filesz of Elf64_Phdr.
        headers = struct.iter_unpack("<I4xQQ8xQ16x", self.read(table, 56 * count))
        self.segments = [_Segment(*header) for header in headers]

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes of the file, beginning at `offset`.

        Raises
        ------
        NotShared : the file ends before that.
        """
        if offset + length > self.size:
            raise NotShared(f"is truncated: bytes {offset} to {offset + length} of {self.size}")
        self.file.seek(offset)
        data = self.file.read(length)
        if len(data) != length:
            raise NotShared("became shorter while it was read")
        return data

    def find_offset(self, address: int) -> int:
        """Return the offset in the file of the byte that is loaded to `address` in memory.

        Raises
        ------
        NotShared : no segment of the file contains the address.
        """
        for segment in self.segments:
            position = address - segment.address
            if segment.kind == _LOAD and 0 <= position < segment.file_size:
                return segment.offset + position
        raise NotShared(f"names the address {address:#x}, which no segment holds")

    def parse(self) -> SharedObject:
        """Return the names and symbol versions of the file, as its dynamic section describes them.

        The dynamic section is the table from which the dynamic linker learns how to load the file. Each entry
        has a tag, such as DT_SONAME, and a number. If the entry stands for a name, the number is the position
        of the name in the file's table of names.

        Raises
        ------
        NotShared : the file is damaged, or a table is larger than its limit.
        """
        section = self._read_dynamic_section()
        values = {tag: tag_values[0] for tag, tag_values in section.items()}  # most tags have one value
        name_table = self._read_name_table(values)

        def read_name(tag: int) -> str:
            return _read_name(name_table, values[tag]) if tag in values else ""

        runpath = tuple(filter(None, read_name(_DT_RUNPATH).split(":")))
        rpath = tuple(filter(None, read_name(_DT_RPATH).split(":")))
        return SharedObject(
            machine=self.machine,
            soname=read_name(_DT_SONAME),
            needed=tuple(_read_name(name_table, position) for position in section.get(_DT_NEEDED, ())),
            rpath=() if runpath else rpath,  # the dynamic linker ignores RPATH if there is a RUNPATH
            runpath=runpath,
            needs=self._read_needed_versions(name_table, values),
            defines=tuple(self._read_defined_versions(name_table, values)),
        )

    def _read_name_table(self, values: Mapping[int, int]) -> bytes:
        """Return the string table, in which other tables refer to a name by its position.

        `values` are the numbers in the dynamic section by tag: DT_STRTAB is the address of the table in
        memory, and DT_STRSZ its size in bytes.

        Raises
        ------
        NotShared : there is no such table, or it is larger than its limit.
        """
        size_bytes = values.get(_DT_STRSZ, 0)
        if _DT_STRTAB not in values or not 0 < size_bytes <= _MAX_NAMES_BYTES:
            raise NotShared("has no table of names, or one that is too large")
        return self.read(self.find_offset(values[_DT_STRTAB]), size_bytes)

    def _read_dynamic_section(self) -> Mapping[int, list[int]]:
        """Return the entries of the dynamic section, as lists of values by tag.

        The tag is a number that says what a value means. For example, DT_NEEDED occurs once for each library
        that the file needs.

        Raises
        ------
        NotShared : the file has no dynamic section, or the section does not end.
        """
        values: dict[int, list[int]] = {}
        segment = next((segment for segment in self.segments if segment.kind == _DYNAMIC), None)
        if segment is None:
            raise NotShared("has no dynamic section: it is static, or its data is in another file")
        entries = min(segment.file_size // _ENTRY.size, _MAX_ENTRIES)
        for tag, value in _ENTRY.iter_unpack(self.read(segment.offset, entries * _ENTRY.size)):
            if tag == 0:  # DT_NULL is the last entry
                return values
            values.setdefault(tag, []).append(value)
        raise NotShared("has a dynamic section without an end")

    def _read_list(self, offset: int, count: int, layout: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the offset and the fields of each entry in a linked list of symbol versions.

        The last field of an entry is the distance to the next entry, or 0 at the end of the list. This field
        is not yielded.

        Parameters
        ----------
        offset : position of the first entry in the file.
        count : number of entries according to the file. It is limited, so that a damaged list has an end.
        layout : format of an entry for `struct`. Fields that are not needed are padding.

        Raises
        ------
        NotShared : the list has too many entries, or goes beyond the end of the file.
        """
        if count > _MAX_ENTRIES:
            raise NotShared(f"has a table of more than {_MAX_ENTRIES} versions")
        for _ in range(count):
            *fields, next_offset = struct.unpack(layout, self.read(offset, struct.calcsize(layout)))
            yield offset, tuple(fields)
            if next_offset == 0:
                return
            offset += next_offset

    def _read_needed_versions(
        self, name_table: bytes, values: Mapping[int, int]
    ) -> Mapping[str, tuple[str, ...]]:
        """Return the symbol versions that this file needs, by library: ``{"libc.so.6": ("GLIBC_2.34",)}``.

        The versions are in the table .gnu.version_r, which is a list of libraries. Each library has a list of
        versions.

        Parameters
        ----------
        name_table : the string table, in which other tables refer to a name by its position.
        values : the numbers in the dynamic section by tag: DT_VERNEED is the address of the list in memory,
            and DT_VERNEEDNUM its length.
        """
        if not values.get(_DT_VERNEED):  # the file has no such table
            return {}
        versions: dict[str, list[str]] = {}
        total = 0
        list_offset, library_count = self.find_offset(values[_DT_VERNEED]), values.get(_DT_VERNEEDNUM, 0)
        libraries = self._read_list(list_offset, library_count, _VERNEED_ENTRY)
        for library_offset, (version_count, name_position, first_version) in libraries:
            # `_read_list` limits each list. This limits all lists together, in case the file is damaged.
            total += version_count
            if total > _MAX_ENTRIES:
                raise NotShared(f"has a table of more than {_MAX_ENTRIES} versions")
            library_versions = versions.setdefault(_read_name(name_table, name_position), [])
            # The position of the first version is counted from the library's entry.
            version_positions = self._read_strong_versions(library_offset + first_version, version_count)
            library_versions += [_read_name(name_table, position) for position in version_positions]
        return {library: tuple(items) for library, items in versions.items()}

    def _read_strong_versions(self, offset: int, count: int) -> Iterator[int]:
        """Yield the position of each version's name in the table of names, for one library.

        The list of versions has `count` entries and begins at `offset` in the file. Weak versions are left
        out, because the file can be loaded without them.
        """
        for _, (flags, name_position) in self._read_list(offset, count, _VERNAUX_ENTRY):
            is_weak = flags & _WEAK_FLAG
            if not is_weak:
                yield name_position

    def _read_defined_versions(self, name_table: bytes, values: Mapping[int, int]) -> Iterator[str]:
        """Yield the symbol versions that this file defines (table .gnu.version_d), such as ``GLIBC_2.34``.

        Parameters
        ----------
        name_table : the string table, in which other tables refer to a name by its position.
        values : the numbers in the dynamic section by tag: DT_VERDEF is the address of the list in memory,
            and DT_VERDEFNUM its length.
        """
        if not values.get(_DT_VERDEF):  # the file has no such table
            return
        list_offset, version_count = self.find_offset(values[_DT_VERDEF]), values.get(_DT_VERDEFNUM, 0)
        versions = self._read_list(list_offset, version_count, _VERDEF_ENTRY)
        for version_offset, (flags, name_count, first_name) in versions:
            is_base = flags & _BASE_FLAG  # the base version is only the name of the file
            if is_base or name_count == 0:
                continue
            # Of a version's names, the first is its own. The others are the versions that it extends. The
            # position of the first name's entry is counted from the version's entry.
            (name_position,) = struct.unpack("<I", self.read(version_offset + first_name, 4))
            yield _read_name(name_table, name_position)


def _read_name(name_table: bytes, position: int) -> str:
    """Return the name at `position` in the string table of a file. Each name ends with a zero byte.

    Raises
    ------
    NotShared : the table has no name at this position, or the name contains control characters.
    """
    end = name_table.find(b"\0", position, position + _MAX_NAME_BYTES)
    if position >= len(name_table) or end < 0:
        raise NotShared("names something outside its table of names")
    text = name_table[position:end].decode("utf-8", "backslashreplace")
    # Names are printed in reports, and a control character could change what a terminal shows.
    if not text.isprintable():
        raise NotShared("has a name with control characters")
    return text
