"""The entries of an image on their way into the squashfs: from its layers, or from the engine's export.

Layers: nothing is unpacked and no runtime is needed. The first pass reads headers and decides which members
show (`archive.layers`), while a thread compares every layer with its digest. The second pass sends them to
mksquashfs, which writes into the .sif itself, behind the room for its header.

Export (``--from daemon``): the stream is a container's file system, so imgkit corrects three things. It
removes the files that a container has and an image lacks (``.dockerenv``, empty ``etc/hosts``, ...). It adds
the runtime's own files (`entries`). It rewrites symlinks with a pax header, because mksquashfs 4.5.1 drops
the leading ``/``, ``./`` and ``../`` of their targets. Docker creates its files even if the image has its
own, so the stream lacks the image's content of those few; docs/sif.md lists what can differ from the layers.

Every entry of both passes through `send`. A stage takes such an iterator and gives another: it may change,
drop, add or observe entries. The last one adds the list of the packages.

mksquashfs 4.5.1 loses a hard link before its target and the second of two equal names, and gives missing
folders the current time. So each name is sent once, folders first, and a link directly after its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from imgkit_builder.archive import compressed, stored, tar_write
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.layers import FolderEntry, LayerTree, Plan, scan
from imgkit_builder.archive.stored import NoRoom, Spool, StoredImage
from imgkit_builder.archive.tar_read import (
    CAPABILITY,
    DIRECTORY,
    HARD_LINK,
    REGULAR,
    SYMLINK,
    Member,
    TarStream,
)
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import BAKED, DOCUMENT, InventoryCollector
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.sif import entries, mksquashfs, sqsh, squash
from imgkit_builder.sif.conversion import (
    Archive,
    ConversionJob,
    EngineImage,
    Format,
    OciFolder,
    Piped,
    Source,
    name_of,
)
from imgkit_builder.sif.entries import ImageEntry, OwnFile, PassingStage
from imgkit_builder.sif.image import frame, surround
from imgkit_builder.sif.squash import Squash

_MARK = ".dockerenv"
_EMPTY_FILES = frozenset({"dev/console", "etc/hostname", "etc/hosts", "etc/resolv.conf"})
_ENGINES_FOLDERS = frozenset({"dev/pts", "dev/shm"})
_TOUCHED = frozenset({"dev", "etc", "proc", "sys", "dev/pts", "dev/shm"})
"""Folders whose times the engine changes by making its files."""
_MARK_WINDOW_S = 5

_ABOVE = ("opt", BAKED)
"""Folders above the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """What shows of an image, and the files that imgkit adds on top."""

    image: StoredImage
    plan: Plan
    own: tuple[OwnFile, ...]
    created_s: int


def is_spooled(source: Source, method: str) -> bool:
    """Whether the image is first written to disk, as a plain archive: a stream tells the order last."""
    if isinstance(source, EngineImage):
        return method == "stream"
    if isinstance(source, Archive):
        return compressed.kind(source.path) != "none"
    return isinstance(source, Piped)


@contextlib.contextmanager
def stored_image(job: ConversionJob, source: Source) -> Iterator[StoredImage]:
    """Yield the image of `source`, in place, or spooled in the workspace.

    Raises
    ------
    CheckFailed, UsageError : damaged, or not one image.
    ToolMissing : it is compressed with zstd, and there is no such program.
    """
    if isinstance(source, OciFolder) or (isinstance(source, Archive) and not is_spooled(source, "stream")):
        yield stored.open_image(source.path)
        return
    path, where = job.work.folder / "spool.tar", name_of(source)
    expected = source.size_bytes if isinstance(source, EngineImage) else None
    with _plain(job, source) as chunks:
        digests = stored.spool(
            chunks, path, where=where, advance=lambda done: job.clock.advance(done, expected)
        )
    yield stored.open_image(path, where=where, digests=digests)
    path.unlink()


