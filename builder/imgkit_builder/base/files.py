"""The folders for imgkit's own files, and what both halves share about files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# This module extends that of the nodes' half: callers find the functions of both in it.
from imgkit_entrypoints.files import *  # noqa: F403
from imgkit_entrypoints.files import make_own_folder, put

CHUNK_BYTES = 1 << 20

# 1980-01-01: zip files and wheels, which a user may make inside the image, hold no earlier time.
MTIME_S = 315532800

_END = struct.Struct("<Q8s")
"""What stands behind a description at the end of a file: its length, and the mark of its kind."""
_MOST_DESCRIPTION_BYTES = 1 << 20


def description(text: bytes, mark: bytes) -> bytes:
    """Return what to append to a file, so that `described` finds `text` under `mark`."""
    return text + _END.pack(len(text), mark)


def ends_with(stream: BinaryIO, mark: bytes) -> bool:
    """Return whether the file ends with a description of this kind."""
    stream.seek(max(0, os.fstat(stream.fileno()).st_size - len(mark)))
    return stream.read(len(mark)) == mark


def described(stream: BinaryIO, start: int, size_bytes: int, mark: bytes) -> bytes | None:
    """Return the text at the end of `size_bytes` from byte `start` on; None if it is missing or cut short."""
    stream.seek(max(start + size_bytes - _END.size, 0))
    tail = stream.read(_END.size)
    length, tail_mark = _END.unpack(tail) if len(tail) == _END.size else (0, b"")
    # The length comes from a file of anybody: it decides neither how much is read nor from where.
    if tail_mark != mark or not 0 < length <= min(_MOST_DESCRIPTION_BYTES, size_bytes - _END.size):
        return None
    stream.seek(start + size_bytes - _END.size - length)
    return stream.read(length)


def sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> str:
    """Return the hex digest of `size_bytes` of `stream` from byte `start` on, or of fewer at its end.

    `advance` gets the bytes read so far and `size_bytes`.
    """
    return sha256_begun(stream, start, size_bytes, advance=advance).hexdigest()


def sha256_begun(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> hashlib._Hash:
    """Return the digest of `sha256`, to which the caller can add what follows."""
    digest, read_so_far = hashlib.sha256(), 0
    stream.seek(start)
    while chunk := stream.read(max(0, min(CHUNK_BYTES, size_bytes - read_so_far))):
        digest.update(chunk)
        read_so_far += len(chunk)
        if advance:
            advance(read_so_far, size_bytes)
    return digest


def state_dir() -> Path:
    """Return the folder for logs of builds and jobs: ``$XDG_STATE_HOME/imgkit``."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """Return the folder for files that may be deleted at any time: ``$XDG_CACHE_HOME/imgkit``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """Return the folder for what the user has set up: ``$XDG_CONFIG_HOME/imgkit``."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def _xdg(variable: str, fallback: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value) / "imgkit"
    try:
        return Path.home() / fallback / "imgkit"
    except RuntimeError:
        # Without any home folder, nothing can be written there, as in a read-only one.
        return Path("/dev/null") / fallback / "imgkit"


def fullest(*folders: Path) -> Path:
    """Return that of the existing `folders` whose disk has the least free space."""
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def where_full(error: OSError) -> str:
    """Return the file whose disk is full; if `error` does not name it, the fullest folder of imgkit."""
    if error.filename:
        return str(error.filename)
    # Which of them it was, the system does not say; mostly it is the fullest.
    written = (Path.cwd(), Path(tempfile.gettempdir()), state_dir(), cache_dir())
    return str(fullest(*filter(Path.is_dir, written)))


def write_cache(target: Path, text: str) -> None:
    """Write a file of `cache_dir`, if that can be written."""
    # A read-only HOME, as on some clusters' compute nodes, costs time, no more.
    with contextlib.suppress(OSError):
        make_own_folder(cache_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        put(target, text)
