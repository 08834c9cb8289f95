"""Convert for ``--from daemon``: feed the engine's export stream to mksquashfs, without an archive.

The stream is a container's file system, so imgkit corrects three things on the way. It removes the files
that a container has and an image lacks (``.dockerenv``, empty ``etc/hosts``, ...). It adds the runtime's own
files (``.singularity.d``, ...), from a build of an image with the same configuration and no files; that takes
0.1 s. It rewrites symlinks with a pax header, because mksquashfs 4.5.1 drops the leading ``/``, ``./`` and
``../`` of their targets.

Docker creates its files even if the image has its own, so the stream lacks the image's content of those few;
docs/sif.md lists what can differ from the default way.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

from imgkit_builder.archive import oci_folder
from imgkit_builder.archive.tarstream import (
    DIRECTORY,
    END,
    REGULAR,
    SYMLINK,
    Member,
    TarStream,
    gnu_link_header,
    pax_header,
    ustar_header,
)
from imgkit_builder.image.config import epoch
from imgkit_builder.sif import image, links, mksquashfs, root_inode
from imgkit_builder.sif.conversion_job import ConversionJob, cache_flags, folder_name
from imgkit_builder.sif.image import ARCHS, DataType, SifImage
from imgkit_builder.sif.options import EngineImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_entrypoints.errors import ToolFailed, ToolMissing

META = links.META
"""Folder of the runtime's own files."""
_MARK = ".dockerenv"
_EMPTY_FILES = frozenset({"dev/console", "etc/hostname", "etc/hosts", "etc/resolv.conf"})
_FOLDERS = frozenset({"dev/pts", "dev/shm"})
_TOUCHED = frozenset({"dev", "etc", "proc", "sys", "dev/pts", "dev/shm"})
"""Folders whose times the engine changes by making its files."""
_MARK_WINDOW_S = 5
# Not %A and %B: they depend on the locale.
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)


def make(job: ConversionJob, source: EngineImage) -> None:
    """Write the .sif of `source` to the job's part file.

    Raises
    ------
    ToolMissing : no mksquashfs reads a tar, or the runtime has no ``sif new/add``.
    ToolFailed : a step failed.
    """
    if not job.tool.capabilities.edits_sif:
        raise ToolMissing(
            f"{job.tool} has no `sif add`, which --from daemon needs", hint="leave out --from daemon"
        )
    mksquashfs.tar_reader()
    job.clock.stage("prepare the runtime's own files")
    box, skeleton = _prepare(job, source)
    job.clock.stage("export and squash")
    root = job.work.folder / "root.sqfs"
    created_s = epoch(source.config.created)
    argv = mksquashfs.squash_argv(root, job.compression.options, source.config.created)
    job.log.write(f"$ docker export | {' '.join(argv)}\n")
    with mksquashfs.squashing(argv, log=job.log, on_line=job.clock.line) as sink, source.export() as chunks:
        rewrite(
            chunks,
            sink,
            box,
            epoch=created_s,
            name=source.name,
            advance=lambda done: job.clock.advance(done, source.size_bytes),
        )
    root_inode.set_root(root, created_s)
    job.clock.stage("assemble")
    assemble(job, image.read(skeleton), root, source.config.arch)
    root.unlink()


def obstacle(tool: RuntimeTool) -> str:
    """Why `make` cannot work on this machine; empty if it can."""
    if not tool.capabilities.edits_sif:
        return f"{tool} has no `sif add`"
    try:
        mksquashfs.tar_reader()
    except ToolMissing as error:
        return error.what
    return ""


def _prepare(job: ConversionJob, source: EngineImage) -> tuple[Path, Path]:
    """The runtime's files for this configuration: as a folder, and as the objects of a .sif."""
    box, skeleton = runtime_files(job, source), job.work.folder / "skeleton.sif"
    place, name = _empty(job, source)
    job.run("build", "--force", *cache_flags(job.tool), skeleton, f"oci:{name}", folder=place)
    return box, skeleton


def runtime_files(job: ConversionJob, source: EngineImage) -> Path:
    """Make a folder with the files that the runtime adds to an image of this configuration.

    Raises
    ------
    ToolFailed : the runtime added none.
    """
    place, name = _empty(job, source)
    oci_folder.empty(source.config, place / name)
    box = job.work.folder / "box"
    job.run("build", "--force", *cache_flags(job.tool), "--sandbox", box, f"oci:{name}", folder=place)
    if not (box / META).is_dir():
        raise ToolFailed(
            f"{job.tool} added no {META} to an image without files", hint="leave out --from daemon"
        )
    _fix_labels(box / META / "labels.json", source)
    return box


