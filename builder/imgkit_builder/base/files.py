"""The folders for imgkit's own files, and what both halves share about files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# Handed on under the same names; sorting would give each a statement of its own.
# isort: off
from imgkit_entrypoints.files import (
    FULL as FULL,
    TEMPORARY as TEMPORARY,
    append_file as append_file,
    create_file as create_file,
    foreign_file_reason as foreign_file_reason,
    foreign_folder_reason as foreign_folder_reason,
    make_own_folder as make_own_folder,
    open_own as open_own,
    open_regular as open_regular,
    publish_file as publish_file,
    write_file as write_file,
    read_bytes as read_bytes,
    read_own as read_own,
    read_text as read_text,
    remove_file as remove_file,
    sync_file as sync_file,
    temporary_files as temporary_files,
    temporary_name as temporary_name,
    replace_file as replace_file,
)
# isort: on

CHUNK_BYTES = 1 << 20
_FLUSH_EVERY_S = 1.0

# 1980-01-01: zip files and wheels, which a user may make inside the image, hold no earlier time.
MTIME_S = 315532800

_END = struct.Struct("<Q8s")
"""What stands behind a description at the end of a file: its length, and the mark of its kind."""
_MOST_DESCRIPTION_BYTES = 1 << 20


def make_trailer(text: bytes, mark: bytes) -> bytes:
    """Return what to append to a file, so that `read_trailer` finds `text` under `mark`."""
    return text + _END.pack(len(text), mark)


def has_trailer(stream: BinaryIO, mark: bytes) -> bool:
    """Return whether the file ends with a description of this kind."""
    stream.seek(max(0, os.fstat(stream.fileno()).st_size - len(mark)))
    return stream.read(len(mark)) == mark


def read_trailer(stream: BinaryIO, start: int, size_bytes: int, mark: bytes) -> bytes | None:
    """Return the text at the end of `size_bytes` from byte `start` on; None if there is none or it is cut."""
    stream.seek(max(start + size_bytes - _END.size, 0))
    tail = stream.read(_END.size)
    length, actual_mark = _END.unpack(tail) if len(tail) == _END.size else (0, b"")
    if actual_mark != mark or not 0 < length <= min(_MOST_DESCRIPTION_BYTES, size_bytes - _END.size):
        return None
    stream.seek(start + size_bytes - _END.size - length)
    return stream.read(length)


def sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> str:
    """Return the hex digest of `size_bytes` of `stream` from byte `start` on, or of fewer where it ends.

    `advance` gets the bytes done and `size_bytes`.
    """
    return start_sha256(stream, start, size_bytes, advance=advance).hexdigest()


def start_sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> hashlib._Hash:
    """Return the digest of `sha256` as an object, to which the caller adds what follows."""
    digest, position = hashlib.sha256(), 0
    stream.seek(start)
    while chunk := stream.read(max(0, min(CHUNK_BYTES, size_bytes - position))):
        digest.update(chunk)
        position += len(chunk)
        if advance:
            advance(position, size_bytes)
    return digest


def state_dir() -> Path:
    """Return the folder for logs of builds and jobs: ``$XDG_STATE_HOME/imgkit``."""
    return _xdg_folder("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """Return the folder for files that may be deleted at any time: ``$XDG_CACHE_HOME/imgkit``."""
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """Return the folder for what the user has set up: ``$XDG_CONFIG_HOME/imgkit``."""
    return _xdg_folder("XDG_CONFIG_HOME", ".config")


def _xdg_folder(variable: str, fallback: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value) / "imgkit"
    try:
        return Path.home() / fallback / "imgkit"
    except RuntimeError:  # no home folder at all: nothing can be written there, as in a read-only one
        return Path("/dev/null") / fallback / "imgkit"


def fullest_folder(*folders: Path) -> Path:
    """Return the one of `folders`, which exist, whose disk has the least free space."""
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def full_file(error: OSError) -> str:
    """Return the file whose disk is full; if `error` names none, the fullest folder that imgkit writes to."""
    if error.filename:
        return str(error.filename)
    folders = (Path.cwd(), Path(tempfile.gettempdir()), state_dir(), cache_dir())
    return str(fullest_folder(*(folder for folder in folders if folder.is_dir())))


def write_cache(target: Path, text: str) -> None:
    """Write a file of `cache_dir` if that can be written: a read-only HOME costs time, no more."""
    with contextlib.suppress(OSError):
        make_own_folder(cache_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, text)


@contextlib.contextmanager
def flush_in_background(path: Path) -> Iterator[None]:
    """Write `path` to the disk while the block adds to it, so that little is left for the last fsync.

    Linux begins to write a file of gigabytes only when a tenth of the memory is waiting. By then the program
    that makes the file has often ended, and the processors would idle until the disk is done.

    Raises
    ------
    OSError : the disk did not take all of it. A later fsync would not say so again.
    """
    ended = threading.Event()
    errors: list[OSError] = []

    def flush() -> None:
        while not ended.wait(_FLUSH_EVERY_S) and not errors:
            try:
                with open_regular(path) as stream:
                    os.fsync(stream.fileno())
            except FileNotFoundError:
                continue  # it is not there yet
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]
