"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints.errors import UsageError


@contextlib.contextmanager
def replacing(target: Path, *, failed: str, hint: str) -> Iterator[BinaryIO]:
    """Yield a file to write; at the end it takes the place of `target` in one step.

    Raises
    ------
    UsageError : it cannot be written; begins with `failed`.
    """
    try:
        with _renamed(target) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{failed}: {error.strerror}", where=str(target), hint=hint) from error


def put(target: Path, text: str) -> None:
    """Make `text` the whole content of `target`, or leave it as it is.

    Raises
    ------
    OSError : it cannot be written.
    """
    with _renamed(target) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _renamed(target: Path) -> Iterator[BinaryIO]:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # Not "x": a killed process may have left one, and in containers the same numbers come again.
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
