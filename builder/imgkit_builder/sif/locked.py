"""What makes two .sif files of one lock equal: a settled configuration, and files without times of the build.

A build by a lock labels its image with a time. The image id, the history, the digests of layers and the
engine's own words depend on the clock and on the engine. A .sif of such an image has the id of its settled
configuration instead (docs/adr/0019).

No file is later than the lock. Left out, or made anew, is what apt, dpkg, ldconfig and engines write with a
time, a path or in a random order: `_DROPPED` names it. The image's own layers stay as they are.

Byte code names the time of its source, and Python takes it only where both are equal. Python's own documents
describe the 16 bytes at its beginning (PEP 552): a magic number, flags, then time and size of the source
where the flags are zero. Byte code with the hash of its source needs nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR
from imgkit_builder.base import files
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.oci.manifest import EPOCH_LABEL
from imgkit_builder.sif.entries import ImageEntry, PassingStage
from imgkit_entrypoints import json_text

_MOST_TIME_S = (1 << 32) - 1
_KEPT = ("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "StopSignal")
"""What the OCI's image specification has beside labels; engines add values of their own."""
_ENGINES_LABELS = frozenset({"io.buildah.version"})

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

_HEAD = struct.Struct("<4xII")
"""Flags, and the time of the source."""
_TIME = struct.Struct("<I")
_TIME_AT = 8
_MOST_CODE_BYTES = 64 << 20


def epoch_s(config: ImageConfig) -> int | None:
    """The latest time of a file in the .sif of a locked image; None where the image is not locked."""
    text = config.labels.get(EPOCH_LABEL, "")
    return min(int(text), _MOST_TIME_S) if text.isascii() and text.isdigit() else None


def settled(config: ImageConfig) -> ImageConfig:
    """The configuration as the .sif of a locked image has it; that of another image unchanged."""
    clamp_s = epoch_s(config)
    if clamp_s is None:
        return config
    values = json_text.parse(config.raw)
    settings = values.get("config") or {}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clamp_s))
    labels = {name: value for name, value in config.labels.items() if name not in _ENGINES_LABELS}
    kept = {name: settings[name] for name in _KEPT if settings.get(name)}
    text = {
        "architecture": config.arch,
        "config": {**kept, "Labels": labels},
        "created": created,
        "os": "linux",
    }
    raw = json.dumps(text, sort_keys=True).encode()
    return replace(
        config,
        image_id=f"sha256:{hashlib.sha256(raw).hexdigest()}",
        raw=raw,
        diff_ids=(),
        labels=labels,
        created=created,
    )


def root_of(image_id: str) -> str:
    """The digest of the root partition that this user's last conversion of the image made; empty if none."""
    try:
        return files.read_own(_note(image_id))
    except (OSError, UnicodeDecodeError):
        return ""


def remember(image_id: str, root_sha256: str) -> None:
    """Record what a conversion of the locked image `image_id`, as an engine calls it, has made."""
    files.write_cache(_note(image_id), root_sha256)


def _note(image_id: str) -> Path:
    return files.cache_dir() / "locked" / image_id.replace(":", "-")


def normalising(epoch_s: int) -> PassingStage:
    """A stage after which no file is later than `epoch_s`, and none depends on where or when it was built."""

    def pass_on(entries: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
        return _with_host_files(_with_settled_times(_normalised(entries, epoch_s), epoch_s), epoch_s)

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
            name for name in found.names if not _is_dropped(name, found.kind, found.mtime_s > epoch_s)
        )
        if not names:
            continue
        entry = found if len(names) == len(found.names) else found.changed(names=names)
        if entry.kind == DIRECTORY:
            mounted = {"mode": 0o755, "uid": 0, "gid": 0} if entry.name in _MOUNTED else {}
            yield entry.changed(mtime_s=epoch_s, xattrs={}, **mounted)
            continue
        yield _with_own_content(entry, epoch_s)


def _is_dropped(name: str, kind: bytes, later: bool) -> bool:
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


@dataclass(slots=True)
class _OpenFolder:
    """A folder of sources that is still passing."""

    times: dict[str, int] = field(default_factory=dict)
    """Times of the late sources in it, by their names without the ending."""
    held: list[tuple[str, ImageEntry, bytes]] = field(default_factory=list)
    """Byte code that names a late time: the name of its source without the ending, and its content."""
    links: list[ImageEntry] = field(default_factory=list)
    """Hard links to what is held."""

    def holds(self, path: str) -> bool:
        """Whether the file `path` waits here."""
        return any(entry.name == path for _, entry, _ in self.held)


def _with_settled_times(entries: Iterator[ImageEntry], epoch_s: int) -> Iterator[ImageEntry]:
    """The entries, none later than `epoch_s`; each folder comes with all in it, as engines export it.

    Byte code of a source with a late time comes behind the folder of the source. Where it was stale before,
    it is dropped: it would look fresh.
    """
    folders: dict[str, _OpenFolder] = {}
    for entry in entries:
        for folder in [one for one in folders if not entry.name.startswith(one)]:
            yield from _closed(folders.pop(folder), epoch_s)
        if entry.kind == HARD_LINK and (one := _holder(folders, entry.link)):
            one.links.append(entry)
            continue
        if entry.kind != REGULAR or not entry.name.endswith((".py", ".pyc")):
            yield _clamped_code(entry, epoch_s)
            continue
        above, _, name = entry.name.rpartition("/")
        folder = f"{above.removesuffix('/__pycache__')}/"
        source = name.partition(".")[0]
        if name.endswith(".py"):
            if entry.mtime_s > epoch_s:
                folders.setdefault(folder, _OpenFolder()).times[source] = entry.mtime_s
            yield _clamped_code(entry, epoch_s)
            continue
        if 16 <= entry.size_bytes <= _MOST_CODE_BYTES and entry.mtime_s > epoch_s:
            data = entry.read()
            flags, time_s = _HEAD.unpack_from(data)
            if not flags and time_s > epoch_s:
                folders.setdefault(folder, _OpenFolder()).held.append((source, entry, data))
                continue
            entry = entry.with_content(data)
        yield _clamped_code(entry, epoch_s)
    for one in folders.values():
        yield from _closed(one, epoch_s)


def _holder(folders: Mapping[str, _OpenFolder], path: str) -> _OpenFolder | None:
    return next((one for one in folders.values() if one.holds(path)), None)


def _closed(folder: _OpenFolder, epoch_s: int) -> Iterator[ImageEntry]:
    shown = set()
    for source, entry, data in folder.held:
        (time_s,) = _TIME.unpack_from(data, _TIME_AT)
        if folder.times.get(source, time_s) & 0xFFFFFFFF == time_s:
            changed = data[:_TIME_AT] + _TIME.pack(epoch_s) + data[_TIME_AT + _TIME.size :]
            shown.add(entry.name)
            yield _clamped_code(entry.with_content(changed), epoch_s)
    yield from (_clamped_code(one, epoch_s) for one in folder.links if one.link in shown)


def _clamped_code(entry: ImageEntry, epoch_s: int) -> ImageEntry:
    return entry if entry.mtime_s <= epoch_s else entry.changed(mtime_s=epoch_s)
