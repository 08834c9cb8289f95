"""Files that are complete or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints.errors import UsageError


@contextlib.contextmanager
def replacing(target: Path, *, failed: str, hint: str) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces `target` in one step at the end.

    Raises
    ------
    UsageError : the file cannot be written; its message begins with `failed`.
    """
    try:
        with _renamed(target) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{failed}: {error.strerror}", where=str(target), hint=hint) from error


def put(target: Path, text: str) -> None:
    """Write `text` as the complete content of `target`; on an error `target` stays as it was.

    Raises
    ------
    OSError : the file cannot be written.
    """
    with _renamed(target) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _renamed(target: Path) -> Iterator[BinaryIO]:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # Not "x": a killed process may have left the file, and containers reuse process ids.
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
