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
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{failed}: {error.strerror}", where=str(target), hint=hint) from error
