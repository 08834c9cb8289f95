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
import math
import os
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from imgkit_builder.archive import compressed, stored
from imgkit_builder.archive.layers import FolderEntry, LayerTree, MergePlan, scan_layers
from imgkit_builder.archive.stored import NoRoom, Spool, StoredImage
from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR, SYMLINK, Member, TarStream
from imgkit_builder.base.progress import Reporter
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import MAX_FILE_BYTES, OWN_FOLDER, SPDX_PATH, InventoryCollector
from imgkit_builder.oci.config import ImageConfig, creation_time_s
from imgkit_builder.sif import mksquashfs
from imgkit_entrypoints.errors import CheckFailed, UsageError

UNPACKED_FACTOR = 3.0
"""A compressed archive is guessed to unpack to this many times its size."""

# The engine creates this file with a container. It is the first member of every docker export.
_DOCKERENV = ".dockerenv"
_CREATION_S = 5
"""Seconds in which the engine creates its files in a new container."""
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
    """The bytes of a file. They can be read once only: who reads them passes on a copy."""
    header: bytes = b""
    """The blocks of the tar that the entry came from, to be written again unchanged. If they are empty, the
    blocks are made from the values above."""

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

    def without_names(self, names: Collection[str]) -> ImageEntry | None:
        """Return a copy without the paths `names`, or None if no path is left."""
        if not names:
            return self
        remaining = tuple(name for name in self.names if name not in names)
        if not remaining:
            return None
        return self.changed(names=remaining)

    def with_read_content(self, data: bytes) -> ImageEntry:
        """Return a copy from which `data`, all of the content just read, can be read again."""
        return replace(self, content=(data,))

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
        """Size of the archive if the stream is a file, as in ``imgkit sif - < X.tar``; None for a pipe."""
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
    """Return whether the image must be written to disk as an uncompressed archive before it is converted.

    A stream must, because an archive states the order of its layers at its end, and a stream cannot be read
    twice. The same holds for a compressed archive.
    """
    if isinstance(source, Archive):
        return source.is_compressed
    return not isinstance(source, OciFolder)


def peek_config(source: Source) -> ImageConfig | None:
    """Return the image configuration if it can be had at once.

    Return None if the layers would have to be read or unpacked for it, or if the image is damaged.
    """
    if isinstance(source, EngineImage):
        return source.config
    # To reach the configuration, most of the archive must be read or unpacked.
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
    """Size of its layers, compressed or not."""
    files: StoredImage | EngineImage
    """The layers in a file, or the image in an engine, whose ``docker export`` is read."""


@contextlib.contextmanager
def open_source(
    source: Source,
    folder: Path,
    report: Reporter,
    *,
    exports: bool = False,
    unpack_limit_bytes: int | None,
) -> Iterator[OpenImage]:
    """Yield the image of `source`. A stream or a compressed archive is first written to `folder`, unpacked.

    Parameters
    ----------
    exports : leave an engine's image in the engine. `image_entries` then reads its export.
    unpack_limit_bytes : refuse a compressed archive that unpacks to more. None stands for the default limit.

    Raises
    ------
    CheckFailed, UsageError : damaged, or not one image.
    ToolMissing : it is compressed with zstd, and there is no such program.
    """
    if isinstance(source, EngineImage) and exports:
        yield OpenImage(name=source.name, config=source.config, size_bytes=source.size_bytes, files=source)
        return
    with _open_stored(source, folder, report, unpack_limit_bytes) as image:
        name = source.name
        # The engine's name is the one that the user typed; an archive may state several.
        if image.selected.names and not isinstance(source, EngineImage):
            name = image.selected.names[0]
        yield OpenImage(name=name, config=image.selected.config, size_bytes=image.stored_bytes, files=image)


def _open_stored(
    source: Source, folder: Path, report: Reporter, unpack_limit_bytes: int | None
) -> AbstractContextManager[StoredImage]:
    """Return a context manager that yields the image of `source` with its layers in files.

    They must be in files because the layers are read twice. A stream or a compressed archive is first
    written to `folder` without compression.
    """
    if isinstance(source, Piped):
        report.stage("read standard input")
        return _spool_stream(contextlib.closing(source.chunks()), folder, report, name=source.name)
    if isinstance(source, EngineImage):
        report.stage(f"save {source.name} from the engine")
        return _spool_stream(source.save(), folder, report, name=source.name, total_bytes=source.size_bytes)
    if is_spooled(source):
        report.stage(f"decompress {source.path.name}")
    return stored.open_archive(
        source.path, folder, advance=report.advance, unpack_limit_bytes=unpack_limit_bytes
    )


