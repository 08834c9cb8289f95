"""Let the runtime build the .sif, after a check of the links through which it would write into this machine.

A runtime unpacks layers safely. Then it writes its own files by plain paths into the unpacked tree, and the
kernel follows the image's links. With ``etc`` as a link to ``/home/me``, Apptainer 1.4.5 writes
``/home/me/hosts``; with ``etc/resolv.conf`` as a link to a file of this machine, it empties that file. The
paths in `_FOLDERS` and `_FILES` are those of its build, seen with strace.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from pathlib import Path

from imgkit_builder.archive import oci_folder, tar_read
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.archive.tar_read import AUFS, HARD_LINK, OPAQUE, SYMLINK, WHITEOUT, Member
from imgkit_builder.sif import check, conversion, mksquashfs, stream
from imgkit_builder.sif.conversion import (
    Archive,
    Compression,
    ConversionJob,
    EngineImage,
    OciFolder,
    Piped,
    cache_flags,
    folder_name,
    name_of,
)
from imgkit_builder.sif.entries import META
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

_FOLDERS = ("dev", "etc", "proc", "sys", "var")
_FILES = ("etc/hosts", "etc/resolv.conf")
_SPECIAL = {b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_MOST_HOPS = 255


def lay_out(source: Archive | OciFolder | EngineImage | Piped, job: ConversionJob) -> Laid:
    """Write an OCI folder into the workspace, under the name of the image."""
    folder, limit = job.work.folder / "layout", job.options.unpack_limit_bytes
    with stream.stored_image(job, source) as image:
        laid = oci_folder.write_layout(image, folder, job.clock, unpack_limit_bytes=limit)
    name = name_of(source, laid.names)
    layers = (laid.folder / "blobs/sha256" / one.removeprefix("sha256:") for one in laid.config.diff_ids)
    refuse_links(layers, where=name)
    folder.rename(job.work.folder / folder_name(name))
    return laid


def arguments(
    tool: RuntimeTool, packing: Compression, part: Path, source: tuple[str, ...]
) -> tuple[str, ...]:
    """Arguments of the runtime; the last word of `source` is the image, the others are options."""
    options = list(cache_flags(tool))
    if packing.options:
        options += [
            "--mksquashfs-args",
            conversion.arguments_for_runtime(packing, mksquashfs.gather_limits()),
        ]
    return ("build", "--force", *options, *source[:-1], str(part), source[-1])


def build(job: ConversionJob, tool: RuntimeTool, source: str) -> None:
    """``singularity build`` into the part file.

    Raises
    ------
    ToolFailed : it failed, or made an empty image.
    """
    job.clock.stage(f"build with {tool}")
    output = job.run(*arguments(tool, job.compression, job.work.part, (source,)))
    if check.EMPTY_IMAGE in output:
        raise ToolFailed(
            f"{tool} did not read the layers: it found no programs in the image ({check.EMPTY_IMAGE!r})",
            hint=f"another version of it, or --from daemon on the build host; the full log: {job.log.name}",
        )
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def address(name: str) -> str:
    """Where the runtime finds the image called `name`, which `lay_out` has written."""
    return f"oci:{folder_name(name)}"


class _ImageLinks:
    """The links and special files of an image, from the members of its layers, the lowest layer first.

    A member's folder may itself be a link of a layer below. A runtime looks such a name up inside the image,
    so that ``x/hosts`` with ``x`` as a link to ``etc`` is ``etc/hosts``; this class does the same.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Member] = {}
        self._layer_of: dict[str, int] = {}
        self._layer = 0
        self._above: set[str] = set()
        """Folders in which, at any depth, an entry lies or lay."""
        self._places: dict[str, str] = {}
        """Where the members of a folder go, for folders looked up since the last change."""

    def add_layer(self, members: Iterable[Member]) -> None:
        """Lay a layer over those before it."""
        self._layer += 1
        for member in members:
            self._add(member)

    def refuse(self, where: str) -> None:
        """Raise CheckFailed if a runtime would write outside of the image."""
        for path, member in sorted(self._entries.items()):
            if path == META or path.startswith(f"{META}/"):
                raise _refused(path, member, "the runtime puts its own files there", where)
        for path in (*_FOLDERS, *_FILES):
            if found := self._way_out(path):
                raise _refused(
                    *found, f"the runtime would write to /{path} through it: into this machine", where
                )
        for path in _FILES:
            special = self._entries.get(self._within(path))
            if special and special.kind in _SPECIAL:
                raise _refused(path, special, "the runtime would write to it", where)

    def _add(self, member: Member) -> None:
        path = posixpath.normpath(f"/{member.name}").lstrip("/")
        folder, _, name = path.rpartition("/")
        folder = self._within(folder)
        path = f"{folder}/{name}" if folder else name
        if name == OPAQUE:
            self._remove(folder, below=self._layer)
        elif name.startswith(WHITEOUT):
            if not name.startswith(AUFS):
                self._remove(path.removesuffix(name) + name.removeprefix(WHITEOUT))
        elif member.kind == HARD_LINK:
            target = posixpath.normpath(f"/{member.link}").lstrip("/")
            above, _, last = target.rpartition("/")
            self._put(path, self._entries.get(posixpath.join(self._within(above), last)))
        else:
            self._put(path, member if member.kind == SYMLINK or member.kind in _SPECIAL else None)

    def _put(self, path: str, member: Member | None) -> None:
        """Note what lies at `path`; None is a file or a folder."""
        if member is None and path not in self._entries:
            return
        self._places.clear()
        if member is None:
            del self._entries[path]
        else:
            self._entries[path], self._layer_of[path] = member, self._layer
            folder = path
            while folder not in self._above:
                self._above.add(folder)
                folder = folder.rpartition("/")[0]

    def _remove(self, path: str, *, below: int | None = None) -> None:
        """Forget `path` and all within it; with `below`, only what lower layers have within it."""
        for name in [*self._entries] if path in self._above else ():
            inside = name.startswith(f"{path}/") or not path
            if (inside or (below is None and name == path)) and (
                below is None or self._layer_of[name] < below
            ):
                self._put(name, None)

    def _within(self, path: str) -> str:
        """Resolve `path` as a process would whose root is the image."""
        if path not in self._places:
            self._places[path] = "/".join(part for part in self._walk(path, rooted=True) or ())
        return self._places[path]

    def _way_out(self, path: str) -> tuple[str, Member] | None:
        """The link by which `path` leaves the image, with its place; None if it stays inside."""
        passed: list[tuple[str, Member]] = []
        return passed[-1] if self._walk(path, rooted=False, passed=passed) is None else None

    def _walk(
        self, path: str, *, rooted: bool, passed: list[tuple[str, Member]] | None = None
    ) -> list[str] | None:
        """Parts of the resolved `path`; None if it leaves the image or its links form a circle."""
        waiting, hops = path.split("/")[::-1], 0
        here: list[str] = []
        while waiting:
            part = waiting.pop()
            if part == "..":
                if not here and not rooted:
                    return None
                here = here[:-1]
            elif part not in ("", "."):
                here.append(part)
                name = "/".join(here)
                member = self._entries.get(name)
                if member is None or member.kind != SYMLINK:
                    continue
                if passed is not None:
                    passed.append((name, member))
                absolute, hops = member.link.startswith("/"), hops + 1
                if hops > _MOST_HOPS or (absolute and not rooted):
                    return None
                here = [] if absolute else here[:-1]
                waiting += member.link.split("/")[::-1]
        return here


def refuse_links(layers: Iterable[Path], *, where: str) -> None:
    """Read the headers of the uncompressed `layers`, the lowest first, and refuse what leads out.

    Raises
    ------
    CheckFailed : a link leads out of the image, or a layer is no tar.
    """
    found = _ImageLinks()
    for layer in layers:
        found.add_layer(tar_read.headers(layer))
    found.refuse(where)


def _refused(path: str, member: Member, why: str, where: str) -> CheckFailed:
    what = _SPECIAL.get(member.kind) or f"a link to {member.link!r}"
    return CheckFailed(
        f"/{path} in the image is {what}, and {why}",
        where=where,
        hint="do not use this image if you do not know its author; otherwise remove that file in the "
        f"image's recipe or Dockerfile: RUN rm /{path}",
    )
