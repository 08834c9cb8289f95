"""Convert for ``--from daemon``: feed the engine's export stream to mksquashfs, without an archive.

The stream is a container's file system, so imgkit corrects three things on the way. It removes the files
that a container has and an image lacks (``.dockerenv``, empty ``etc/hosts``, ...). It adds the runtime's own
files (`own_files`). It rewrites symlinks with a pax header, because mksquashfs 4.5.1 drops the leading ``/``,
``./`` and ``../`` of their targets.

Docker creates its files even if the image has its own, so the stream lacks the image's content of those few;
docs/sif.md lists what can differ from the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from imgkit_builder.archive.tar_header import DIRECTORY, REGULAR, SYMLINK, Member
from imgkit_builder.archive.tarstream import TarLimits, TarStream
from imgkit_builder.oci.config import epoch
from imgkit_builder.sif import image_entry, locked, own_files, passing, squash, write
from imgkit_builder.sif.conversion_job import ConversionJob
from imgkit_builder.sif.image_entry import ImageEntry
from imgkit_builder.sif.options import EngineImage
from imgkit_builder.sif.own_files import OwnFile

_MARK = ".dockerenv"
_EMPTY_FILES = frozenset({"dev/console", "etc/hostname", "etc/hosts", "etc/resolv.conf"})
_FOLDERS = frozenset({"dev/pts", "dev/shm"})
_TOUCHED = frozenset({"dev", "etc", "proc", "sys", "dev/pts", "dev/shm"})
"""Folders whose times the engine changes by making its files."""
_MARK_WINDOW_S = 5


def make(job: ConversionJob, source: EngineImage) -> None:
    """Write the .sif of `source` to the job's part file; its record is still to come.

    Raises
    ------
    ToolMissing, ToolFailed : no mksquashfs reads a tar, or it failed.
    CheckFailed : the stream is damaged, or mksquashfs lost something.
    """
    config = locked.settled(source.config)
    job.clock.stage("export and squash")
    around = write.frame(config)
    with (
        squash.writing(job, job.work.part, created=config.created, offset=around.root_at) as made,
        source.export() as chunks,
    ):
        found = entries(
            chunks,
            own_files.own_files(config),
            own_files.if_missing(),
            epoch=epoch(config.created),
            name=source.name,
            limits=job.options.limits,
            advance=lambda done: job.clock.advance(done, source.size_bytes),
        )
        passing.send(found, made, config, job.clock.note)
    write.surround(job.work.part, around)


def entries(
    chunks: Iterator[bytes],
    own: Sequence[OwnFile],
    if_missing: Sequence[OwnFile] = (),
    *,
    epoch: int,
    name: str = "docker export",
    limits: TarLimits | None = None,
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
    stream = TarStream(chunks, name=name, limits=limits)
    for member in stream:
        if member.name == _MARK:
            mark_s = member.mtime_s
        if not member.name or _is_engines(member, mark_s) or _is_replaced(member, known):
            continue
        if wanted.pop(member.name, None) and member.kind != DIRECTORY:
            wanted = {path: one for path, one in wanted.items() if not path.startswith(f"{member.name}/")}
        yield _entry(member, stream, mark_s, epoch)
        advance(stream.position)
    stream.drain()
    for path in sorted(wanted):
        yield image_entry.of_own(wanted[path], epoch)


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
    return member.name in _FOLDERS and member.kind == DIRECTORY and _near(member, mark_s)


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


def _entry(member: Member, stream: TarStream, mark_s: int | None, epoch: int) -> ImageEntry:
    if member.name in _TOUCHED and member.kind == DIRECTORY and _near(member, mark_s):
        return image_entry.of_member(member, ()).changed(mtime_s=epoch)
    # Its own header is the fastest, except where mksquashfs 4.5.1 misreads it, and where a map follows it.
    plain = member.sparse is None and not (member.kind == SYMLINK and "linkpath" in member.pax)
    header = member.extended + member.header if plain else b""
    return image_entry.of_member(member, stream.content(), header=header)