@contextlib.contextmanager
def _plain(job: ConversionJob, source: Source) -> Iterator[Iterator[bytes]]:
    """Yield the plain bytes of what has to be spooled."""
    if isinstance(source, EngineImage):
        job.clock.stage(f"save {source.name} from the engine")
        with source.save() as chunks:
            yield chunks
    elif isinstance(source, Piped):
        job.clock.stage("read standard input")
        with contextlib.closing(source.chunks()) as plain:
            yield plain
    elif isinstance(source, Archive):
        job.clock.stage(f"decompress {source.path.name}")
        allowance = Allowance(source.path.stat().st_size, str(source.path), job.options.unpack_limit_bytes)
        with contextlib.closing(compressed.chunks(source.path, allowance=allowance)) as plain:
            yield plain


def write_layers(job: ConversionJob, image: StoredImage, *, room_bytes: int = 0) -> None:
    """Write the file of `image` to the job's part file; its record is still to come.

    Compressed layers are unpacked once, in the workspace, if they fit in `room_bytes`; else twice.

    Raises
    ------
    CheckFailed : a layer is damaged or holds what no image may, or mksquashfs lost something.
    ToolMissing, ToolFailed : there is no mksquashfs that reads a tar, or it failed.
    """
    config = image.selected.config
    _additions(job, config)  # refuses before anything is read
    _tell_skipped(job, config)
    with _merged_layers(job, image, room_bytes) as merged:
        job.clock.stage("merge and squash")
        with _framed_squash(job, config) as made:
            send(_shown_entries(merged, job), made, config, job.clock.note, job.options.format)


def _tell_skipped(job: ConversionJob, config: ImageConfig) -> None:
    if job.options.format == "sqsh":
        for name in sqsh.left_out(config):
            job.clock.note(f"the image sets the variable {name!r}, which enroot never sets: left out")
        return
    for name in entries.skipped_variables(config):
        job.clock.note(f"the image sets the variable {name!r}, which no shell can set: left out")


@contextlib.contextmanager
def _framed_squash(job: ConversionJob, config: ImageConfig) -> Iterator[Squash]:
    """Yield the squashfs in the part file; a .sif has more around it."""
    if job.options.format == "sqsh":
        with squash.writing(job, job.work.part, created=config.created) as made:
            yield made
        return
    around = frame(config)
    with squash.writing(job, job.work.part, created=config.created, offset=around.root_at) as made:
        yield made
    surround(job.work.part, around)


def _additions(job: ConversionJob, config: ImageConfig) -> tuple[tuple[OwnFile, ...], tuple[OwnFile, ...]]:
    """What imgkit adds to the image: files that replace the image's own, and those that it may lack.

    Raises
    ------
    UsageError : the format cannot hold a value of the configuration.
    """
    if job.options.format == "sqsh":
        return sqsh.own_files(config), sqsh.if_missing(config)
    return entries.own_files(config), entries.if_missing()


@contextlib.contextmanager
def _merged_layers(job: ConversionJob, image: StoredImage, room_bytes: int) -> Iterator[_Merged]:
    """Yield what shows, from layers in a spool where there is room for one."""
    if image.packed_bytes:
        folder, advance = job.work.folder, job.clock.advance
        if room_bytes:
            job.clock.stage("unpack the layers")
            with (
                contextlib.suppress(NoRoom),
                Spool(folder=folder, room_bytes=room_bytes, advance=advance) as spool,
            ):
                yield _merged(job, image, spool)
                return
        job.clock.note(f"the layers are unpacked twice: {folder.parent} has no room for their plain bytes")
    job.clock.stage("read the layers")
    yield _merged(job, image, None)


def _merged(job: ConversionJob, image: StoredImage, spool: Spool | None) -> _Merged:
    config = image.selected.config
    tree = LayerTree(image.where)
    image = scan(
        image,
        tree.add_layer,
        threads=mksquashfs.gather_limits().processors,
        unpack_limit_bytes=job.options.unpack_limit_bytes,
        spool=spool,
    )
    replacing, lacking = _additions(job, config)
    own = [*replacing, *(one for one in lacking if not tree.has(one.path))]
    tree.add_layer(_member(one, epoch(config.created)) for one in own)
    return _Merged(image=image, plan=tree.plan(), own=tuple(own), created_s=epoch(config.created))