@contextlib.contextmanager
def _spool_stream(
    opening: AbstractContextManager[Iterator[bytes]],
    folder: Path,
    report: Reporter,
    *,
    name: str,
    total_bytes: int | None = None,
) -> Iterator[StoredImage]:
    """Write the archive that comes as a stream to a temporary file in `folder`, and yield its image.

    `name` is the image's, for messages. `total_bytes` is the size of the stream, if it is known.
    """
    path = folder / "spool.tar"
    with opening as chunks:
        image = stored.spool_archive(
            chunks, path, where=name, advance=lambda done_bytes: report.advance(done_bytes, total_bytes)
        )
    yield image
    path.unlink()


@contextlib.contextmanager
def image_entries(
    image: OpenImage,
    folder: Path,
    report: Reporter,
    *,
    spool_bytes: int = 0,
    unpack_limit_bytes: int | None,
) -> Iterator[Iterator[ImageEntry]]:
    """Yield an iterator over the visible files of `image`, folders first.

    They come from an engine's export, or from the layers: then all layers are first compared with their
    digests, and files that a later layer replaces or deletes are left out. Compressed layers are unpacked
    once, into `folder`, if they fit in `spool_bytes`, and otherwise twice.

    Raises
    ------
    CheckFailed : a layer is damaged or holds what no image may.
    """
    layers = image.files
    created_s = creation_time_s(image.config.created)
    if not isinstance(layers, StoredImage):
        report.stage("export and squash")
        with layers.export() as chunks:
            yield export_entries(
                chunks,
                created_s=created_s,
                name=image.name,
                advance=lambda done_bytes: report.advance(done_bytes, image.size_bytes),
            )
        return
    if layers.packed_bytes and spool_bytes:
        report.stage("unpack the layers")
        # NoRoom is raised before anything is yielded: the layers are then read from the beginning.
        with (
            contextlib.suppress(NoRoom),
            Spool(folder=folder, room_bytes=spool_bytes, advance=report.advance) as spool,
        ):
            yield _merge_layers(layers, created_s, report, unpack_limit_bytes, spool)
            return
    if layers.packed_bytes:
        report.note(f"the layers are unpacked twice: {folder.parent} has no room for their plain bytes")
    report.stage("read the layers")
    yield _merge_layers(layers, created_s, report, unpack_limit_bytes)


def _merge_layers(
    image: StoredImage,
    created_s: int,
    report: Reporter,
    unpack_limit_bytes: int | None,
    spool: Spool | None = None,
) -> Iterator[ImageEntry]:
    """Compare the layers with their digests, and return the visible entries, folders first.

    Parameters
    ----------
    created_s : time for folders that are in no layer, only files below them.
    spool : temporary files for unpacked layers. Without it, compressed layers are unpacked a second time.

    Raises
    ------
    NoRoom : the unpacked layers do not fit in `spool`.
    """
    tree = LayerTree(image.where)
    scanned = scan_layers(
        image,
        tree.add_layer,
        threads=mksquashfs.gather_limits().processors,
        unpack_limit_bytes=unpack_limit_bytes,
        spool=spool,
    )
    report.stage("merge and squash")
    plan = tree.dissolve()
    folders = (_folder_entry(path, folder, created_s) for path, folder in plan.folders)
    return itertools.chain(folders, _visible_files(scanned, plan, report))


def _folder_entry(path: str, folder: FolderEntry | None, created_s: int) -> ImageEntry:
    """Return the entry of the folder `path`.

    `folder` is None if no layer has the folder itself, only files below it. Then it belongs to root, and has
    the mode 0755 and the time `created_s`.
    """
    if folder is None:
        folder = FolderEntry(mtime_s=created_s)
    return ImageEntry(
        names=(path,),
        kind=DIRECTORY,
        mode=folder.mode,
        uid=folder.uid,
        gid=folder.gid,
        mtime_s=folder.mtime_s,
        xattrs=folder.xattrs,
    )


