"""Every source of an image as one stream of merged entries: an archive, an OCI folder, a pipe, an engine.

Layers: nothing is unpacked and no runtime is needed. The first pass reads headers and decides which members
show (`archive.layers`), while threads compare every layer with its digest. The second pass yields them.

Export: an engine's image is read from the file system of a container that never starts. imgkit leaves out the
files that a container has and an image lacks (``.dockerenv``, empty ``etc/hosts``, ...). Docker creates them
even if the image has its own, so the stream lacks the image's content of those few; docs/reference/files.md
lists what can differ from the layers. Symlinks with a pax header are written anew, because mksquashfs 4.5.1
drops the leading ``/``, ``./`` and ``../`` of their targets.

mksquashfs 4.5.1 also loses a hard link before its target and the second of two equal names, and gives missing
folders the current time. So each name comes once, folders first, and a link directly after its file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from imgkit_builder.archive import compressed, stored
from imgkit_builder.archive.layers import FolderEntry, LayerTree, Plan, scan_layers
from imgkit_builder.archive.stored import NoRoom, Spool, StoredImage
from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR, SYMLINK, Member, TarStream
from imgkit_builder.base.progress import Reporter
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import BAKED, DOCUMENT, MOST_BYTES, InventoryCollector
from imgkit_builder.oci.config import ImageConfig, creation_time_s
from imgkit_builder.sif import mksquashfs
from imgkit_entrypoints.errors import CheckFailed, UsageError

UNPACKED_FACTOR = 3.0
"""Guessed ratio of a compressed archive."""

# The first member of every docker export; its time is that of the export.
_EXPORT_MARK = ".dockerenv"
_MARK_WINDOW_S = 5
"""How far from it the times of files are that the engine makes with the container."""
_ENGINE_FILES = frozenset({"dev/console", "etc/hostname", "etc/hosts", "etc/resolv.conf"})
_ENGINE_FOLDERS = frozenset({"dev/pts", "dev/shm"})
# Folders whose times the engine changes by making its files.
_TOUCHED_FOLDERS = frozenset({"dev", "etc", "proc", "sys", "dev/pts", "dev/shm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """A file, folder, link or device, and the names under which it shows."""

    names: tuple[str, ...]
    """Relative paths; all but the first become hard links to the first."""
    kind: bytes
    """Type flag of a tar. An engine's export has hard links as entries of their own, behind their target."""
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    link: str = ""
    """Target of a symlink or hard link."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number."""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    """Size of a file; 0 for other kinds."""
    content: Iterable[bytes | memoryview] = ()
    """The bytes of a file. They can be read once: a stage that reads them gives a copy on."""
    header: bytes = b""
    """The tar's own blocks for it; empty: they are made from the values above."""

    @property
    def name(self) -> str:
        """Its first path."""
        return self.names[0]

    def read(self) -> bytes:
        """Return all of `content`, which cannot be read again if it is an iterator."""
        return b"".join(map(bytes, self.content))

    def changed(self, **values: Any) -> ImageEntry:
        """Return a copy with other `values`, whose header is made from them."""
        return replace(self, header=b"", **values)

    def passed_on(self, content: Iterable[bytes | memoryview]) -> ImageEntry:
        """Return a copy with the same header, whose bytes come from `content`."""
        return replace(self, content=content)

    def with_content(self, data: bytes) -> ImageEntry:
        """Return a copy with `data` as its content."""
        return self.changed(content=(data,), size_bytes=len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An image archive: docker's two layouts or OCI, plain, gzip or zstd."""

    path: Path

    @property
    def name(self) -> str:
        """A name for messages."""
        return self.path.name.split(".tar", 1)[0]

    @property
    def is_compressed(self) -> bool:
        """Whether the archive as a whole is compressed."""
        return compressed.detect_compression(self.path) != "none"

    @property
    def size_bytes(self) -> int:
        """Size of the uncompressed image, which is estimated if it is compressed."""
        size_bytes = self.path.stat().st_size
        if self.is_compressed:
            return int(size_bytes * UNPACKED_FACTOR)
        return size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OciFolder:
    """An OCI image layout folder."""

    path: Path

    @property
    def name(self) -> str:
        """A name for messages."""
        return self.path.name

    @property
    def size_bytes(self) -> int:
        """Size of its blobs."""
        return sum(path.stat().st_size for path in self.path.glob("blobs/sha256/*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """An image archive that comes through a pipe."""

    stream: BinaryIO
    name: str = "-"

    @property
    def size_bytes(self) -> int | None:
        """Bytes that standard input still has where it is a file, as in ``imgkit sif - < X.tar``."""
        try:
            status = os.fstat(self.stream.fileno())
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return status.st_size

    def chunks(self) -> Generator[bytes, None, None]:
        """Yield the plain bytes. A compressed archive is decompressed on the way."""
        # The first bytes tell the compression. A pipe cannot be read again, so they go in front of the rest.
        start = self.stream.read(compressed.CHUNK_BYTES)
        rest = iter(lambda: self.stream.read(compressed.CHUNK_BYTES), b"")
        raw = itertools.chain([start], rest)
        return compressed.unpack_chunks(raw, compressed.compression_of(start), name="standard input")


@runtime_checkable
class EngineImage(Protocol):
    """An image of a Docker engine. ``engine.LocalImage`` is one."""

    @property
    def name(self) -> str:
        """A name for messages: tag or id."""

    @property
    def config(self) -> ImageConfig:
        """Its OCI configuration."""

    @property
    def size_bytes(self) -> int:
        """Size of its layers, uncompressed."""

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``."""

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container made of it."""


Source = Archive | OciFolder | Piped | EngineImage


def is_spooled(source: Source) -> bool:
    """Return whether the image goes to disk as a plain archive first.

    A stream names the order of its layers last.
    """
    if isinstance(source, Archive):
        return source.is_compressed
    return not isinstance(source, OciFolder)


def peek_config(source: Source) -> ImageConfig | None:
    """Return the image configuration, or None if that would take reading layers or it is damaged."""
    if isinstance(source, EngineImage):
        return source.config
    # Reading all of it costs as much as the conversion.
    if isinstance(source, Piped) or is_spooled(source):
        return None
    try:
        return stored.open_image(source.path).selected.config
    except (OSError, UsageError, CheckFailed):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenImage:
    """An image whose configuration has been read, and whose files are still to come."""

    name: str
    """Name for people: a tag where there is one."""
    config: ImageConfig
    size_bytes: int
    """Size of its layers, as they lie there."""
    files: StoredImage | EngineImage
    """Layers, or an image to export."""


@contextlib.contextmanager
def open_source(
    source: Source,
    folder: Path,
    report: Reporter,
    *,
    exports: bool = False,
    unpack_limit_bytes: int | None,
) -> Iterator[OpenImage]:
    """Yield the image of `source`, from a plain archive in `folder` if it is a stream or compressed.

    With `exports`, an engine's image is not saved, because it is read by its export.

    Raises
    ------
    CheckFailed, UsageError : damaged, or not one image.
    ToolMissing : it is compressed with zstd, and there is no such program.
    """
    if exports and isinstance(source, EngineImage):
        yield OpenImage(name=source.name, config=source.config, size_bytes=source.size_bytes, files=source)
        return
    with _open_stored(source, folder, report, unpack_limit_bytes) as image:
        name = source.name
        # The engine's name is the one that the user typed; an archive may state several.
        if image.selected.names and not isinstance(source, EngineImage):
            name = image.selected.names[0]
        yield OpenImage(name=name, config=image.selected.config, size_bytes=image.stored_bytes, files=image)


@contextlib.contextmanager
def _open_stored(
    source: Source, folder: Path, report: Reporter, unpack_limit_bytes: int | None
) -> Iterator[StoredImage]:
    if isinstance(source, Archive | OciFolder):
        if is_spooled(source):
            report.stage(f"decompress {source.path.name}")
        with stored.open_archive(
            source.path, folder, advance=report.advance, unpack_limit_bytes=unpack_limit_bytes
        ) as image:
            yield image
        return
    opening: AbstractContextManager[Iterator[bytes]]
    if isinstance(source, Piped):
        report.stage("read standard input")
        opening = contextlib.closing(source.chunks())
        total = None
    else:
        report.stage(f"save {source.name} from the engine")
        opening = source.save()
        total = source.size_bytes
    spool = folder / "spool.tar"
    with opening as chunks:
        digests = stored.spool_archive(
            chunks, spool, where=source.name, advance=lambda done_bytes: report.advance(done_bytes, total)
        )
    yield stored.open_image(spool, where=source.name, digests=digests)
    spool.unlink()


@contextlib.contextmanager
def image_entries(
    image: OpenImage,
    folder: Path,
    report: Reporter,
    *,
    spool_bytes: int = 0,
    unpack_limit_bytes: int | None,
) -> Iterator[Iterator[ImageEntry]]:
    """Yield the entries of `image`: what shows of its layers, or its export.

    Layers are first compared with their digests. Compressed ones are unpacked once, into `folder`, if they
    fit in `spool_bytes`. Otherwise they are unpacked twice.

    Raises
    ------
    CheckFailed : a layer is damaged or holds what no image may.
    """
    files = image.files
    created_s = creation_time_s(image.config.created)
    if not isinstance(files, StoredImage):
        report.stage("export and squash")
        with files.export() as chunks:
            yield export_entries(
                chunks,
                created_s=created_s,
                name=image.name,
                advance=lambda done_bytes: report.advance(done_bytes, image.size_bytes),
            )
        return

    def merge(spool: Spool | None) -> Iterator[ImageEntry]:
        tree = LayerTree(files.where)
        plain = scan_layers(
            files,
            tree.add_layer,
            threads=mksquashfs.gather_limits().processors,
            unpack_limit_bytes=unpack_limit_bytes,
            spool=spool,
        )
        report.stage("merge and squash")
        return _visible_entries(plain, tree.take_plan(), created_s, report)

    if files.packed_bytes and spool_bytes:
        report.stage("unpack the layers")
        # NoRoom comes from `merge`, before anything is yielded: the layers are then read from the beginning.
        with (
            contextlib.suppress(NoRoom),
            Spool(folder=folder, room_bytes=spool_bytes, advance=report.advance) as spool,
        ):
            yield merge(spool)
            return
    if files.packed_bytes:
        report.note(f"the layers are unpacked twice: {folder.parent} has no room for their plain bytes")
    report.stage("read the layers")
    yield merge(None)


def _visible_entries(
    image: StoredImage, plan: Plan, created_s: int, report: Reporter
) -> Iterator[ImageEntry]:
    """Yield the folders of `plan`, then the files of each layer that show."""
    for path, folder in plan.folders:
        folder = folder or FolderEntry(mtime_s=created_s)
        yield ImageEntry(
            names=(path,),
            kind=DIRECTORY,
            mode=folder.mode,
            uid=folder.uid,
            gid=folder.gid,
            mtime_s=folder.mtime_s,
            xattrs=folder.xattrs,
        )
    total = image.stored_bytes
    start = 0
    for layer, names in zip(image.layers, plan.names, strict=True):
        if names:
            with layer.open(bodies=True) as stream:
                for number, member in enumerate(stream):
                    if number not in names:
                        continue
                    yield member_entry(member, stream.content(), names=names.pop(number))
                    position = start + stream.position
                    report.advance(position, max(total, position))
                    # The rest of the layer is hidden by later ones, or is nothing but whiteouts.
                    if not names:
                        break
        start += layer.region.size_bytes


def member_entry(
    member: Member, content: Iterable[bytes | memoryview], *, names: tuple[str, ...] = (), header: bytes = b""
) -> ImageEntry:
    """Return the entry of a tar's member. `names` replaces its own name."""
    is_file = member.kind == REGULAR
    return ImageEntry(
        names=names or (member.name,),
        kind=member.kind,
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        mtime_s=member.mtime_s,
        link=member.link,
        device=member.device,
        xattrs=member.xattrs,
        size_bytes=member.content_bytes if is_file else 0,
        content=content if is_file else (),
        header=header,
    )


def export_entries(
    chunks: Iterator[bytes],
    *,
    created_s: int,
    name: str = "docker export",
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[ImageEntry]:
    """Yield the entries of an export stream, without the files that the engine adds.

    `name` is that of the image, for messages.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short.
    """
    mark_s: int | None = None
    stream = TarStream(chunks, name=name)
    for member in stream:
        # Files of the engine are told from the image's own by this time and by what they contain.
        if member.name == _EXPORT_MARK:
            mark_s = member.mtime_s
        is_recent = mark_s is not None and abs(member.mtime_s - mark_s) <= _MARK_WINDOW_S
        if not member.name or _is_of_engine(member, is_recent):
            continue
        if member.name in _TOUCHED_FOLDERS and member.kind == DIRECTORY and is_recent:
            yield member_entry(member, ()).changed(mtime_s=created_s)
        else:
            # Its own header is the fastest, unless mksquashfs 4.5.1 misreads it or a map follows.
            is_misread = member.kind == SYMLINK and "linkpath" in member.pax
            header = b""
            if member.sparse is None and not is_misread:
                header = member.extended + member.header
            yield member_entry(member, stream.content(), header=header)
        advance(stream.position)
    # The engine reports an error if nobody reads the end of its stream.
    stream.drain()


def _is_of_engine(member: Member, is_recent: bool) -> bool:
    """Return whether the engine created it together with the container."""
    if member.name == _EXPORT_MARK:
        return True
    if member.name in _ENGINE_FILES:
        return member.kind == REGULAR and member.size_bytes == 0 and member.mode & 0o777 == 0o755
    if member.name == "etc/mtab":
        return member.kind == SYMLINK and member.link == "/proc/mounts" and is_recent
    return member.name in _ENGINE_FOLDERS and member.kind == DIRECTORY and is_recent


def with_added_files(
    entries: Iterator[ImageEntry], replacing: Iterable[ImageEntry], if_missing: Iterable[ImageEntry]
) -> Iterator[ImageEntry]:
    """Yield `entries` with files of imgkit's behind the last one.

    `replacing` take the place of what has their names or hides them, as in an image that was made from a
    .sif. `if_missing` give way, and nothing of them is added behind a link of the image.
    """
    winners = {entry.name: entry for entry in replacing}
    added = winners | {entry.name: entry for entry in if_missing}
    top_folders = {path.partition("/")[0] for path in added}
    for entry in entries:
        # Few entries lie in a folder to which imgkit adds something; the others pass without a look.
        if not any(name.partition("/")[0] in top_folders for name in entry.names):
            yield entry
            continue
        names = tuple(name for name in entry.names if not _is_replaced(name, entry.kind, winners))
        if not names:
            continue
        for name in names:
            # Nothing is added below a file or link of the image.
            if added.pop(name, None) and entry.kind != DIRECTORY:
                added = {path: new for path, new in added.items() if not path.startswith(f"{name}/")}
        # A folder keeps what is in it, and gets imgkit's owner, mode and time.
        if names[0] in winners:
            entry = winners[names[0]]
        elif names != entry.names:
            entry = entry.changed(names=names)
        yield entry
    # Folders sort before what is in them.
    for path in sorted(added):
        yield added[path]


def _is_replaced(path: str, kind: bytes, replacing: Mapping[str, ImageEntry]) -> bool:
    """Return whether an entry of the image is where one of `replacing` goes, or below one that is a file."""
    parent = path
    while parent:
        new = replacing.get(parent)
        if new is not None and (new.kind != DIRECTORY or (parent == path and kind != DIRECTORY)):
            return True
        parent = parent.rpartition("/")[0]
    return False


def with_package_list(entries: Iterator[ImageEntry], config: ImageConfig) -> Iterator[ImageEntry]:
    """Yield `entries`, and behind the last one `DOCUMENT`, the list of their packages.

    An image whose /opt or /opt/imgkit is no folder gets none.
    """
    collector = InventoryCollector()
    folders = ("opt", BAKED)
    kinds: dict[str, bytes] = {}
    for entry in entries:
        if DOCUMENT in entry.names:
            # The image was made from a .sif, and its list is that of another image.
            names = tuple(name for name in entry.names if name != DOCUMENT)
            if entry.kind == DIRECTORY:
                kinds[DOCUMENT] = DIRECTORY
            elif names:
                entry = entry.changed(names=names)
            else:
                continue
        if entry.name in folders:
            kinds[entry.name] = entry.kind
        yield copy_for_inventory(entry, collector)
    # The image's own folder of that name, or a link on the way: nothing is written through it.
    if DOCUMENT in kinds or set(kinds.values()) - {DIRECTORY}:
        return
    created_s = creation_time_s(config.created)
    for folder in folders:
        if folder not in kinds:
            yield ImageEntry(names=(folder,), kind=DIRECTORY, mtime_s=created_s)
    text = spdx.spdx_document(collector.inventory(arch=config.arch, created_s=created_s))
    document = ImageEntry(names=(DOCUMENT,), kind=REGULAR, mode=0o644, mtime_s=created_s)
    yield document.with_content(text.encode())


def copy_for_inventory(entry: ImageEntry, collector: InventoryCollector) -> ImageEntry:
    """Give `collector` a copy of what it wants of `entry`.

    Return an entry whose content can still be read.
    """
    if entry.kind == HARD_LINK:
        for name in entry.names:
            collector.add_hard_link(name, entry.link)
    if entry.kind != REGULAR:
        return entry
    names = [name for name in entry.names if collector.wants(name)]
    if not names:
        return entry
    # A large file is passed on unread: memory stays bounded, and the list says that it was skipped.
    data = None
    if entry.size_bytes <= MOST_BYTES:
        data = entry.read()
        entry = entry.passed_on((data,))
    for name in names:
        collector.add(name, data)
    return entry
