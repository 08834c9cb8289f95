"""Unpack compressed layers into temporary files: several at once, each layer once, with readers close behind.

Threads help: zlib, digests and writes let other threads run. The files have no names, so that nothing stays
behind. They are never flushed to the disk, and a small image never leaves the memory for files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.base.files import FULL


class NoRoom(Exception):
    """The plain layers take more than the spool may; none of its files is of use."""


class SpoolFile:
    """One layer's plain bytes, which one thread writes while another reads what is there."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - `close` does
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self.size_bytes = 0
        """What is there so far."""

    def append(self, data: bytes) -> None:
        """Write `data`; readers see it from now on."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        with self._changed:
            self.size_bytes += len(data)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows; with an `error`, readers that come so far get it."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def chunks(self, most: int, *, step: Callable[[], int] = lambda: 0) -> Iterator[bytes]:
        """Yield the bytes, as `stored.Region.chunks` does; waits for those that are still to come."""
        at = 0
        while self._is_there(at := at + step()):
            chunk = os.pread(self._file.fileno(), most, at)
            at += len(chunk)
            yield chunk

    def _is_there(self, at: int) -> bool:
        """Whether the layer has a byte `at`; waits until that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.size_bytes > at)
            if self.size_bytes <= at and self._error:
                raise self._error
            return self.size_bytes > at

    def close(self) -> None:
        """Give the room on the disk back."""
        self._file.close()


@dataclass(kw_only=True, slots=True)
class Spool:
    """Where plain layers go, and how much of the disk they may take together."""

    folder: Path
    room_bytes: int
    advance: Callable[[int], None] = lambda _: None
    """Gets the number of plain bytes so far."""
    _done_bytes: int = 0
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def file(self) -> SpoolFile:
        """A new one, which lasts as long as the spool."""
        return self._files.enter_context(contextlib.closing(SpoolFile(self.folder)))

    def stop(self) -> None:
        """Let every `fill` end early: nobody needs the rest."""
        self._stopped = True

    def fill(self, file: SpoolFile, chunks: Generator[bytes, None, None], allowance: Allowance) -> str:
        """Write the plain bytes `chunks` to `file`, and return their sha256.

        Raises
        ------
        NoRoom : they take more than there is.
        CheckFailed : they are damaged, or more than `allowance`.
        """
        digest = hashlib.sha256()
        try:
            with contextlib.closing(chunks):
                for chunk in chunks:
                    if self._stopped:
                        break
                    self._count(len(chunk), allowance)
                    digest.update(chunk)
                    file.append(chunk)
        except OSError as error:
            # Somebody else fills the disk, too.
            told = NoRoom() if error.errno in FULL else error
            file.end(told)
            raise told from error
        except BaseException as error:
            file.end(error)
            raise
        file.end()
        return digest.hexdigest()

    def _count(self, size_bytes: int, allowance: Allowance) -> None:
        with self._lock:
            allowance.take(size_bytes)
            self._done_bytes += size_bytes
            self.advance(self._done_bytes)
            if self._done_bytes > self.room_bytes:
                raise NoRoom