def _visible_files(image: StoredImage, plan: MergePlan, report: Reporter) -> Iterator[ImageEntry]:
    """Read the layers a second time, and yield the files, links and devices that are visible in the image.

    `plan` says which members of each layer are visible, and under which names. It is emptied on the way to
    free memory.
    """
    total_bytes = image.stored_bytes
    earlier_bytes = 0
    for layer, visible_paths in zip(image.layers, plan.visible_paths, strict=True):
        if visible_paths:
            with layer.open(bodies=True) as stream:
                for entry in _visible_files_of_layer(stream, visible_paths):
                    yield entry
                    done_bytes = earlier_bytes + stream.position
                    report.advance(done_bytes, max(total_bytes, done_bytes))
        earlier_bytes += layer.region.size_bytes


def _visible_files_of_layer(
    stream: TarStream, visible_paths: dict[int, tuple[str, ...]]
) -> Iterator[ImageEntry]:
    """Yield the members of a layer at the positions in `visible_paths`, and remove these on the way."""
    for position, member in enumerate(stream):
        if position not in visible_paths:
            continue
        yield member_entry(member, stream.content(), names=visible_paths.pop(position))
        if not visible_paths:
            return  # later layers hide the rest


def member_entry(
    member: Member, content: Iterable[bytes | memoryview], *, names: tuple[str, ...] = (), header: bytes = b""
) -> ImageEntry:
    """Return the entry of a tar's member.

    Parameters
    ----------
    content : the bytes behind the member's header. Only a regular file has them.
    names : the paths of the entry, in place of the name in the tar.
    header : the member's blocks in the tar, to be written again unchanged.
    """
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
    """Yield the entries of a ``docker export`` stream, without the files that the engine adds.

    The engine has made a container for the export, and has put files such as ``etc/hosts`` into it. They are
    known by their names and by their time, which is that of ``.dockerenv``, the first file.

    Parameters
    ----------
    created_s : time of the image. Folders whose times the engine has changed get it.
    name : the image's, for messages.
    advance : receives the number of bytes read so far.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short.
    """
    container_s: float = math.inf
    stream = TarStream(chunks, name=name)
    for member in stream:
        if member.name == _DOCKERENV:
            container_s = member.mtime_s
        is_recent = abs(member.mtime_s - container_s) <= _CREATION_S
        is_root = not member.name
        if is_root or _is_made_by_engine(member, is_recent):
            continue
        if is_recent and member.kind == DIRECTORY and member.name in _TOUCHED_FOLDERS:
            yield member_entry(member, ()).changed(mtime_s=created_s)
        else:
            yield member_entry(member, stream.content(), header=_reusable_header(member))
        advance(stream.position)
    # The engine reports an error if nobody reads the end of its stream.
    stream.drain()


def _reusable_header(member: Member) -> bytes:
    """Return the tar blocks of `member` if mksquashfs can read them. Otherwise they must be made anew."""
    # mksquashfs 4.5.1 cuts the target of a symlink in a pax header.
    is_misread = member.kind == SYMLINK and "linkpath" in member.pax
    if is_misread or member.sparse is not None:
        return b""
    return member.extended + member.header


def _is_made_by_engine(member: Member, is_recent: bool) -> bool:
    """Return whether the engine, not the image, has put the file into the container.

    The engine's files are empty and have the mode 0755. `is_recent` says that the file was made within
    seconds of the container.
    """
    if member.name == _DOCKERENV:
        return True
    if member.name in _ENGINE_FILES:
        is_empty_file = member.kind == REGULAR and member.size_bytes == 0
        return is_empty_file and member.mode & 0o777 == 0o755
    if not is_recent:
        return False
    if member.name == "etc/mtab":
        return member.kind == SYMLINK and member.link == "/proc/mounts"
    return member.name in _ENGINE_FOLDERS and member.kind == DIRECTORY


