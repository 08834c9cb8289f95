"""A shared object of a few hundred bytes, written by struct: what the dynamic linker reads, and no code."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

MACHINES = {"x86_64": 62, "aarch64": 183}


def shared_object(
    soname: str = "",
    *,
    needed: Sequence[str] = (),
    needs: Mapping[str, Sequence[str]] | None = None,
    defines: Sequence[str] = (),
    rpath: str = "",
    machine: str = "x86_64",
) -> bytes:
    """The bytes of a library; one segment covers the whole file, so addresses are offsets."""
    names = bytearray(b"\0")

    def name(text: str) -> int:
        at = len(names)
        names.extend(text.encode() + b"\0")
        return at

    tags = [(1, name(text)) for text in (*needed, *(needs or {}))]
    tags += [(14, name(soname))] if soname else []
    tags += [(15, name(rpath))] if rpath else []
    definitions = bytearray()
    for number, version in enumerate(defines):
        next_offset = 28 if number + 1 < len(defines) else 0
        definitions += struct.pack("<HHHHIII", 1, 0, number + 2, 1, 0, 20, next_offset)
        definitions += struct.pack("<II", name(version), 0)
    needed_versions = bytearray()
    for number, (file, versions) in enumerate((needs or {}).items()):
        next_offset = 16 + 16 * len(versions) if number + 1 < len(needs or {}) else 0
        needed_versions += struct.pack("<HHIII", 1, len(versions), name(file), 16, next_offset)
        for index, version in enumerate(versions):
            after = 16 if index + 1 < len(versions) else 0
            needed_versions += struct.pack("<IHHII", 0, 0, index + 2, name(version), after)
    start = 64 + 2 * 56
    tables = ((5, bytes(names)), (0x6FFFFFFC, bytes(definitions)), (0x6FFFFFFE, bytes(needed_versions)))
    body, offset = b"", start
    for tag, table in tables:
        if table:
            tags.append((tag, offset))
        body, offset = body + table, offset + len(table)
    tags += [(10, len(names)), (0x6FFFFFFD, len(defines)), (0x6FFFFFFF, len(needs or {})), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    size = offset + len(dynamic)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, MACHINES[machine], 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    header += struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    header += struct.pack("<IIQQQQQQ", 2, 4, offset, offset, offset, len(dynamic), len(dynamic), 8)
    return header + body + dynamic
