"""Read a squashfs as a layer, in plain Python, without mounting or unpacking it.

An ordinary user of a cluster can thus compare and merge deltas with their true owners, devices and
attributes, which neither a mount nor ``unsquashfs`` shows. The format is that of the kernel's
Documentation/filesystems/squashfs.rst. Whiteouts are character devices 0/0, as overlayfs has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import lzma
import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.delta.tree import Kind, TreeEntry, join
from imgkit_builder.sif.image import COMPRESSORS
from imgkit_entrypoints.errors import CheckFailed, ToolMissing

_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_BLOCK_BYTES = 8192
"""Size of a metadata block."""
_NONE = 0xFFFFFFFF
_XATTR_PREFIXES = ("user.", "trusted.", "security.")
_OUT_OF_LINE = 0x100
_STORED = 1 << 24
_CACHED_BLOCKS = 4096
_BLOCK_SIZES = tuple(1 << bits for bits in range(12, 21))
"""Sizes of a data block that the kernel mounts."""
_DEEPEST = 400
"""Folders within each other. Paths have at most 4096 bytes, and Python's recursion ends at 1000."""
_XZ_MEMORY_BYTES = 64 << 20
_FAULTS = (struct.error, IndexError, OverflowError, ZeroDivisionError, MemoryError)
"""What Python raises where a damaged number is used as a place, a size or an index."""
_KINDS: Mapping[int, Kind] = {
    **{1: "dir", 2: "file", 3: "symlink", 4: "block", 5: "char", 6: "fifo"},
    **{8: "dir", 9: "file", 10: "symlink", 11: "block", 12: "char", 13: "fifo"},
}
"""Kind for each number of an inode type; images have no sockets (7 and 14)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inode:
    kind: Kind | None
    number: int
    mode: int
    uid: int
    gid: int
    mtime_s: int
    links: int = 1
    size_bytes: int = 0
    link: str = ""
    device: int = 0
    xattr: int = _NONE
    blocks: tuple[int, ...] = ()
    start: int = 0
    """Start of a file's blocks, or of a folder's list in the directory table."""
    offset: int = 0
    """Offset within the fragment, or within the block of the list."""
    fragment: int = _NONE


class SquashfsLayer:
    """The layer in `path` that starts at byte `offset`.

    Raises
    ------
    CheckFailed : no squashfs 4.0, or damaged.
    ToolMissing : this machine cannot unpack its compression.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._file = path.open("rb", buffering=0)
        with self._sound():
            self._open()

    def _open(self) -> None:
        path = self.path
        fields = _SUPERBLOCK.unpack(self._raw(0, _SUPERBLOCK.size))
        (magic, _, _, self._block, fragments, number, _, _, ids, major, _, root, self.used_bytes) = fields[
            :13
        ]
        id_table, xattr_table, self._inodes, self._folders, fragment_table, _ = fields[13:]
        if magic != _MAGIC or major != 4:
            raise CheckFailed("it is no squashfs", where=str(path))
        self._unpack = _unpacker(COMPRESSORS[number] if number < len(COMPRESSORS) else "unknown", path)
        if self._block not in _BLOCK_SIZES:
            raise self._damaged()
        self._metadata = functools.lru_cache(_CACHED_BLOCKS)(self._read_metadata)
        self._ids = struct.unpack(f"<{ids}I", self._table(id_table, ids * 4))
        entries = self._table(fragment_table, fragments * 16) if fragments else b""
        self._fragments = tuple(struct.iter_unpack("<QII", entries))
        self._fragment = functools.lru_cache(8)(self._read_fragment)
        self._xattrs, self._xattr_start = self._xattr_table(xattr_table)
        self._known = {"": self._inode(root)}
        self._folder_at = {root: ""}
        """Path of each folder by its reference: no folder lies in two, or in itself."""
        self._links: dict[int, list[str]] | None = None
        self._listed: dict[str, dict[str, TreeEntry]] = {}

    @property
    def root(self) -> TreeEntry:
        """The root folder."""
        return self._entry(self._known[""], "", "dir")

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; empty if it is not in this layer."""
        if path not in self._listed:
            with self._sound():
                self._listed[path] = dict(self._children(path))
        return self._listed[path]

    def _children(self, path: str) -> Iterator[tuple[str, TreeEntry]]:
        inode = self._at(path)
        if path.count("/") >= _DEEPEST:
            raise CheckFailed(f"folders lie more than {_DEEPEST} deep in it", where=str(self.path))
        for name, reference in self._list(inode) if inode and inode.kind == "dir" else ():
            inside, child = join(path, name), self._inode(reference)
            if name in ("", ".", "..") or "/" in name or "\0" in name + child.link:
                raise self._damaged()
            if child.kind == "dir" and self._folder_at.setdefault(reference, inside) != inside:
                raise self._damaged()
            self._known[inside] = child
            if child.kind is not None:
                yield name, self._entry(child, inside, child.kind)

    def names(self, group: int) -> Collection[str]:
        """Paths of the inode `group`; lists every folder once."""
        if self._links is None:
            self._links = {}
            self._walk("")
        return self._links.get(group, ())

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file, a block at a time."""
        inode = self._known[str(entry.place)]
        left, at = inode.size_bytes, inode.start
        for word in inode.blocks:
            size, count = word & (_STORED - 1), min(left, self._block)
            with self._sound():
                data = self._data(at, word) if size else bytes(count)
            if len(data) != count:
                raise self._damaged()
            yield data
            at += size
            left -= count
        if left:
            with self._sound():
                data = self._fragment(inode.fragment)[inode.offset : inode.offset + left]
            if len(data) != left:
                raise self._damaged()
            yield data

    def _walk(self, path: str) -> None:
        assert self._links is not None  # noqa: S101 - for the type checker: the caller has set it
        for name, entry in self.children(path).items():
            inside = join(path, name)
            if entry.group is not None:
                self._links.setdefault(entry.group, []).append(inside)
            if entry.kind == "dir":
                self._walk(inside)

    def _at(self, path: str) -> _Inode | None:
        if path not in self._known and path:
            self.children(path.rpartition("/")[0])
        return self._known.get(path)

    def _entry(self, inode: _Inode, path: str, kind: Kind) -> TreeEntry:
        device = (inode.device & 0xFFF00) >> 8, (inode.device & 0xFF) | ((inode.device >> 12) & 0xFFF00)
        if kind == "char" and device == (0, 0):
            kind = "whiteout"
        return TreeEntry(
            layer=self,
            kind=kind,
            mode=inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            mtime_s=inode.mtime_s,
            size_bytes=inode.size_bytes if kind == "file" else 0,
            link=inode.link,
            device=device,
            xattrs=self._attributes(inode.xattr) if inode.xattr != _NONE else {},
            group=inode.number if kind == "file" and inode.links > 1 else None,
            place=path,
        )

    def _inode(self, reference: int) -> _Inode:
        read = self._reader(self._inodes, reference >> 16, reference & 0xFFFF)
        number, mode, uid, gid, mtime, inode = struct.unpack("<HHHHII", read(16))
        known = {
            "kind": _KINDS.get(number),
            "number": inode,
            "mode": stat.S_IMODE(mode),
            "uid": self._ids[uid],
            "gid": self._ids[gid],
            "mtime_s": mtime,
        }
        match number:
            case 1:
                start, _, size, offset, _ = struct.unpack("<IIHHI", read(16))
                return _Inode(**known, start=start, offset=offset, size_bytes=size)
            case 8:
                _, size, start, _, _, offset, xattr = struct.unpack("<IIIIHHI", read(24))
                return _Inode(**known, start=start, offset=offset, size_bytes=size, xattr=xattr)
            case 2:
                start, fragment, offset, size = struct.unpack("<IIII", read(16))
                links, xattr = 1, _NONE
            case 9:
                start, size, _, links, fragment, offset, xattr = struct.unpack("<QQQIIII", read(40))
            case 3 | 10:
                links, length = struct.unpack("<II", read(8))
                target = os.fsdecode(read(length))
                xattr = struct.unpack("<I", read(4))[0] if number == 10 else _NONE
                return _Inode(**known, links=links, link=target, xattr=xattr)
            case 4 | 5 | 11 | 12:
                links, device = struct.unpack("<II", read(8))
                xattr = struct.unpack("<I", read(4))[0] if number > 7 else _NONE
                return _Inode(**known, links=links, device=device, xattr=xattr)
            case 6 | 13:
                (links,) = struct.unpack("<I", read(4))
                xattr = struct.unpack("<I", read(4))[0] if number > 7 else _NONE
                return _Inode(**known, links=links, xattr=xattr)
            case _:
                return _Inode(**known)
        whole, rest = divmod(size, self._block)
        count = whole if fragment != _NONE or not rest else whole + 1
        blocks = struct.unpack(f"<{count}I", read(count * 4))
        return _Inode(
            **known, links=links, size_bytes=size, xattr=xattr, blocks=blocks, start=start,
            offset=offset, fragment=fragment,
        )  # fmt: skip

    def _list(self, inode: _Inode) -> Iterator[tuple[str, int]]:
        """Names in a folder, and references to their inodes."""
        left = inode.size_bytes - 3  # "." and "..", which are not stored
        if left <= 0:
            return
        read = self._reader(self._folders, inode.start, inode.offset)
        while left > 0:
            count, start, _ = struct.unpack("<III", read(12))
            left -= 12
            for _ in range(count + 1):
                offset, _, _, length = struct.unpack("<HhHH", read(8))
                name = os.fsdecode(read(length + 1))
                left -= 8 + length + 1
                yield name, start << 16 | offset

    def _attributes(self, number: int) -> Mapping[str, bytes]:
        reference, count, _ = self._xattrs[number]
        read = self._reader(self._xattr_start, reference >> 16, reference & 0xFFFF)
        found = {}
        for _ in range(count):
            kind, length = struct.unpack("<HH", read(4))
            name = _XATTR_PREFIXES[kind & 0xFF] + os.fsdecode(read(length))
            (size,) = struct.unpack("<I", read(4))
            value = read(size)
            if kind & _OUT_OF_LINE:
                (place,) = struct.unpack("<Q", value)
                other = self._reader(self._xattr_start, place >> 16, place & 0xFFFF)
                value = other(struct.unpack("<I", other(4))[0])
            found[name] = value
        return found

    def _xattr_table(self, start: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
        if start == (1 << 64) - 1:
            return (), 0
        values, count, _ = struct.unpack("<QII", self._raw(start, 16))
        return tuple(struct.iter_unpack("<QII", self._table(start + 16, count * 16))), values

    def _table(self, start: int, size: int) -> bytes:
        """Read a table of `size` bytes by its list of metadata blocks."""
        blocks = -(-size // _BLOCK_BYTES)
        places = struct.unpack(f"<{blocks}Q", self._raw(start, blocks * 8))
        return b"".join(self._metadata(place)[0] for place in places)[:size]

    def _reader(self, table: int, block: int, offset: int) -> Callable[[int], bytes]:
        """A function that returns the next N bytes of a run of metadata blocks."""
        place, at = table + block, offset

        def read(count: int) -> bytes:
            nonlocal place, at
            found = b""
            while True:
                data, following = self._metadata(place)
                piece = data[at : at + count - len(found)]
                found, at = found + piece, at + len(piece)
                if len(found) == count:
                    return found
                if not piece and not data:
                    raise self._damaged()
                place, at = following, 0

        return read

    def _read_metadata(self, place: int) -> tuple[bytes, int]:
        """Read a metadata block; also returns where the next one begins."""
        (header,) = struct.unpack("<H", self._raw(place, 2))
        size = header & 0x7FFF
        data = self._raw(place + 2, size)
        return data if header & 0x8000 else self._unpacked(data, _BLOCK_BYTES), place + 2 + size

    def _read_fragment(self, number: int) -> bytes:
        start, word, _ = self._fragments[number]
        return self._data(start, word)

    def _data(self, place: int, word: int) -> bytes:
        data = self._raw(place, word & (_STORED - 1))
        return data if word & _STORED else self._unpacked(data, self._block)

    def _unpacked(self, data: bytes, most: int) -> bytes:
        try:
            return self._unpack(data, most)
        except (ValueError, zlib.error, lzma.LZMAError) as error:
            raise self._damaged() from error

    def _raw(self, place: int, size: int) -> bytes:
        data = os.pread(self._file.fileno(), size, self._offset + place)
        if len(data) != size:
            raise self._damaged()
        return data

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """Turn the faults of damaged numbers into the error for a damaged file."""
        try:
            yield
        except _FAULTS as error:
            raise self._damaged() from error

    def _damaged(self) -> CheckFailed:
        return CheckFailed(
            "the squashfs is damaged", where=str(self.path), hint="copy the file again, or write it again"
        )


def _unpacker(name: str, path: Path) -> Callable[[bytes, int], bytes]:
    if name == "gzip":
        return lambda data, most: zlib.decompressobj().decompress(data, most)
    if name == "xz":
        return lambda data, most: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES).decompress(data, most)
    if name != "zstd":
        raise ToolMissing(
            f"the squashfs is compressed with {name}; imgkit reads gzip, xz and zstd",
            where=str(path),
            hint="convert the image again: imgkit sif",
        )
    try:
        # The standard library has zstd from Python 3.14 on; the runtimes' tools bring this library.
        library = ctypes.CDLL("libzstd.so.1")
    except OSError as error:
        raise ToolMissing(
            "the squashfs is compressed with zstd, and libzstd.so.1 is not on this machine",
            where=str(path),
            hint="apt install libzstd1, or: imgkit sif --compression gzip",
        ) from error
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)

    def unpack(data: bytes, most: int) -> bytes:
        room = ctypes.create_string_buffer(most)
        size = int(library.ZSTD_decompress(room, most, data, len(data)))
        if size > most:  # an error's number
            raise ValueError("not zstd")
        return room.raw[:size]

    return unpack