def with_added_files(
    entries: Iterator[ImageEntry], replacing: Iterable[ImageEntry], if_missing: Iterable[ImageEntry]
) -> Iterator[ImageEntry]:
    """Yield the image's `entries`, and behind the last one the files that imgkit adds.

    Parameters
    ----------
    replacing : files that replace what the image has at their paths. An image that was made from a .sif may
        have some of them.
    if_missing : files that are added only if the image has nothing at their paths, and no link or file where
        they need a folder.
    """
    replacing_by_path = {entry.name: entry for entry in replacing}
    to_add = replacing_by_path | {entry.name: entry for entry in if_missing}
    top_folders = {_top_folder(path) for path in to_add}
    for entry in entries:
        # For speed: most entries are in folders to which imgkit adds nothing.
        if top_folders.isdisjoint(map(_top_folder, entry.names)):
            yield entry
            continue
        replaced_names = [name for name in entry.names if _is_replaced(name, entry.kind, replacing_by_path)]
        remaining = entry.without_names(replaced_names)
        if remaining is not None:
            for path in _paths_in_place(remaining, to_add):
                to_add.pop(path, None)
            # A folder of imgkit only changes owner, mode and time: what the image has in the folder stays.
            yield replacing_by_path.get(remaining.name, remaining)
    # Folders sort before what is in them.
    for path in sorted(to_add):
        yield to_add[path]


def _top_folder(path: str) -> str:
    """Return the first name in `path`: ``usr`` of ``usr/lib/a``."""
    return path.partition("/")[0]


def _paths_in_place(existing: ImageEntry, to_add: Collection[str]) -> list[str]:
    """Return the paths of `to_add` at which imgkit adds nothing, since the image has `existing` there.

    If `existing` is a file or link, these are also the paths below it.
    """
    paths = [name for name in existing.names if name in to_add]
    if existing.kind == DIRECTORY:
        return paths
    folders = tuple(f"{path}/" for path in paths)
    return paths + [path for path in to_add if path.startswith(folders)]


def _is_replaced(path: str, kind: bytes, replacing: Mapping[str, ImageEntry]) -> bool:
    """Return whether an entry in `replacing` replaces the image's entry `path`, which is of this `kind`.

    A new file replaces whatever the image has at its path and below it. A new folder replaces a file or link
    at its path, but not a folder and what is in it.
    """
    if path in replacing and kind != DIRECTORY:
        return True
    ancestor = path
    while ancestor:
        new_entry = replacing.get(ancestor)
        if new_entry is not None and new_entry.kind != DIRECTORY:
            return True
        ancestor = ancestor.rpartition("/")[0]
    return False


def with_package_list(entries: Iterator[ImageEntry], config: ImageConfig) -> Iterator[ImageEntry]:
    """Yield `entries`, and behind the last one a document that lists the installed packages in SPDX form.

    No document is added if /opt or /opt/imgkit of the image is a link or file, or if the image has a folder
    at the document's path. An older document of the image is left out.
    """
    collector = InventoryCollector()
    existing_kinds = {}
    for entry in entries:
        remaining: ImageEntry | None = entry
        if SPDX_PATH in entry.names and entry.kind != DIRECTORY:
            # The image was made from a .sif of imgkit. The old list may lack what was installed since.
            remaining = entry.without_names((SPDX_PATH,))
        if remaining is None:
            continue
        if remaining.name in ("opt", OWN_FOLDER, SPDX_PATH):
            existing_kinds[remaining.name] = remaining.kind
        yield copy_for_inventory(remaining, collector)
    has_only_folders = set(existing_kinds.values()) <= {DIRECTORY}
    if SPDX_PATH in existing_kinds or not has_only_folders:
        return
    created_s = creation_time_s(config.created)
    for folder in ("opt", OWN_FOLDER):
        if folder not in existing_kinds:
            yield ImageEntry(names=(folder,), kind=DIRECTORY, mtime_s=created_s)
    text = spdx.spdx_document(collector.inventory(arch=config.arch, created_s=created_s))
    document = ImageEntry(names=(SPDX_PATH,), kind=REGULAR, mode=0o644, mtime_s=created_s)
    yield document.with_content(text.encode())


def copy_for_inventory(entry: ImageEntry, collector: InventoryCollector) -> ImageEntry:
    """Give `collector` a copy of the entry's content if it says something about installed packages.

    Return the entry to pass on: the content of `entry` can be read only once, that of the result again.
    """
    if entry.kind == HARD_LINK:
        for name in entry.names:
            collector.add_hard_link(name, entry.link)
    if entry.kind != REGULAR:
        return entry
    relevant_names = [name for name in entry.names if collector.is_relevant(name)]
    if not relevant_names:
        return entry
    # A large file is not read, so that memory stays bounded. None makes the list say that it was skipped.
    data = None
    if entry.size_bytes <= MAX_FILE_BYTES:
        data = entry.read()
    for name in relevant_names:
        collector.add(name, data)
    if data is None:
        return entry
    return entry.with_read_content(data)
