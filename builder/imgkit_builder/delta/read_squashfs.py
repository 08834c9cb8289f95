"""Read a squashfs as a layer, in plain Python, without mounting or unpacking it.

An ordinary user of a cluster can thus compare and merge deltas with their true owners, devices and
attributes, which neither a mount nor ``unsquashfs`` shows. The format is that of the kernel's
Documentation/filesystems/squashfs.rst. Whiteouts are character devices 0/0, as overlayfs has them.

A damaged or hostile file ends in an error. Its entries, attributes and content are counted and bounded; every
position lies within the file, and a block (gzip, xz or zstd) unpacks to no more than its size. No table is
read as a whole, since its size is a number that anybody can write.
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
from typing import Any

from imgkit_builder.delta.tree import DEEPEST, Kind, TreeEntry, join
from imgkit_builder.sif.image import COMPRESSORS
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, ToolMissing

_NONE = 0xFFFFFFFF
_XATTR_PREFIXES = ("user.", "trusted.", "security.")
_OUT_OF_LINE = 0x100
_LAST_IN_RUN = _LAST_IN_NAME = 255
"""Linux takes no longer name, and no more names behind one header of a folder's list."""
_MAX_LINK_BYTES = 65535
_MAX_ATTRIBUTES = 1000
_MAX_ATTRIBUTE_BYTES = 65536
"""Linux takes no larger value."""
_LEAST_ENTRIES = 20_000
"""Entries that a small file may have; a larger one may have as many as it has bytes."""
_LEAST_CONTENT_BYTES = 10**11
_CONTENT_FACTOR = 1000
"""Most bytes to which one byte unpacks; zeros, which are not stored, make no difference below 100 GB."""
_MAX_SETS_BYTES = 16 << 20
"""Extended attributes that are kept of one layer."""
_KINDS: Mapping[int, Kind] = {
    **{1: "dir", 2: "file", 3: "symlink", 4: "block", 5: "char", 6: "fifo"},
    **{8: "dir", 9: "file", 10: "symlink", 11: "block", 12: "char", 13: "fifo"},
}
"""Kind for each number of an inode type; images have no sockets (7 and 14)."""

_STORED = 1 << 24
"""Bit of a data block's size: it is not compressed."""
_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_METADATA_BYTES = 8192
_CACHED_BLOCKS = 2048
_BLOCK_SIZES = tuple(1 << bits for bits in range(12, 21))
"""Sizes of a data block that the kernel mounts."""
_FAULTS = (struct.error, IndexError, OverflowError)
"""What Python raises where a damaged number is used as a place, a size or an index."""

