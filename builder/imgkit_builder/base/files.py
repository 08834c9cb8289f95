"""Atomic files, and the folders for imgkit's own."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a used up quota, and a file beyond the limit of its size."""


def state_dir() -> Path:
    """The folder for logs of builds and jobs: ``$XDG_STATE_HOME/imgkit``."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """The folder for files that may be deleted at any time: ``$XDG_CACHE_HOME/imgkit``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, fallback: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value) / "imgkit"
    try:
        return Path.home() / fallback / "imgkit"
    except RuntimeError:  # no home folder at all: nothing can be written there, as in a read-only one
        return Path("/dev/null") / fallback / "imgkit"


def temporary_name(target: Path) -> Path:
    """A free name beside `target`, so that the rename stays within one file system."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary name; on success the file is fsynced and renamed to `target`.

    On failure the temporary file is removed, and an old `target` stays as it was.
    """
    temporary = temporary_name(target)
    try:
        yield temporary
        publish(temporary, target)
    except OSError as error:
        if error.errno in FULL:
            # A write has no name in its error, and a copy names the file that it reads.
            error.filename, error.filename2 = str(target), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, target: Path) -> None:
    """Make `temporary` durable, then visible as `target` in one step."""
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def fullest(*folders: Path) -> Path:
    """The one of `folders`, which exist, whose disk has the least free space."""
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def where_full(error: OSError) -> str:
    """The file whose disk is full; if `error` does not name it, the fullest folder that imgkit writes to."""
    if error.filename:
        return str(error.filename)
    own = (Path.cwd(), Path(tempfile.gettempdir()), state_dir(), cache_dir())
    return str(fullest(*(folder for folder in own if folder.is_dir())))


def write_text(target: Path, text: str) -> None:
    """Write a small text file atomically."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_cache(target: Path, text: str) -> None:
    """Write a file of `cache_dir` if that can be written: a read-only HOME costs time, no more."""
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[BinaryIO]:
    """Like `replacing`, with the temporary file opened for writing."""
    with replacing(target) as temporary, temporary.open("wb") as stream:
        yield stream