def _member(file: OwnFile, mtime_s: int) -> Member:
    return Member(
        kind=file.kind,
        name=file.path,
        link=file.link,
        size_bytes=len(file.data),
        mtime_s=mtime_s,
        mode=file.mode,
        uid=0,
        gid=0,
        device=(0, 0),
        header=b"",
        extended=b"",
        pax={},
        offset=0,
        content_bytes=len(file.data),
    )


def _shown_entries(merged: _Merged, job: ConversionJob) -> Iterator[ImageEntry]:
    for path, folder in merged.plan.folders:
        yield _folder(path, folder or FolderEntry(mtime_s=merged.created_s))
    *layers, own = merged.plan.names
    total, before = merged.image.stored_bytes, 0
    for layer, names in zip(merged.image.layers, layers, strict=True):
        with layer.open(bodies=True) as stream:
            for member, shown in _showing(stream, names):
                yield entries.of_member(member, stream.content(), names=shown)
                job.clock.advance(before + stream.position, max(total, before + stream.position))
        before += layer.region.size_bytes
    for number, (path,) in own.items():
        yield entries.of_own(merged.own[number], merged.created_s, path=path)


def _folder(path: str, found: FolderEntry) -> ImageEntry:
    return ImageEntry(
        names=(path,),
        kind=DIRECTORY,
        mode=found.mode,
        uid=found.uid,
        gid=found.gid,
        mtime_s=found.mtime_s,
        xattrs=found.xattrs,
    )


def _showing(
    stream: TarStream, names: dict[int, tuple[str, ...]]
) -> Iterator[tuple[Member, tuple[str, ...]]]:
    """The members that show, with their names; ends after the last one."""
    left = len(names)
    for number, member in enumerate(stream if left else ()):
        shown = names.pop(number, None)
        if shown:
            yield member, shown
            left -= 1
            if not left:
                return


def write_export(job: ConversionJob, source: EngineImage) -> None:
    """Write the file of `source` to the job's part file; its record is still to come.

    Raises
    ------
    ToolMissing, ToolFailed : no mksquashfs reads a tar, or it failed.
    CheckFailed : the stream is damaged, or mksquashfs lost something.
    """
    config = source.config
    job.clock.stage("export and squash")
    own, lacking = _additions(job, config)
    _tell_skipped(job, config)
    with _framed_squash(job, config) as made, source.export() as chunks:
        found = exported_entries(
            chunks,
            own,
            lacking,
            epoch=epoch(config.created),
            name=source.name,
            advance=lambda done: job.clock.advance(done, source.size_bytes),
        )
        send(found, made, config, job.clock.note, job.options.format)


