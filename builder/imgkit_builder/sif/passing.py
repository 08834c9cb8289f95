"""The one place through which every entry of a conversion passes on its way into the squashfs.

`stream` (an archive's layers) and `export` (the engine's) both give entries in their order. A stage takes
such an iterator and gives another: it may change, drop, add or observe entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from imgkit_builder.archive import tar_entry
from imgkit_builder.archive.tar_header import CAPABILITY, HARD_LINK
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import document, locked, normalise
from imgkit_builder.sif.image_entry import ImageEntry, PassingStage
from imgkit_builder.sif.squash import Squash


def stages(config: ImageConfig) -> tuple[PassingStage, ...]:
    """What the entries of an image with this configuration pass through, in this order."""
    epoch_s = locked.epoch_s(config)
    normalised = () if epoch_s is None else (normalise.stage(epoch_s),)
    return (*normalised, document.adding(config))


def send(
    entries: Iterator[ImageEntry], made: Squash, config: ImageConfig, note: Callable[[str], None]
) -> None:
    """Write `entries` to `made`, as the stages for `config` leave them; `note` learns what is left out."""
    for stage in stages(config):
        entries = stage(entries)
    bare = 0
    for entry in entries:
        others = entry.xattrs.keys() - {CAPABILITY}
        bare += bool(others)
        made.owners.update((entry.uid, entry.gid))
        made.entry(entry.kind, _header(entry) if others else entry.header or _header(entry))
        if entry.size_bytes:
            made.content(entry.content, entry.size_bytes)
        for name in entry.names[1:]:
            made.entry(entry.kind, tar_entry.header(name, HARD_LINK, link=entry.name))
    if bare:
        note(f"{bare} files lose extended attributes: a .sif of imgkit holds capabilities only")


def _header(entry: ImageEntry) -> bytes:
    return tar_entry.header(
        entry.name,
        entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_s=entry.mtime_s,
        size_bytes=entry.size_bytes,
        link=entry.link,
        device=entry.device,
        xattrs=entry.xattrs,
    )