def _empty(job: ConversionJob, source: EngineImage) -> tuple[Path, str]:
    """Folder and name of the image without files; a label holds the name, as on the default way."""
    return job.work.folder / "empty", folder_name(source.name)


def _fix_labels(path: Path, source: EngineImage) -> None:
    # The image's own time, not the current one: the same image then gives the same bytes.
    when = datetime.datetime.fromtimestamp(epoch(source.config.created), tz=datetime.timezone.utc)
    # The runtimes write minutes and seconds without a leading zero.
    day = f"{_WEEKDAYS[when.weekday()]}_{when.day}_{_MONTHS[when.month - 1]}_{when.year}"
    date = rf'\g<1>"{day}_{when:%H}:{when.minute}:{when.second}_UTC"'
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r'("org\.label-schema\.build-date": )"[^"]*"', date, text), encoding="utf-8")


def rewrite(
    chunks: Iterator[bytes],
    sink: IO[bytes],
    box: Path,
    *,
    epoch: int,
    name: str = "docker export",
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy an export stream to `sink`, without the engine's own files and with those of `box`.

    `name` is that of the image, for messages.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short, or a link of the image is where the files of `box` go.
    """
    own = _tree(box)
    seen: set[str] = set()
    mark_s: int | None = None
    found = links.ImageLinks()
    stream = TarStream(chunks, name=name)
    for member in links.passing(stream, found):
        if member.name == _MARK:
            mark_s = member.mtime_s
        if _is_engines(member, mark_s) or _is_replaced(member, own):
            continue
        if member.name in own:
            seen.add(member.name)
        sink.write(_headers(member, mark_s, epoch))
        for piece in stream.padded_body():
            sink.write(piece)
        advance(stream.position)
    stream.drain()
    found.refuse(name)
    for path, file in own.items():
        if path not in seen:
            _append(sink, path, file, epoch)
    sink.write(END)


def _tree(box: Path) -> dict[str, Path]:
    """Every path in `box` by its name, parents first."""
    return {path.relative_to(box).as_posix(): path for path in sorted(box.rglob("*"))}


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


def _is_replaced(member: Member, own: Mapping[str, Path]) -> bool:
    """Whether it is a runtime file in the image (made from a .sif) that the new one replaces."""
    return member.name.startswith(f"{META}/") and member.kind != DIRECTORY and member.name in own


def _headers(member: Member, mark_s: int | None, epoch: int) -> bytes:
    header, extended = member.header, member.extended
    if member.name in _TOUCHED and member.kind == DIRECTORY and _near(member, mark_s):
        header = _with_mtime(header, epoch)
    if member.kind == SYMLINK and "linkpath" in member.pax:
        rest = {key: value for key, value in member.pax.items() if key != "linkpath"}
        target = gnu_link_header(member.pax["linkpath"])
        extended = (pax_header(rest) if rest else b"") + target
    return extended + header


def _with_mtime(header: bytes, mtime_s: int) -> bytes:
    changed = bytearray(header)
    changed[136:148] = b"%011o\0" % mtime_s
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


def _append(sink: IO[bytes], name: str, path: Path, epoch: int) -> None:
    found, raw = path.lstat(), os.fsencode(name)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        sink.write(ustar_header(name=raw + b"/", kind=DIRECTORY, mode=mode, mtime_s=epoch))
    elif stat.S_ISLNK(found.st_mode):
        link = os.fsencode(path.readlink())
        sink.write(ustar_header(name=raw, kind=SYMLINK, mode=0o777, mtime_s=epoch, link=link))
    elif stat.S_ISREG(found.st_mode):
        data = path.read_bytes()
        sink.write(ustar_header(name=raw, kind=REGULAR, mode=mode, size_bytes=len(data), mtime_s=epoch))
        sink.write(data + bytes(-len(data) % 512))


def assemble(
    job: ConversionJob,
    model: SifImage,
    root: Path,
    arch: str,
    *,
    kinds: Collection[int] = (DataType.DEFFILE, DataType.JSON),
) -> None:
    """Write the part file as the runtime would: the data objects of `model` with `kinds`, then `root`."""
    part = job.work.part
    job.run("sif", "new", part)
    for number, descriptor in enumerate(model.descriptors):
        if descriptor.datatype not in kinds:
            continue
        data = job.work.folder / f"object-{number}"
        data.write_bytes(image.data(model, descriptor))
        kind = str(descriptor.datatype - DataType.DEFFILE + 1)
        words = ["sif", "add", "--datatype", kind, "--groupid", "1"]
        job.run(*words, "--filename", descriptor.name or "deffile", part, data)
    job.run(
        *("sif", "add", "--datatype", "4", "--parttype", "2", "--partfs", "1"),
        *("--partarch", str(ARCHS.index(arch)), "--groupid", "1", "--filename", "root.sqfs", part, root),
    )
