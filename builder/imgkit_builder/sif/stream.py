"""Convert an archive or OCI folder in one stream: headers of all layers, then the bodies that show, once.

Nothing is unpacked and no runtime is needed. The first pass reads headers and decides which members show
(`archive.merge`), while a thread compares every layer with its digest. The second pass sends them to
mksquashfs, which writes into the .sif itself, behind the room for its header.

mksquashfs 4.5.1 loses a hard link before its target and the second of two equal names, and gives missing
folders the current time. So each name is sent once, folders first, and a link directly after its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from imgkit_builder.archive import compressed, stored
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.layer_spool import NoRoom, Spool
from imgkit_builder.archive.merge import FolderEntry, LayerTree, Plan
from imgkit_builder.archive.scan import scan
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.archive.tar_header import DIRECTORY, HARD_LINK, Member
from imgkit_builder.archive.tarstream import TarStream
from imgkit_builder.oci.config import epoch
from imgkit_builder.sif import image_entry, limits, locked, own_files, passing, squash, write
from imgkit_builder.sif.conversion_job import ConversionJob
from imgkit_builder.sif.image_entry import ImageEntry
from imgkit_builder.sif.options import Archive, EngineImage, OciFolder, Piped, Source, name_of
from imgkit_builder.sif.own_files import OwnFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What shows of an image, and the files that imgkit adds on top."""

    image: StoredImage
    plan: Plan
    own: tuple[OwnFile, ...]
    created_s: int


def is_spooled(source: Source, way: str) -> bool:
    """Whether the image is first written to disk, as a plain archive: a stream tells the order last."""
    if isinstance(source, EngineImage):
        return way == "stream"
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
        yield stored.open_image(source.path, limits=job.options.limits)
        return
    path, where = job.work.folder / "spool.tar", name_of(source)
    expected = source.size_bytes if isinstance(source, EngineImage) else None
    with _plain(job, source) as chunks:
        digests = stored.spool(
            chunks, path, where=where, advance=lambda done: job.clock.advance(done, expected)
        )
    yield stored.open_image(path, limits=job.options.limits, where=where, digests=digests)
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


def make(job: ConversionJob, image: StoredImage, *, room_bytes: int = 0) -> None:
    """Write the .sif of `image` to the job's part file; its record is still to come.

    Compressed layers are unpacked once, in the workspace, if they fit in `room_bytes`; else twice.

    Raises
    ------
    CheckFailed : a layer is damaged or holds what no image may, or mksquashfs lost something.
    ToolMissing, ToolFailed : there is no mksquashfs that reads a tar, or it failed.
    """
    config = locked.settled(image.selected.config)
    for name in own_files.skipped_variables(config):
        job.clock.note(f"the image sets the variable {name!r}, which no shell can set: left out")
    with _merged_layers(job, image, room_bytes) as merged:
        job.clock.stage("merge and squash")
        around = write.frame(config)
        with squash.writing(job, job.work.part, created=config.created, offset=around.root_at) as made:
            in_order = locked.epoch_s(config) is not None and not merged.image.packed_bytes
            found = _in_order(merged, job) if in_order else _entries(merged, job)
            passing.send(found, made, config, job.clock.note)
    write.surround(job.work.part, around)


@contextlib.contextmanager
def _merged_layers(job: ConversionJob, image: StoredImage, room_bytes: int) -> Iterator[Merged]:
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


def _merged(job: ConversionJob, image: StoredImage, spool: Spool | None) -> Merged:
    config = locked.settled(image.selected.config)
    tree = LayerTree(image.where)
    image = scan(
        image,
        tree.add_layer,
        threads=limits.gather().processors,
        unpack_limit_bytes=job.options.unpack_limit_bytes,
        spool=spool,
    )
    own = [*own_files.own_files(config), *(one for one in own_files.if_missing() if not tree.has(one.path))]
    tree.add_layer(_member(one, epoch(config.created)) for one in own)
    return Merged(image=image, plan=tree.plan(), own=tuple(own), created_s=epoch(config.created))


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
        place=0,
        content_bytes=len(file.data),
    )


def _entries(merged: Merged, job: ConversionJob) -> Iterator[ImageEntry]:
    for path, folder in merged.plan.folders:
        yield _folder(path, folder or FolderEntry(mtime_s=merged.created_s))
    *layers, own = merged.plan.names
    total, before = merged.image.stored_bytes, 0
    for layer, names in zip(merged.image.layers, layers, strict=True):
        with layer.open(bodies=True) as stream:
            for member, shown in _showing(stream, names):
                yield image_entry.of_member(member, stream.content(), names=shown)
                job.clock.advance(before + stream.position, max(total, before + stream.position))
        before += layer.region.size_bytes
    for number, (path,) in own.items():
        yield image_entry.of_own(merged.own[number], merged.created_s, path=path)


def _in_order(merged: Merged, job: ConversionJob) -> Iterator[ImageEntry]:
    """The entries in the order of an engine's export, so that both ways give the same squashfs."""
    ours = {one.path for one in merged.own}
    found = [_folder(path, one or FolderEntry(mtime_s=merged.created_s)) for path, one in merged.plan.folders]
    *layers, own = merged.plan.names
    for layer, names in zip(merged.image.layers, layers, strict=True):
        with layer.open(bodies=False) as stream:
            for member, shown in _showing(stream, names):
                first, *others = sorted(shown, key=_walk)
                found.append(image_entry.of_member(member, layer.content(member), names=(first,)))
                found += (ImageEntry(names=(one,), kind=HARD_LINK, link=first) for one in others)
    for number, (path,) in own.items():
        found.append(image_entry.of_own(merged.own[number], merged.created_s, path=path))
    total, done = sum(one.size_bytes for one in found), 0
    mine = [one for one in found if one.name in ours]
    found = [one for one in found if one.name not in ours]
    # `export.entries` has imgkit's own behind all others.
    for entry in (*sorted(found, key=lambda one: _walk(one.name)), *sorted(mine, key=lambda one: one.name)):
        yield entry
        job.clock.advance(done := done + entry.size_bytes, total)


def _walk(path: str) -> list[bytes]:
    """Sort key by which a folder comes directly before what is in it."""
    return [part.encode("utf-8", "surrogateescape") for part in path.split("/")]


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
