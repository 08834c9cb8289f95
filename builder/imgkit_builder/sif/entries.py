"""Read an image from any source as one stream of files: from an archive, an OCI folder, a pipe or an engine.

Layers: the layers of the image are merged without unpacking them to disk and without a container runtime. The
first pass reads the tar headers and decides which files are visible (`archive.layers`). Meanwhile, threads
compare every layer with its digest. The second pass yields the visible files.

Export: an engine's image is read with ``docker export`` from a container that never starts. Docker creates
some files in every container, such as ``.dockerenv`` and an empty ``etc/hosts``. imgkit leaves them out.
Docker creates them even if the image has files of the same names, so the stream lacks the image's content of
those few files. docs/reference/files.md lists what can differ from the layers. A symlink with a pax header
gets a new header, because mksquashfs 4.5.1 drops the leading ``/``, ``./`` and ``../`` of its target.

mksquashfs 4.5.1 also loses a hard link that comes before its target, and the second of two equal names. It
gives missing folders the current time. So the stream has each name once, folders come first, and a hard link
comes directly after its file.
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
"""Estimated size of the unpacked content per byte of a compressed archive."""

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
    """A file, folder, link or device of an image, and all its paths in the image."""

    names: tuple[str, ...]
    """Relative paths; all but the first become hard links to the first."""
    kind: bytes
    """Type flag of a tar. In an engine's export, a hard link is an entry of its own after its target."""
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
    """The bytes of a file. They can be read only once, so a reader passes on a copy of the entry."""
    header: bytes = b""
    """The entry's header blocks in the source tar, to be written again unchanged. If empty, new blocks are
    made from the values above."""

    @property
    def name(self) -> str:
        """The first path of the entry."""
        return self.names[0]

    def read(self) -> bytes:
        """Return all of `content`, which cannot be read again if it is an iterator."""
        return b"".join(map(bytes, self.content))

    def changed(self, **values: Any) -> ImageEntry:
        """Return a copy with the fields in `values` replaced. Its tar header will be made anew."""
        # The old header blocks would still describe the old values.
        return replace(self, header=b"", **values)

    def without_names(self, names: Collection[str]) -> ImageEntry | None:
        """Return a copy without the paths in `names`, or None if no path is left."""
        if not names:
            return self
        remaining = tuple(name for name in self.names if name not in names)
        if not remaining:
            return None
        return self.changed(names=remaining)

    def with_read_content(self, data: bytes) -> ImageEntry:
        """Return a copy whose content can be read again. `data` is the complete content just read."""
        # `changed` would drop the header, which still fits this unchanged content.
        return replace(self, content=(data,))

    def with_content(self, data: bytes) -> ImageEntry:
        """Return a copy with `data` as its content."""
        return self.changed(content=(data,), size_bytes=len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An image archive in one of docker's two layouts or in the OCI layout: plain, gzip or zstd."""

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
        """Size of the uncompressed image. It is estimated if the archive is compressed."""
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
        """Yield the bytes of the archive, decompressed if it is compressed."""
        # The first bytes tell the compression. A pipe cannot be read twice, so they are put before the rest.
        start = self.stream.read(compressed.CHUNK_BYTES)
        rest = iter(lambda: self.stream.read(compressed.CHUNK_BYTES), b"")
        raw = itertools.chain([start], rest)
        return compressed.unpack_chunks(raw, compressed.compression_of(start), name="standard input")


@runtime_checkable
class EngineImage(Protocol):
    """An image of a Docker engine. ``engine.LocalImage`` implements this protocol."""

    @property
    def name(self) -> str:
        """A name for messages: tag or id."""

    @property
    def config(self) -> ImageConfig:
        """The OCI configuration of the image."""

    @property
    def size_bytes(self) -> int:
        """Total size of the uncompressed layers."""

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``."""

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container that was created from the image."""


Source = Archive | OciFolder | Piped | EngineImage


def is_spooled(source: Source) -> bool:
    """Return whether the image must be written to disk as an uncompressed archive before it is converted.

    A stream is written to disk because an archive lists the order of its layers at its end, and a stream
    cannot be read twice. A compressed archive is, because imgkit cannot jump to a position in it.
    """
    if isinstance(source, Archive):
        return source.is_compressed
    return not isinstance(source, OciFolder)


def peek_config(source: Source) -> ImageConfig | None:
    """Return the image configuration if it can be read quickly.

    Return None if imgkit would have to read or unpack the layers first, or if the image is damaged.
    """
    if isinstance(source, EngineImage):
        return source.config
    # The configuration can be anywhere in the archive, so most of it would be read or unpacked.
    if isinstance(source, Piped) or is_spooled(source):
        return None
    try:
        return stored.open_image(source.path).selected.config
    except (OSError, UsageError, CheckFailed):
        # Opening the image for the conversion reports the same error to the user.
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenImage:
    """An image whose configuration has been read, but not yet its files."""

    name: str
    """Name for messages: the image's tag if it has one."""
    config: ImageConfig
    size_bytes: int
    """Size of the layers as they are stored, compressed or not."""
    files: StoredImage | EngineImage
    """The layers in a file, or an image in an engine, which is read with ``docker export``."""


@contextlib.contextmanager
def open_source(
    source: Source,
    folder: Path,
    report: Reporter,
    *,
    exports: bool = False,
    unpack_limit_bytes: int | None,
) -> Iterator[OpenImage]:
    """Yield the image of `source` with its configuration.

    A stream or a compressed archive is first written to `folder` as an uncompressed archive.

    Parameters
    ----------
    exports : leave an engine's image in the engine, without a copy on disk. `image_entries` then reads it as
        a stream from ``docker export``.
    unpack_limit_bytes : refuse a compressed archive that unpacks to more bytes. None stands for the default
        limit.

    Raises
    ------
    CheckFailed, UsageError : the source is damaged, or does not contain exactly one image.
    ToolMissing : the source is compressed with zstd, and the program zstd is missing.
    """
    if isinstance(source, EngineImage) and exports:
        yield OpenImage(name=source.name, config=source.config, size_bytes=source.size_bytes, files=source)
        return
    with _open_stored(source, folder, report, unpack_limit_bytes) as image:
        name = source.name
        # An image in an engine keeps the name that the user typed. An archive may list several names.
        if image.selected.names and not isinstance(source, EngineImage):
            name = image.selected.names[0]
        yield OpenImage(name=name, config=image.selected.config, size_bytes=image.stored_bytes, files=image)


def _open_stored(
    source: Source, folder: Path, report: Reporter, unpack_limit_bytes: int | None
) -> AbstractContextManager[StoredImage]:
    """Return a context manager that yields the image of `source` with its layers in files.

    The layers must be in files because they are read twice. A stream or a compressed archive is first written
    to `folder` without compression.
    """
    if isinstance(source, Piped):
        report.stage("read standard input")
        chunks = contextlib.closing(source.chunks())
        return stored.spool_archive(chunks, folder, where=source.name, advance=report.advance)
    if isinstance(source, EngineImage):
        report.stage(f"save {source.name} from the engine")
        total_bytes = source.size_bytes
        return stored.spool_archive(
            source.save(),
            folder,
            where=source.name,
            advance=lambda done_bytes: report.advance(done_bytes, total_bytes),
        )
    if is_spooled(source):
        report.stage(f"decompress {source.path.name}")
    return stored.open_archive(
        source.path, folder, advance=report.advance, unpack_limit_bytes=unpack_limit_bytes
    )


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

    The files come from an engine's export or from the layers. If they come from the layers, all layers are
    first compared with their digests. Files that a later layer replaces or deletes are left out. Compressed
    layers are unpacked once, into `folder`, if they fit in `spool_bytes`. Otherwise they are unpacked twice.

    Raises
    ------
    CheckFailed : a layer is damaged, or contains something that is not allowed in an image.
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
        # `_merge_layers` raises NoRoom before this function yields. Then the code below reads the layers
        # again from the beginning, without temporary files.
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

    The digests are compared before the function returns. The files are read later, by the returned iterator.

    Parameters
    ----------
    created_s : time for folders that no layer lists, although a layer has files below them.
    spool : temporary files for unpacked layers. If None, compressed layers are unpacked a second time.

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
    # `dissolve` frees the tree while it makes the plan, since an image can have millions of files.
    plan = tree.dissolve()
    # Folders come first, because mksquashfs needs a folder before its files.
    folders = (_make_folder_entry(path, folder, created_s) for path, folder in plan.folders)
    return itertools.chain(folders, _read_visible_files(scanned, plan, report))


def _make_folder_entry(path: str, folder: FolderEntry | None, created_s: int) -> ImageEntry:
    """Return the entry of the folder `path`.

    `folder` is None if no layer lists the folder itself, only files below it. Then the folder belongs to
    root, its mode is 0755, and its time is `created_s`.
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


def _read_visible_files(image: StoredImage, plan: MergePlan, report: Reporter) -> Iterator[ImageEntry]:
    """Read the layers a second time, and yield the files, links and devices that are visible in the image.

    `plan` says which members (entries of the tar) of each layer are visible, and under which names. The
    function removes each entry of the plan after use, to free memory. So it works only once with a plan.
    """
    total_bytes = image.stored_bytes
    earlier_bytes = 0
    for layer, visible_paths in zip(image.layers, plan.visible_paths, strict=True):
        if visible_paths:  # a layer that later layers hide completely is not read
            with layer.open(bodies=True) as stream:
                for entry in _read_visible_members(stream, visible_paths):
                    yield entry
                    done_bytes = earlier_bytes + stream.position
                    # A compressed layer can have more bytes than `stored_bytes` counts for it.
                    report.advance(done_bytes, max(total_bytes, done_bytes))
        earlier_bytes += layer.region.size_bytes


def _read_visible_members(
    stream: TarStream, visible_paths: dict[int, tuple[str, ...]]
) -> Iterator[ImageEntry]:
    """Yield the visible members of one layer.

    `visible_paths` maps the position of a member in the tar to its paths in the image. Each item is removed
    from the caller's dict when its member is yielded, to free memory.
    """
    for position, member in enumerate(stream):
        if position not in visible_paths:
            continue
        yield member_entry(member, stream.content(), names=visible_paths.pop(position))
        if not visible_paths:
            return  # the other members of this layer are hidden by later layers


def member_entry(
    member: Member, content: Iterable[bytes | memoryview], *, names: tuple[str, ...] = (), header: bytes = b""
) -> ImageEntry:
    """Convert a member of a tar to an `ImageEntry`.

    Parameters
    ----------
    content : the bytes after the member's header. They are used only for a regular file.
    names : the paths of the entry. If empty, the entry gets the name in the tar.
    header : the header blocks of the member in the tar, to be written again unchanged.
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

    For an export, the engine creates a container and adds files such as ``etc/hosts`` to it. imgkit
    recognizes these files by their names and properties: some are empty, and others have almost the same
    time as ``.dockerenv``, the first file of the stream.

    Parameters
    ----------
    created_s : creation time of the image. It replaces the times of folders that the engine has touched.
    name : name of the image, for messages.
    advance : receives the number of bytes read so far.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short.
    """
    # The time at which the engine created the container. Until ``.dockerenv`` has been read, it is infinite,
    # so that no member counts as recent.
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
            yield member_entry(member, stream.content(), header=_get_reusable_header(member))
        advance(stream.position)
    # The engine reports an error if its stream is closed before the end.
    stream.drain()


def _get_reusable_header(member: Member) -> bytes:
    """Return the header blocks of `member`, or ``b""`` if they cannot be written again unchanged.

    If the result is empty, the caller makes new header blocks.
    """
    # mksquashfs 4.5.1 drops the leading "/" or "../" from the target of a symlink in a pax header.
    is_misread_link = member.kind == SYMLINK and "linkpath" in member.pax
    # The header of a sparse file describes its parts, but its content is written with the holes filled.
    is_sparse = member.sparse is not None
    if is_misread_link or is_sparse:
        return b""
    # The extended blocks, such as a long name, come before the header that they describe.
    return member.extended + member.header


def _is_made_by_engine(member: Member, is_recent: bool) -> bool:
    """Return whether the file comes from the engine and not from the image.

    A file of the image with the same name, but with another property, is kept. The engine creates

    * ``.dockerenv``
    * empty files with the mode 0755, such as ``etc/hosts`` (`_ENGINE_FILES`)
    * the link ``etc/mtab`` to ``/proc/mounts``
    * folders, such as ``dev/shm`` (`_ENGINE_FOLDERS`)

    An image may have the same link and folders. They count as the engine's only if `is_recent` is true, that
    is, if their time is within seconds of the time at which the container was created.
    """
    if member.name == _DOCKERENV:
        return True
    if member.name in _ENGINE_FILES:
        is_empty_file = member.kind == REGULAR and member.size_bytes == 0
        return is_empty_file and member.mode & 0o777 == 0o755
    if member.name == "etc/mtab":
        return is_recent and member.kind == SYMLINK and member.link == "/proc/mounts"
    return is_recent and member.kind == DIRECTORY and member.name in _ENGINE_FOLDERS


def with_added_files(
    entries: Iterator[ImageEntry], replacing: Iterable[ImageEntry], if_missing: Iterable[ImageEntry]
) -> Iterator[ImageEntry]:
    """Yield the image's `entries`, and then the files that imgkit adds.

    Parameters
    ----------
    replacing : files that replace whatever the image has at their paths. An image that was made from a .sif
        may already have some of them.
    if_missing : files that are added only if their paths are unused in the image. They are also left out if
        the image has a link or file where one of their parent folders would be.
    """
    replacing_by_path = {entry.name: entry for entry in replacing}
    to_add = replacing_by_path | {entry.name: entry for entry in if_missing}
    top_folders = {_top_folder(path) for path in to_add}
    for entry in entries:
        # A shortcut for speed: most entries are in folders to which imgkit adds nothing.
        if top_folders.isdisjoint(map(_top_folder, entry.names)):
            yield entry
            continue
        # An entry may have several names (hard links). It is dropped only if all of them are replaced.
        replaced_names = [name for name in entry.names if _is_replaced(name, entry.kind, replacing_by_path)]
        remaining = entry.without_names(replaced_names)
        if remaining is not None:
            # The image keeps something at these paths or above them, so nothing is added there at the end.
            for path in _find_occupied_paths(remaining, to_add):
                to_add.pop(path, None)
            # If both have this folder, imgkit's entry sets its owner, mode and time. The files of the image
            # in the folder remain.
            yield replacing_by_path.get(remaining.name, remaining)
    # In sorted order, a folder comes before its files, as mksquashfs needs it.
    for path in sorted(to_add):
        yield to_add[path]


def _top_folder(path: str) -> str:
    """Return the first component of `path`: ``usr/lib/a`` -> ``usr``."""
    return path.partition("/")[0]


def _find_occupied_paths(existing: ImageEntry, to_add: Collection[str]) -> list[str]:
    """Return the paths of `to_add` that imgkit must not add, because the image already has `existing`.

    These are the paths of `existing` itself. If `existing` is a file or link, all paths below it are
    included, since it is not a folder that could contain them.
    """
    paths = [name for name in existing.names if name in to_add]
    if existing.kind == DIRECTORY:
        return paths
    prefixes = tuple(f"{path}/" for path in paths)
    return paths + [path for path in to_add if path.startswith(prefixes)]


def _is_replaced(path: str, kind: bytes, replacing: Mapping[str, ImageEntry]) -> bool:
    """Return whether a file that imgkit adds replaces the image's entry `path`, which has the type `kind`.

    `replacing` maps paths to the added files. An added file replaces whatever the image has at its path and
    below it. An added folder replaces a file or link at its path, but not a folder or the files in it.
    """
    if path in replacing and kind != DIRECTORY:
        return True
    # The path itself is the first to be looked up, then each folder above it.
    ancestor = path
    while ancestor:
        new_entry = replacing.get(ancestor)
        if new_entry is not None and new_entry.kind != DIRECTORY:
            return True
        ancestor = ancestor.rpartition("/")[0]
    return False


def with_package_list(entries: Iterator[ImageEntry], config: ImageConfig) -> Iterator[ImageEntry]:
    """Yield `entries`, and then an SPDX document that lists the packages installed in the image.

    An older document in the image is left out. No document is added if /opt or /opt/imgkit of the image is a
    link or file, or if the image has a folder at the document's path.
    """
    collector = InventoryCollector()
    existing_kinds: dict[str, bytes] = {}  # the kinds of /opt, /opt/imgkit and the document, if they exist
    for entry in _without_package_list(entries):
        if entry.name in ("opt", OWN_FOLDER, SPDX_PATH):
            existing_kinds[entry.name] = entry.kind
        # This collects what a file says about installed packages. A content can be read only once, so the
        # returned entry must be yielded, and not `entry`.
        yield copy_for_inventory(entry, collector)
    # If /opt were a link, the document would be written to another folder, or nowhere.
    has_only_folders = set(existing_kinds.values()) <= {DIRECTORY}
    if SPDX_PATH in existing_kinds or not has_only_folders:
        return
    created_s = creation_time_s(config.created)
    for folder in ("opt", OWN_FOLDER):
        if folder not in existing_kinds:
            yield ImageEntry(names=(folder,), kind=DIRECTORY, mtime_s=created_s)
    # The list is complete only now, after the last entry. So the document comes last.
    spdx_text = spdx.spdx_document(collector.inventory(arch=config.arch, created_s=created_s))
    document = ImageEntry(names=(SPDX_PATH,), kind=REGULAR, mode=0o644, mtime_s=created_s)
    yield document.with_content(spdx_text.encode())


def _without_package_list(entries: Iterator[ImageEntry]) -> Iterator[ImageEntry]:
    """Yield `entries` without the SPDX document of an image that was made from a .sif of imgkit.

    This older list may lack packages that were installed since then. A folder at its path is kept.
    """
    for entry in entries:
        if SPDX_PATH not in entry.names or entry.kind == DIRECTORY:
            yield entry
            continue
        # The file may have other names (hard links), under which it is kept.
        remaining = entry.without_names((SPDX_PATH,))
        if remaining is not None:
            yield remaining


def copy_for_inventory(entry: ImageEntry, collector: InventoryCollector) -> ImageEntry:
    """Give `collector` a copy of the entry's content if the file describes installed packages.

    Return the entry to use from now on. The content of `entry` can be read only once. If this function has
    read it, the result contains a copy. Otherwise the result is `entry` itself.
    """
    # In an engine's export, a hard link is an entry of its own without content. The collector uses the
    # content that it has received under the other name.
    if entry.kind == HARD_LINK:
        for name in entry.names:
            collector.add_hard_link(name, entry.link)
    if entry.kind != REGULAR:
        return entry
    relevant_names = [name for name in entry.names if collector.is_relevant(name)]
    if not relevant_names:
        return entry
    # A large file is not read, which limits memory. None tells the collector that the file was skipped.
    content = None
    if entry.size_bytes <= MAX_FILE_BYTES:
        content = entry.read()
    for name in relevant_names:
        collector.add(name, content)
    if content is None:
        return entry
    return entry.with_read_content(content)
