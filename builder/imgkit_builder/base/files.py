"""Atomic files, and the folders for imgkit's own."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def state_dir() -> Path:
    """The folder for logs of builds and jobs: ``$XDG_STATE_HOME/imgkit``."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """The folder for files that may be deleted at any time: ``$XDG_CACHE_HOME/imgkit``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, fallback: str) -> Path:
    # The XDG base directory specification says to ignore relative values.
    value = os.environ.get(variable, "")
    return (Path(value) if value.startswith("/") else Path.home() / fallback) / "imgkit"


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


def write_text(target: Path, text: str) -> None:
    """Write a small text file atomically."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(target: Path) -> Iterator[BinaryIO]:
    """Like `replacing`, with the temporary file opened for writing."""
    with replacing(target) as temporary, temporary.open("wb") as stream:
        yield stream
