"""Bytes of files that may be compressed: gzip by the standard library, zstd by the ``zstd`` program."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

Kind = Literal["plain", "gzip", "zstd"]

CHUNK_BYTES = 1 << 20
_MAGICS: tuple[tuple[bytes, Kind], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_REFUSED = ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"))


def kind(path: Path) -> Kind:
    """How `path` is compressed, by its first bytes.

    Raises
    ------
    UsageError : bzip2 or xz, which no runtime and no tutorial uses.
    """
    with path.open("rb") as stream:
        start = stream.read(8)
    for magic, name in _MAGICS:
        if start.startswith(magic):
            return name
    for magic, refused in _REFUSED:
        if start.startswith(magic):
            raise UsageError(
                f"compressed with {refused}; gzip, zstd and plain are read",
                where=str(path),
                hint=f"{refused} -dk {path}   (then give the file that it makes)",
            )
    return "plain"


def chunks(path: Path, *, advance: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The uncompressed bytes of `path`, at most 1 MiB at a time; `advance` is told the bytes of the file
    read.

    Raises
    ------
    CheckFailed : damaged or cut short.
    ToolMissing : zstd data and no ``zstd`` program.
    """
    readers = {"plain": _raw, "gzip": _gunzip, "zstd": _unzstd}
    return readers[kind(path)](path, advance or (lambda _: None))


def _raw(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            done += len(chunk)
            advance(done)
            yield chunk


def _gunzip(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=31)
    try:
        for raw in _raw(path, advance):
            waiting = raw
            while waiting:
                if inflate.eof:
                    # pigz and concatenated files have several members; zeros after the last are padding.
                    waiting = waiting.lstrip(b"\0")
                    if not waiting:
                        break
                    inflate = zlib.decompressobj(wbits=31)
                if data := inflate.decompress(waiting, CHUNK_BYTES):
                    yield data
                waiting = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        if data := inflate.flush():
            yield data
    except zlib.error as error:
        raise CheckFailed(f"damaged gzip data: {error}", where=str(path)) from error
    if not inflate.eof:
        raise CheckFailed("gzip data that is cut short", where=str(path), hint="copy the file again")


def _unzstd(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    program = shutil.which("zstd")
    if program is None:
        raise ToolMissing(
            "zstd data, and the program zstd is not on PATH",
            where=str(path),
            hint=f"module load zstd, or where zstd is: zstd -d {path}   (then give the .tar)",
        )
    with (
        path.open("rb") as source,
        tempfile.TemporaryFile() as messages,
        subprocess.Popen([program, "-dcq"], stdin=source, stdout=subprocess.PIPE, stderr=messages) as process,
    ):
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        try:
            while chunk := process.stdout.read(CHUNK_BYTES):
                # The program reads through our descriptor, so its position is the program's.
                advance(source.tell())
                yield chunk
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            messages.seek(0)
            text = messages.read(4096).decode("utf-8", "replace").strip()
            raise CheckFailed(f"damaged zstd data: {text}", where=str(path), hint="copy the file again")
