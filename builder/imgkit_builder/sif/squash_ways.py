"""The ways to a squashfs, the best first: a new mksquashfs, an old one, an engine.

What all of them get is one tar with every name once, folders first. What they write is compared with it
afterwards (`squash`).
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imgkit_builder.base.progress import Reporter
from imgkit_builder.sif import limits, mksquashfs
from imgkit_builder.sif.options import Helper
from imgkit_builder.sif.plain_tree import OldMksquashfs
from imgkit_builder.sif.squasher import Squasher, SquashOrder
from imgkit_entrypoints.errors import ToolMissing

INSTALL = "apt install squashfs-tools (4.5 or later)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMksquashfs:
    """mksquashfs from 4.5 on, which reads a tar and writes into the .sif itself."""

    program: Path
    note: str = ""
    disk_share: float = 0.0

    def __str__(self) -> str:
        return f"mksquashfs {mksquashfs.version(self.program)} at {self.program}"

    @property
    def lacks_zstd(self) -> str:
        """Whether this build of it has zstd."""
        return mksquashfs.lacks_zstd(self.program)

    def prepare(self, report: Reporter) -> None:
        """Nothing."""

    def words(self, order: SquashOrder) -> list[str]:
        """The program and its arguments."""
        return [
            *(str(self.program), "-", str(order.target), "-tar", "-noappend", "-quiet", "-no-progress"),
            *order.compression.options,
            *limits.gather().mksquashfs_options(),
            *(("-offset", str(order.offset)) if order.offset else ()),
            *_root_options(order),
        ]

    def shown(self, order: SquashOrder) -> str:
        """One program."""
        return shlex.join(self.words(order))

    @contextlib.contextmanager
    def feed(self, order: SquashOrder) -> Iterator[IO[bytes]]:
        """Feed it directly."""
        words = self.words(order)
        order.log.write(f"$ ... | {' '.join(words)}\n")
        with mksquashfs.squashing(words, log=order.log, on_line=order.on_line) as sink:
            yield sink


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMksquashfs:
    """mksquashfs in a container of an engine."""

    helper: Helper
    note: str
    lacks_zstd: str = ""
    disk_share: float = 0.0

    def __str__(self) -> str:
        return f"mksquashfs in a container of {self.helper}"

    def prepare(self, report: Reporter) -> None:
        """Make the image with mksquashfs."""
        self.helper.prepare(report)

    def words(self, order: SquashOrder) -> list[str]:
        """The options of mksquashfs; processors and memory are the engine's matter."""
        return [*order.compression.options, *_root_options(order)]

    def shown(self, order: SquashOrder) -> str:
        """The program in its container, and the copy."""
        words = shlex.join(self.words(order))
        return f"docker start -i HELPER   # mksquashfs - root.sqfs -tar {words}"

    @contextlib.contextmanager
    def feed(self, order: SquashOrder) -> Iterator[IO[bytes]]:
        """Feed it through the engine, and receive its file."""
        words = self.words(order)
        order.log.write(f"$ ... | mksquashfs in a container of {self.helper}: {' '.join(words)}\n")

        def judge(code: int, broken: bool, text: str) -> None:
            mksquashfs.judge(code, text, broken=broken, log=order.log, on_line=order.on_line)

        with self.helper.feed(words, order.target, order.offset, judge) as sink:
            yield sink


def _root_options(order: SquashOrder) -> tuple[str, ...]:
    created_s = str(order.created_s)
    return (
        # A tar has no entry for the root itself; by default / would get mode 0777 and the current time.
        *("-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"),
        *("-root-time", created_s, "-mkfs-time", created_s),
        # Uncompressed inodes, for root_inode.set_root; costs 0.3 % of size.
        "-noI",
    )


def choose(find_helper: Callable[[], Helper | None] = lambda: None) -> Squasher:
    """The first way that works on this machine, or else with the engine that `find_helper` finds.

    Raises
    ------
    ToolMissing : none does.
    """
    if program := mksquashfs.tar_reader():
        return TarMksquashfs(program=program)
    why = mksquashfs.obstacle()
    for old in mksquashfs.candidates():
        if mksquashfs.knows(old, r"-pf\b"):
            note = f"the files are written to disk once, and squashed from there (slower): {why}"
            return OldMksquashfs(program=old, note=note)
    if helper := find_helper():
        return EngineMksquashfs(helper=helper, note=f"mksquashfs runs in a container of {helper}: {why}")
    raise ToolMissing(why, hint=f"{INSTALL}, or a runtime that builds: --from layers")
