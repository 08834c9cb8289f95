"""Unpack the blocks of a squashfs: gzip, xz and zstd, each within a bound."""

from __future__ import annotations

import ctypes
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

from imgkit_builder.sif.image import COMPRESSORS
from imgkit_entrypoints.errors import ToolMissing

FAULTS = (ValueError, zlib.error, lzma.LZMAError, EOFError)
"""What a damaged block raises."""
_XZ_MEMORY_BYTES = 8 << 20
"""mksquashfs takes no dictionary larger than a block, which has at most 1 MiB."""


def unpacker(number: int, path: Path) -> Callable[[bytes, int], bytes]:
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
