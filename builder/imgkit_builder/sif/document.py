"""Put a list of the packages into a .sif, made of the files that pass into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from imgkit_builder.archive.tar_header import DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import BAKED, DOCUMENT, InventoryCollector
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.sif.image_entry import ImageEntry, PassingStage

_ABOVE = ("opt", BAKED)
"""Folders above the document."""


def adding(config: ImageConfig) -> PassingStage:
    """A stage that lets all entries pass, and adds `collector.DOCUMENT` behind the last one.

    An image whose /opt or /opt/imgkit is no folder gets none.
    """

    def pass_on(entries: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
        collector = InventoryCollector()
        above: dict[str, bytes] = {}
        for entry in entries:
            if DOCUMENT in entry.names:
                # The image was made from a .sif, and its list is that of another image.
                if entry.kind == DIRECTORY:
                    above[DOCUMENT] = DIRECTORY
                elif names := tuple(one for one in entry.names if one != DOCUMENT):
                    entry = entry.changed(names=names)
                else:
                    continue
            if entry.name in _ABOVE:
                above[entry.name] = entry.kind
            yield observed(entry, collector)
        if set(above.values()) <= {DIRECTORY} and DOCUMENT not in above:
            created_s = epoch(config.created)
            for folder in _ABOVE:
                if folder not in above:
                    yield ImageEntry(names=(folder,), kind=DIRECTORY, mtime_s=created_s)
            text = spdx.document(collector.inventory(arch=config.arch, created_s=created_s))
            file = ImageEntry(names=(DOCUMENT,), kind=REGULAR, mode=0o644, mtime_s=created_s)
            yield file.with_content(text.encode())

    return pass_on


def observed(entry: ImageEntry, collector: InventoryCollector) -> ImageEntry:
    """`entry`; `collector` gets a copy where that is of interest, and no large one."""
    if entry.kind == REGULAR:
        wanted = [name for name in entry.names if collector.wants(name)]
        if wanted and entry.size_bytes > min(collector.most_bytes(name) for name in wanted):
            for name in wanted:
                collector.add(name, None)
        elif wanted:
            data = entry.read()
            for name in wanted:
                collector.add(name, data)
            return replace(entry, content=(data,))  # with its own header
    elif entry.kind == HARD_LINK or entry.kind == SYMLINK:
        for name in entry.names:
            collector.add_link(name, entry.link, hard=entry.kind == HARD_LINK)
    return entry
