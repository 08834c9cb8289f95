"""Who turns a tar into a squashfs: what each way of `squash_ways` is to the rest of this room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TextIO

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.sif.compression import Compression

PACKED_SHARE = 0.5
"""Size of a squashfs per image byte, with a margin: measured 0.26 to 0.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashOrder:
    """A squashfs to be written."""

    target: Path
    offset: int
    """Byte of `target` at which it begins."""
    created_s: int
    """Time of the squashfs and of its root folder."""
    compression: Compression
    folder: Path
    """Folder of temporary files."""
    log: TextIO
    on_line: Callable[[str], None]
    """Receives the lines of the program."""
    note: Callable[[str], None]
    """Receives a sentence for the user about what is lost."""


class Squasher(Protocol):
    """One way to a squashfs."""

    @property
    def note(self) -> str:
        """A sentence for the user: what is done, and why not in the best way; empty for the best."""

    @property
    def lacks_zstd(self) -> str:
        """Why it cannot compress with zstd; empty if it can."""

    @property
    def disk_share(self) -> float:
        """Bytes of its temporary files per byte of the image."""

    def __str__(self) -> str:
        """Name it for people, with its version."""

    def prepare(self, report: Reporter) -> None:
        """Get what it needs before the first tar; quick where that is here.

        Raises
        ------
        ImgkitError : that cannot be had.
        """

    def shown(self, order: SquashOrder) -> str:
        """The command that reads the tar, for people."""

    def feed(self, order: SquashOrder) -> AbstractContextManager[IO[bytes]]:
        """Take a whole tar; on leaving, the squashfs is written.

        Raises
        ------
        ToolFailed : a program failed, or said something that is not known to be harmless.
        """


def append(source: Path, target: Path, offset: int) -> None:
    """Copy the file `source` to byte `offset` of `target`, by the kernel where it can."""
    with (
        files.open_regular(source, buffering=0) as data,
        files.open_own(target, os.O_RDWR | os.O_CREAT, "r+b") as out,
    ):
        size = os.fstat(data.fileno()).st_size
        done = _copied_by_kernel(data.fileno(), out.fileno(), size, offset)
        data.seek(done)
        out.seek(offset + done)
        shutil.copyfileobj(data, out, 1 << 20)


def _copied_by_kernel(source: int, target: int, size: int, offset: int) -> int:
    """Number of bytes that were copied; fewer than `size` where the kernel or the file systems cannot."""
    done = 0
    try:
        while done < size:
            step = os.copy_file_range(source, target, size - done, done, offset + done)
            if not step:
                break
            done += step
    except AttributeError:  # not Linux
        return 0
    except OSError:  # two file systems, or one without it; a full disk fails again
        return done
    return done
