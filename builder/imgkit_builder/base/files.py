"""The folders for imgkit's own files, and functions that read, hash and write files.

The functions that the entry points need as well are defined in ``imgkit_entrypoints.files``.
"""

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

# These names are re-exported. The form `name as name` tells type checkers that this is intended. isort would
# split the statement into one import per name.
# isort: off
from imgkit_entrypoints.files import (
    FULL as FULL,
    TEMPORARY as TEMPORARY,
    append_file as append_file,
    create_file as create_file,
    foreign_file_reason as foreign_file_reason,
    is_foreign_folder as is_foreign_folder,
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

# 1 MB: how much of a file is read, hashed or written at a time.
CHUNK_BYTES = 1 << 20
# Seconds between two calls of fsync in `flush_in_background`.
_FLUSH_EVERY_S = 1.0

# The modification time of files in images: 1980-01-01, in seconds since 1970. Zip files and wheels cannot
# hold an earlier time, and a user may pack files of the image into a wheel.
MTIME_S = 315532800

_TRAILER_END = struct.Struct("<Q8s")
"""The last 16 bytes of a file with a trailer: the length of the trailer's text, and 8 bytes that name the
kind of text (the magic bytes).
"""
# 1 MB, the longest text of a trailer. A larger length means that the file is damaged, so nothing is read.
_MAX_DESCRIPTION_BYTES = 1 << 20


def make_trailer(text: bytes, magic: bytes) -> bytes:
    """Return the bytes to append to a file so that `read_trailer` can find `text` in it.

    The trailer consists of `text`, its length as 8 bytes, and `magic`, 8 bytes that name the kind of text.
    """
    return text + _TRAILER_END.pack(len(text), magic)


def has_trailer(stream: BinaryIO, magic: bytes) -> bool:
    """Return whether the file ends with `magic`, the last bytes that `make_trailer` writes."""
    stream.seek(max(0, os.fstat(stream.fileno()).st_size - len(magic)))
    return stream.read(len(magic)) == magic


def read_trailer(stream: BinaryIO, start: int, size_bytes: int, magic: bytes) -> bytes | None:
    """Return the text of the trailer at the end of a file, or None if the file has no trailer.

    `make_trailer` describes its format. Only a part of `stream` is considered: the `size_bytes` bytes that
    begin at byte `start`. The result is None if this part does not end with `magic`, or if the recorded
    length cannot be right because it is 0, over 1 MB or larger than the part.
    """
    # `_TRAILER_END` is the format of the last bytes: the length of the text, and the magic.
    stream.seek(max(start + size_bytes - _TRAILER_END.size, 0))
    end = stream.read(_TRAILER_END.size)
    if len(end) < _TRAILER_END.size:
        return None
    length, actual_magic = _TRAILER_END.unpack(end)
    max_length = min(_MAX_DESCRIPTION_BYTES, size_bytes - _TRAILER_END.size)
    # The length comes from the file, so it is not trusted before it is checked.
    if actual_magic != magic or not 0 < length <= max_length:
        return None
    stream.seek(start + size_bytes - _TRAILER_END.size - length)
    return stream.read(length)


def sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> str:
    """Return the SHA-256 digest, in hex, of the `size_bytes` bytes of `stream` that begin at byte `start`.

    If the stream ends earlier, the digest covers the bytes up to its end. After each chunk, `advance` is
    called with the number of bytes done so far and `size_bytes`.
    """
    return start_sha256(stream, start, size_bytes, advance=advance).hexdigest()


def start_sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> hashlib._Hash:
    """Hash `size_bytes` bytes of `stream` from byte `start` on, and return the hashlib object.

    Unlike the text that `sha256` returns, this object can be updated with further bytes. After each chunk,
    `advance` is called with the number of bytes done so far and `size_bytes`.
    """
    digest = hashlib.sha256()
    position = 0
    stream.seek(start)
    while position < size_bytes:
        chunk = stream.read(min(CHUNK_BYTES, size_bytes - position))
        if not chunk:  # the stream is shorter than `size_bytes`
            break
        digest.update(chunk)
        position += len(chunk)
        if advance:
            advance(position, size_bytes)
    return digest


def state_dir() -> Path:
    """Return the folder for logs of builds and jobs.

    It is ``$XDG_STATE_HOME/imgkit`` or ``~/.local/state/imgkit``.
    """
    return _xdg_folder("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """Return the folder for files that may be deleted at any time.

    It is ``$XDG_CACHE_HOME/imgkit`` or ``~/.cache/imgkit``.
    """
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """Return the folder for the user's settings, ``$XDG_CONFIG_HOME/imgkit`` or ``~/.config/imgkit``."""
    return _xdg_folder("XDG_CONFIG_HOME", ".config")


def _xdg_folder(variable: str, fallback: str) -> Path:
    """Return imgkit's folder for one kind of file, such as ``$XDG_CACHE_HOME/imgkit`` or ``~/.cache/imgkit``.

    Parameters
    ----------
    variable : the environment variable with the parent folder, such as ``XDG_CACHE_HOME``.
    fallback : the parent folder if the variable is not set, relative to the home folder, such as ``.cache``.
    """
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value) / "imgkit"
    try:
        return Path.home() / fallback / "imgkit"
    except RuntimeError:  # the user has no home folder
        # Nothing can be written below /dev/null. Callers treat that like a read-only home folder.
        return Path("/dev/null") / fallback / "imgkit"


def fullest_folder(*folders: Path) -> Path:
    """Return the folder whose disk has the least free space. All `folders` must exist."""
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def find_full_disk_path(error: OSError) -> str:
    """Return the file or folder to name in a message about a full disk.

    If `error` names a file, the result is that file. Otherwise it is unknown which disk is full. Then the
    most probable folder is returned: the one with the least free space among the current folder, the
    temporary folder, and imgkit's folders for state and cache.
    """
    if error.filename:
        return str(error.filename)
    candidates = (Path.cwd(), Path(tempfile.gettempdir()), state_dir(), cache_dir())
    folders = [folder for folder in candidates if folder.is_dir()]
    return str(fullest_folder(*folders))


def write_cache(target: Path, text: str) -> None:
    """Write `text` to `target`, a file in `cache_dir`. Errors are ignored.

    A cache is never required: if the home folder is read-only, the caller computes the value again next time.
    """
    with contextlib.suppress(OSError):
        make_own_folder(cache_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, text)


@contextlib.contextmanager
def flush_in_background(path: Path) -> Iterator[None]:
    """Sync `path` to the disk once a second while the ``with`` block writes to it.

    Without this, the fsync at the end would take long. Linux begins to write a large file only when unwritten
    data fills a tenth of the memory. By then the program that makes the file has often ended, and the
    processors would be idle until the disk has caught up.

    Raises
    ------
    OSError : the disk did not accept all data. Linux reports such an error only once, so a later fsync of the
        file could succeed although data is missing.
    """
    is_finished = threading.Event()
    errors: list[OSError] = []
    thread = threading.Thread(target=_sync_repeatedly, args=(path, is_finished, errors), daemon=True)
    thread.start()
    try:
        yield
    finally:
        # After this, the thread no longer writes to `errors`.
        is_finished.set()
        thread.join()
    if errors:
        raise errors[0]


def _sync_repeatedly(path: Path, is_finished: threading.Event, errors: list[OSError]) -> None:
    """Sync the file `path` to the disk once a second until `is_finished` is set.

    The first error of the disk ends this, too. It is appended to `errors` and not raised, because nobody
    catches an error of this thread: `flush_in_background`, which has started the thread, raises it.
    """
    while not is_finished.wait(_FLUSH_EVERY_S):
        try:
            with open_regular(path) as stream:
                os.fsync(stream.fileno())
        except FileNotFoundError:
            continue  # the program that writes the file has not created it yet
        except OSError as error:
            errors.append(error)
            return
