"""Feed a tar entry by entry to what squashes, and compare what that wrote with what it got."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from imgkit_builder.archive import tar_entry
from imgkit_builder.archive.tarstream import END
from imgkit_builder.oci.config import epoch
from imgkit_builder.sif import owners, root_inode, squash_count, squash_ways
from imgkit_builder.sif.conversion_job import ConversionJob
from imgkit_builder.sif.squasher import SquashOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Squash:
    """A squashfs that is being written."""

    sink: IO[bytes]
    names: Counter[bytes] = field(default_factory=Counter)
    """Number of names of each kind so far."""
    owners: set[int] = field(default_factory=set)
    """Users and groups of what was sent, where the sender states them."""

    def entry(self, kind: bytes, header: bytes) -> None:
        """Begin an entry; the content of a file follows in `content`."""
        self.names[kind] += 1
        self.sink.write(header)

    def content(self, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """The content of a file, and the zeros that fill its last block."""
        for piece in pieces:
            self.sink.write(piece)
        self.sink.write(tar_entry.padding(size_bytes))


@contextlib.contextmanager
def writing(job: ConversionJob, target: Path, *, created: str, offset: int = 0) -> Iterator[Squash]:
    """Yield a squashfs that goes to byte `offset` of `target`; afterwards it is complete.

    `created` is the time of the squashfs and its root folder, in RFC 3339 (empty: 1970).

    Raises
    ------
    ToolMissing, ToolFailed : nothing here squashes, or it failed or said something unknown.
    CheckFailed : the squashfs has other names than it should have.
    """
    order = SquashOrder(
        target=target,
        offset=offset,
        created_s=epoch(created),
        compression=job.compression,
        folder=job.work.folder,
        log=job.log,
        on_line=job.clock.line,
        note=job.clock.note,
    )
    squasher = job.squasher or squash_ways.choose(job.options.helper)
    squasher.prepare(job.clock)
    with squasher.feed(order) as sink:
        made = Squash(sink=sink)
        yield made
        sink.write(END)
    squash_count.compare(target, made.names, offset=offset)
    root_inode.set_root(target, order.created_s, offset=offset)
    if made.owners:
        owners.remove_unused(target, made.owners, offset=offset)