_BLOCK_FAULTS = (ValueError, zlib.error, lzma.LZMAError, EOFError)
"""What a damaged block raises."""
_XZ_MEMORY_BYTES = 8 << 20
"""mksquashfs takes no dictionary larger than a block, which has at most 1 MiB."""


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
    blocks: int = 0
    """Number of a file's blocks."""
    sizes: tuple[int, int] = (0, 0)
    """Metadata block, and offset in it, at which the sizes of these blocks begin."""
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
        self._file = _SquashfsFile(path, offset)
        self.used_bytes = self._file.used_bytes
        self._sets: dict[int, Mapping[str, bytes]] = {}
        """Extended attributes by their number: many files share one set."""
        self._set_bytes = self._content_bytes = self._entries = 0
        with self._file.sound():
            self._known = {"": self._inode(self._file.root)}
        self._folder_at = {self._file.root: ""}
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
            with self._file.sound():
                self._listed[path] = dict(self._children(path))
        return self._listed[path]

    def _children(self, path: str) -> Iterator[tuple[str, TreeEntry]]:
        inode = self._at(path)
        if path.count("/") >= DEEPEST:
            raise CheckFailed(f"folders lie more than {DEEPEST} deep in it", where=str(self.path))
        for name, reference in self._list(inode) if inode and inode.kind == "dir" else ():
            inside, child = join(path, name), self._inode(reference)
            if name in ("", ".", "..") or "/" in name or "\0" in name + child.link:
                raise self._file.damaged()
            self._entries += 1
            if self._entries > _LEAST_ENTRIES + self.used_bytes:
                raise CheckFailed("it has more entries than bytes", where=str(self.path))
            if child.kind == "dir" and self._folder_at.setdefault(reference, inside) != inside:
                raise self._file.damaged()
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
        read = _MetadataReader(self._file, *inode.sizes)
        for _ in range(inode.blocks):
            count = min(left, self._file.block_bytes)
            with self._file.sound():
                (word,) = struct.unpack("<I", read(4))
                size = word & (_STORED - 1)
                data = self._file.data(at, word) if size else bytes(count)
            yield self._counted(data, count)
            at += size
            left -= count
        if left:
            with self._file.sound():
                data = self._file.fragment(inode.fragment)[inode.offset : inode.offset + left]
            yield self._counted(data, left)

    def _counted(self, data: bytes, wanted: int) -> bytes:
        """Return a piece of a file's content if it has the wanted size."""
        if len(data) != wanted:
            raise self._file.damaged()
        self._content_bytes += wanted
        if self._content_bytes > max(_LEAST_CONTENT_BYTES, _CONTENT_FACTOR * self.used_bytes):
            raise CheckFailed(
                f"its {self.used_bytes / 1e6:.1f} MB unpack to more than {self._content_bytes / 1e9:g} GB",
                where=str(self.path),
                hint="do not use the file if you do not know its author",
            )
        return data

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
        read = self._file.reader(self._file.inodes, reference >> 16, reference & 0xFFFF)
        number, mode, uid, gid, mtime, inode = struct.unpack("<HHHHII", read(16))
        known = {
            "kind": _KINDS.get(number),
            "number": inode,
            "mode": stat.S_IMODE(mode),
            "uid": self._file.ids[uid][0],
            "gid": self._file.ids[gid][0],
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
                target = os.fsdecode(read(self._file.at_most(length, _MAX_LINK_BYTES)))
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
        whole, rest = divmod(size, self._file.block_bytes)
        count = whole if fragment != _NONE or not rest else whole + 1
        return _Inode(
            **known, links=links, size_bytes=size, xattr=xattr, blocks=count, sizes=(read.place, read.offset),
            start=start, offset=offset, fragment=fragment,
        )  # fmt: skip

    def _list(self, inode: _Inode) -> Iterator[tuple[str, int]]:
        """Names in a folder, in their order, and references to their inodes."""
        left = inode.size_bytes - 3  # "." and "..", which are not stored
        if left <= 0:
            return
        read = self._file.reader(self._file.folders, inode.start, inode.offset)
        before = b""
        while left > 0:
            last, start, _ = struct.unpack("<III", read(12))
            left -= 12
            for _ in range(self._file.at_most(last, _LAST_IN_RUN) + 1):
                offset, _, _, length = struct.unpack("<HhHH", read(8))
                name = read(self._file.at_most(length, _LAST_IN_NAME) + 1)
                if name <= before:
                    raise self._file.damaged()
                before, left = name, left - 8 - len(name)
                yield os.fsdecode(name), start << 16 | offset

    def _attributes(self, number: int) -> Mapping[str, bytes]:
        if number not in self._sets:
            self._sets[number] = dict(self._read_attributes(number))
        return self._sets[number]

    def _read_attributes(self, number: int) -> Iterator[tuple[str, bytes]]:
        reference, count, _ = self._file.xattrs[number]
        start, most = self._file.xattr_start, _MAX_ATTRIBUTE_BYTES
        read = self._file.reader(start, reference >> 16, reference & 0xFFFF)
        for _ in range(self._file.at_most(count, _MAX_ATTRIBUTES)):
            kind, length = struct.unpack("<HH", read(4))
            name = _XATTR_PREFIXES[kind & 0xFF] + os.fsdecode(read(self._file.at_most(length, _LAST_IN_NAME)))
            (size,) = struct.unpack("<I", read(4))
            value = read(self._file.at_most(size, most))
            if kind & _OUT_OF_LINE:
                (place,) = struct.unpack("<Q", value)
                other = self._file.reader(start, place >> 16, place & 0xFFFF)
                value = other(self._file.at_most(struct.unpack("<I", other(4))[0], most))
            self._set_bytes += len(name) + len(value)
            self._file.at_most(self._set_bytes, _MAX_SETS_BYTES)
            yield name, value


class _SquashfsFile:
    """The squashfs in `path` that starts at byte `offset`.

    Raises
    ------
    CheckFailed : no squashfs 4.0, or damaged.
    ToolMissing : this machine cannot unpack its compression.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._file = files.open_regular(path, buffering=0)
        self.used_bytes = max(os.fstat(self._file.fileno()).st_size - offset, 0)
        """Size of the squashfs."""
        fields = _SUPERBLOCK.unpack(self.raw(0, _SUPERBLOCK.size))
        magic, _, _, self.block_bytes, fragments, number, _, _, ids, major, _, self.root, used = fields[:13]
        id_table, xattr_table, self.inodes, self.folders, fragment_table, _ = fields[13:]
        if magic != _MAGIC or major != 4:
            raise CheckFailed("not a squashfs", where=str(path))
        self._unpack = _unpacker(number, path)
        if self.block_bytes not in _BLOCK_SIZES or used > self.used_bytes:
            raise self.damaged()
        self.used_bytes = used
        self.metadata = functools.lru_cache(_CACHED_BLOCKS)(self._read_metadata)
        self.ids = _SquashfsTable(self, id_table, ids, "<I")
        self.fragments = _SquashfsTable(self, fragment_table, fragments, "<QII")
        self.fragment = functools.lru_cache(8)(self._read_fragment)
        self.xattr_start, count = 0, 0
        if xattr_table != (1 << 64) - 1:
            self.xattr_start, count, _ = struct.unpack("<QII", self.raw(xattr_table, 16))
        self.xattrs = _SquashfsTable(self, xattr_table + 16, count, "<QII")

    def raw(self, place: int, size: int) -> bytes:
        """The `size` bytes at `place`."""
        data = b""
        if 0 <= place <= self.used_bytes - size:
            data = os.pread(self._file.fileno(), size, self._offset + place)
        if len(data) != size:
            raise self.damaged()
        return data

    def data(self, place: int, word: int) -> bytes:
        """The data block at `place`, whose size and form are in `word`."""
        size = word & (_STORED - 1)
        if size > self.block_bytes:
            raise self.damaged()
        data = self.raw(place, size)
        return data if word & _STORED else self._unpacked(data, self.block_bytes)

    def reader(self, table: int, block: int, offset: int) -> _MetadataReader:
        """Read from `offset` of the metadata block that lies `block` bytes behind the start of `table`."""
        return _MetadataReader(self, table + block, offset)

    def at_most(self, number: int, most: int) -> int:
        """Return `number`, which must not be larger."""
        if number > most:
            raise self.damaged()
        return number

    @contextlib.contextmanager
    def sound(self) -> Iterator[None]:
        """Turn the faults of damaged numbers into the error for a damaged file."""
        try:
            yield
        except _FAULTS as error:
            raise self.damaged() from error

    def damaged(self) -> CheckFailed:
        """The error for a damaged file."""
        return CheckFailed(
            "the squashfs is damaged", where=str(self.path), hint="copy the file again, or write it again"
        )

    def _read_metadata(self, place: int) -> tuple[bytes, int]:
        """Read a metadata block; also returns where the next one begins."""
        (header,) = struct.unpack("<H", self.raw(place, 2))
        size = self.at_most(header & 0x7FFF, _METADATA_BYTES)
        data = self.raw(place + 2, size)
        return data if header & 0x8000 else self._unpacked(data, _METADATA_BYTES), place + 2 + size

    def _read_fragment(self, number: int) -> bytes:
        start, word, _ = self.fragments[number]
        return self.data(start, word)

    def _unpacked(self, data: bytes, most: int) -> bytes:
        try:
            return self._unpack(data, most)
        except _BLOCK_FAULTS as error:
            raise self.damaged() from error


class _SquashfsTable:
    """Entries of equal size behind a list of metadata blocks; it reads only the blocks that are needed."""

    def __init__(self, file: _SquashfsFile, start: int, count: int, form: str) -> None:
        self._file, self._start, self._count = file, start, count
        self._entry = struct.Struct(form)
        self._cached = functools.lru_cache(1024)(self._read)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._cached(number)

    def _read(self, number: int) -> tuple[Any, ...]:
        if not 0 <= number < self._count:
            raise self._file.damaged()
        index, offset = divmod(number * self._entry.size, _METADATA_BYTES)
        (place,) = struct.unpack("<Q", self._file.raw(self._start + 8 * index, 8))
        return self._entry.unpack_from(self._file.metadata(place)[0], offset)


class _MetadataReader:
    """Read bytes of a run of metadata blocks, one call after the other."""

    def __init__(self, file: _SquashfsFile, place: int, offset: int) -> None:
        self._file = file
        self.place, self.offset = place, offset
        """Metadata block, and offset in it, of the next byte."""

    def __call__(self, count: int) -> bytes:
        """The next `count` bytes."""
        found = b""
        while True:
            data, following = self._file.metadata(self.place)
            piece = data[self.offset : self.offset + count - len(found)]
            found, self.offset = found + piece, self.offset + len(piece)
            if len(found) == count:
                return found
            if not data or self.offset > len(data):
                raise self._file.damaged()
            self.place, self.offset = following, 0


def _unpacker(number: int, path: Path) -> Callable[[bytes, int], bytes]:
    """The function that unpacks a block, of at most so many bytes, of a squashfs with compressor `number`.

    Raises
    ------
    ToolMissing : this machine cannot unpack it; `path` is for the message.
    """
    name = COMPRESSORS[number] if number < len(COMPRESSORS) else "unknown"
    if name == "gzip":
        return _gunzip
    if name == "xz":
        return _unxz
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


def _gunzip(data: bytes, most: int) -> bytes:
    inflate = zlib.decompressobj()
    return _ended(inflate.decompress(data, most + 1), most, eof=inflate.eof)


def _unxz(data: bytes, most: int) -> bytes:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    return _ended(decompressor.decompress(data, most + 1), most, eof=decompressor.eof)


def _ended(plain: bytes, most: int, *, eof: bool) -> bytes:
    if len(plain) > most or not eof:
        raise ValueError("cut short, or more than a block")
    return plain
