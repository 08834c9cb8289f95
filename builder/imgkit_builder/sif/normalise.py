"""Normalise the files of a locked image: two builds of one lock then give the same entries.

No time is later than the lock's. Left out, or made anew, is what apt, dpkg, ldconfig and engines write with a
time, a place or in a random order: `_DROPPED` names it. The image's own layers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from imgkit_builder.archive.tar_header import DIRECTORY, REGULAR
from imgkit_builder.sif import byte_code
from imgkit_builder.sif.image_entry import ImageEntry, PassingStage

_DAY_S = 86400
_MOST_BYTES = 4 << 20
"""Larger files of these names are not the usual ones, and stay as they are."""
_MOUNTED: Final = ("dev", "proc", "sys")
"""Folders over which every runtime mounts."""
_HOST_FILES: Final = ("etc/hosts", "etc/resolv.conf")
"""Files of the machine's own, which a runtime mounts over empty ones."""
_DROPPED = re.compile(
    r"\.dockerenv|run/\.containerenv|(dev|proc|sys)/.+"
    r"|etc/(hosts|hostname|resolv\.conf|mtab|[^/]+-)"
    r"|var/log/(dpkg\.log|alternatives\.log|apt/.+)"
    r"|var/lib/(apt/lists/.+|dpkg/[^/]+-old)"
    r"|var/cache/(apt/.+|ldconfig/aux-cache|debconf/[^/]+-old)"
)
_KEPT_FOLDERS = re.compile(r"var/(log/apt|lib/apt/lists|cache/apt)(/[^/]+)*")
_TOPS: Final = frozenset({".dockerenv", "dev", "etc", "proc", "run", "sys", "var"})
"""First parts of the names that `_DROPPED` may match."""


def stage(epoch_s: int) -> PassingStage:
    """A stage after which no file is later than `epoch_s`, and none depends on where or when it was built."""

    def pass_on(entries: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
        return _with_host_files(byte_code.settled(_normalised(entries, epoch_s), epoch_s), epoch_s)

    return pass_on


def _with_host_files(entries: Iterator[ImageEntry], epoch_s: int) -> Iterator[ImageEntry]:
    """The entries, and the empty files of `_HOST_FILES` behind them, if there is a folder for them."""
    there = False
    for entry in entries:
        there |= entry.name == "etc" and entry.kind == DIRECTORY
        yield entry
    for name in _HOST_FILES if there else ():
        yield ImageEntry(names=(name,), kind=REGULAR, mode=0o644, mtime_s=epoch_s)


def _normalised(entries: Iterator[ImageEntry], epoch_s: int) -> Iterator[ImageEntry]:
    """The entries that stay; each time is still its own where it is a file's, so that byte code is known."""
    for found in entries:
        names = tuple(
            name for name in found.names if not is_dropped(name, found.kind, found.mtime_s > epoch_s)
        )
        if not names:
            continue
        entry = found if len(names) == len(found.names) else found.changed(names=names)
        if entry.kind == DIRECTORY:
            mounted = {"mode": 0o755, "uid": 0, "gid": 0} if entry.name in _MOUNTED else {}
            yield entry.changed(mtime_s=epoch_s, xattrs={}, **mounted)
            continue
        yield _with_own_content(entry, epoch_s)


def is_dropped(name: str, kind: bytes, later: bool) -> bool:
    """Whether the .sif of a locked image lacks `name`; `later` says that the build wrote it."""
    if name.partition("/")[0] in _TOPS:
        return _DROPPED.fullmatch(name) is not None and not (
            kind == DIRECTORY and _KEPT_FOLDERS.fullmatch(name)
        )
    return later and name.endswith(".dist-info/direct_url.json")


def _with_own_content(entry: ImageEntry, epoch_s: int) -> ImageEntry:
    """The entry without the days and the lines that depend on when and where it was written."""
    if entry.kind != REGULAR or not entry.size_bytes or entry.size_bytes > _MOST_BYTES:
        return entry
    if entry.name == "etc/shadow":
        return entry.with_content(_clamped_days(entry.read(), epoch_s // _DAY_S))
    if entry.mtime_s > epoch_s and entry.name.endswith(".dist-info/RECORD"):
        lines = entry.read().splitlines(keepends=True)
        return entry.with_content(b"".join(one for one in lines if b".dist-info/direct_url.json," not in one))
    return entry


def _clamped_days(data: bytes, day: int) -> bytes:
    """The text of /etc/shadow, in which no password was changed after `day` (since 1970)."""
    lines = []
    for line in data.split(b"\n"):
        fields = line.split(b":")
        if len(fields) > 2 and fields[2].isdigit():
            fields[2] = b"%d" % min(int(fields[2]), day)
        lines.append(b":".join(fields))
    return b"\n".join(lines)


def _read(entry: ImageEntry) -> bytes:
    return b"".join(map(bytes, entry.content))