def exported_entries(
    chunks: Iterator[bytes],
    own: Sequence[OwnFile],
    if_missing: Sequence[OwnFile] = (),
    *,
    epoch: int,
    name: str = "docker export",
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[ImageEntry]:
    """The entries of an export stream, without the files that the engine adds.

    `own` replaces what has its names, `if_missing` does not. `name` is that of the image, for messages.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short.
    """
    known = {one.path: one for one in own}
    wanted = dict(known) | {one.path: one for one in if_missing}
    mark_s: int | None = None
    stream = TarStream(chunks, name=name)
    for member in stream:
        if member.name == _MARK:
            mark_s = member.mtime_s
        if not member.name or _is_engines(member, mark_s) or _is_replaced(member, known):
            continue
        if wanted.pop(member.name, None) and member.kind != DIRECTORY:
            wanted = {path: one for path, one in wanted.items() if not path.startswith(f"{member.name}/")}
        yield _exported_entry(member, stream, mark_s, epoch)
        advance(stream.position)
    stream.drain()
    for path in sorted(wanted):
        yield entries.of_own(wanted[path], epoch)


def _near(member: Member, mark_s: int | None) -> bool:
    """Whether its time is that of the container's mark, the first member of every docker export."""
    return mark_s is not None and abs(member.mtime_s - mark_s) <= _MARK_WINDOW_S


def _is_engines(member: Member, mark_s: int | None) -> bool:
    """Whether the engine created it together with the container."""
    if member.name == _MARK:
        return True
    if member.name in _EMPTY_FILES:
        return member.kind == REGULAR and member.size_bytes == 0 and member.mode & 0o777 == 0o755
    if member.name == "etc/mtab":
        return member.kind == SYMLINK and member.link == "/proc/mounts" and _near(member, mark_s)
    return member.name in _ENGINES_FOLDERS and member.kind == DIRECTORY and _near(member, mark_s)


def _is_replaced(member: Member, own: dict[str, OwnFile]) -> bool:
    """Whether it is where a file of `own` goes, or below: the image was made from a .sif, or hides one."""
    path = member.name
    while path:
        here = own.get(path)
        if here is not None and (
            here.kind != DIRECTORY or (path == member.name and member.kind != DIRECTORY)
        ):
            return True
        path = path.rpartition("/")[0]
    return False


def _exported_entry(member: Member, stream: TarStream, mark_s: int | None, epoch: int) -> ImageEntry:
    if member.name in _TOUCHED and member.kind == DIRECTORY and _near(member, mark_s):
        return entries.of_member(member, ()).changed(mtime_s=epoch)
    # Its own header is the fastest, except where mksquashfs 4.5.1 misreads it, and where a map follows it.
    plain = member.sparse is None and not (member.kind == SYMLINK and "linkpath" in member.pax)
    header = member.extended + member.header if plain else b""
    return entries.of_member(member, stream.content(), header=header)


def stages(
    config: ImageConfig, note: Callable[[str], None], format: Format = "sif"
) -> tuple[PassingStage, ...]:
    """What the entries of an image with this configuration pass through, in this order."""
    plain = (sqsh.without_devices(note),) if format == "sqsh" else ()
    return (*plain, _adding_document(config))


def send(
    entries: Iterator[ImageEntry],
    made: Squash,
    config: ImageConfig,
    note: Callable[[str], None],
    format: Format = "sif",
) -> None:
    """Write `entries` to `made`, as the stages for `config` leave them; `note` learns what is left out."""
    for stage in stages(config, note, format):
        entries = stage(entries)
    bare = 0
    for entry in entries:
        others = entry.xattrs.keys() - {CAPABILITY}
        bare += bool(others)
        made.entry(entry.kind, _header(entry) if others else entry.header or _header(entry))
        if entry.size_bytes:
            made.content(entry.content, entry.size_bytes)
        for name in entry.names[1:]:
            made.entry(entry.kind, tar_write.header(name, HARD_LINK, link=entry.name))
    if bare:
        note(f"{bare} files lose extended attributes: a squashfs of imgkit holds capabilities only")


def _header(entry: ImageEntry) -> bytes:
    return tar_write.header(
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


def _adding_document(config: ImageConfig) -> PassingStage:
    """A stage that lets all entries pass, and adds `DOCUMENT` behind the last one.

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
            yield _observed(entry, collector)
        if set(above.values()) <= {DIRECTORY} and DOCUMENT not in above:
            created_s = epoch(config.created)
            for folder in _ABOVE:
                if folder not in above:
                    yield ImageEntry(names=(folder,), kind=DIRECTORY, mtime_s=created_s)
            text = spdx.document(collector.inventory(arch=config.arch, created_s=created_s))
            file = ImageEntry(names=(DOCUMENT,), kind=REGULAR, mode=0o644, mtime_s=created_s)
            yield file.with_content(text.encode())

    return pass_on


def _observed(entry: ImageEntry, collector: InventoryCollector) -> ImageEntry:
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
    elif entry.kind == HARD_LINK:
        for name in entry.names:
            collector.add_hard_link(name, entry.link)
    return entry
