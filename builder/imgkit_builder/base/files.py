"""The folders for imgkit's own files, and what both halves share about files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints.files import (
    FULL,
    TEMPORARY,
    append,
    create,
    foreign,
    make_own_folder,
    open_own,
    open_regular,
    publish,
    put,
    read_bytes,
    read_own,
    read_text,
    remove,
    sync,
    temporary_files,
    temporary_name,
    writing,
)

__all__ = (
    "CHUNK_BYTES",
    "FULL",
    "MTIME_S",
    "TEMPORARY",
    "append",
    "cache_dir",
    "config_dir",
    "create",
    "foreign",
    "fullest",
    "make_own_folder",
    "open_own",
    "open_regular",
    "publish",
    "put",
    "read_bytes",
    "read_own",
    "read_text",
    "remove",
    "sha256",
    "state_dir",
    "sync",
    "temporary_files",
    "temporary_name",
    "where_full",
    "write_cache",
    "writing",
)

CHUNK_BYTES = 1 << 20

# 1980-01-01: zip files and wheels, which a user may make inside the image, hold no earlier time.
MTIME_S = 315532800


def sha256(
    stream: BinaryIO, start: int, size_bytes: int, *, advance: Callable[[int, int | None], None] | None = None
) -> str:
    """Hex digest of `size_bytes` of `stream` from byte `start` on, or of fewer where the stream ends before.

    `advance` gets the bytes done and `size_bytes`.
    """
    digest, done = hashlib.sha256(), 0
    stream.seek(start)
    while chunk := stream.read(max(0, min(CHUNK_BYTES, size_bytes - done))):
        digest.update(chunk)
        done += len(chunk)
        if advance:
            advance(done, size_bytes)
    return digest.hexdigest()


def state_dir() -> Path:
    """The folder for logs of builds and jobs: ``$XDG_STATE_HOME/imgkit``."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """The folder for files that may be deleted at any time: ``$XDG_CACHE_HOME/imgkit``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """The folder for what the user has set up: ``$XDG_CONFIG_HOME/imgkit``."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def _xdg(variable: str, fallback: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    if value.startswith("/"):
        return Path(value) / "imgkit"
    try:
        return Path.home() / fallback / "imgkit"
    except RuntimeError:  # no home folder at all: nothing can be written there, as in a read-only one
        return Path("/dev/null") / fallback / "imgkit"


def fullest(*folders: Path) -> Path:
    """The one of `folders`, which exist, whose disk has the least free space."""
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def where_full(error: OSError) -> str:
    """The file whose disk is full; if `error` does not name it, the fullest folder that imgkit writes to."""
    if error.filename:
        return str(error.filename)
    own = (Path.cwd(), Path(tempfile.gettempdir()), state_dir(), cache_dir())
    return str(fullest(*(folder for folder in own if folder.is_dir())))


def write_cache(target: Path, text: str) -> None:
    """Write a file of `cache_dir` if that can be written: a read-only HOME costs time, no more."""
    with contextlib.suppress(OSError):
        make_own_folder(cache_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
        put(target, text)
