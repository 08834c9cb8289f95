"""One file, folder, link or device of an image on its way into a squashfs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from imgkit_builder.archive.tar_header import REGULAR, Member
from imgkit_builder.sif.own_files import OwnFile


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
        """All of `content`, which is spent afterwards."""
        return b"".join(map(bytes, self.content))

    def changed(self, **values: Any) -> ImageEntry:
        """The same with other `values`."""
        return replace(self, header=b"", **values)

    def with_content(self, data: bytes) -> ImageEntry:
        """The same file with `data` as its content."""
        return self.changed(content=(data,), size_bytes=len(data))


PassingStage = Callable[[Iterator[ImageEntry]], Iterator[ImageEntry]]
"""A function that changes, drops, adds or observes entries."""


def of_member(
    member: Member, content: Iterable[bytes | memoryview], *, names: tuple[str, ...] = (), header: bytes = b""
) -> ImageEntry:
    """The entry of a tar's member; `names` where they are others than its own."""
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


def of_own(file: OwnFile, mtime_s: int, *, path: str = "") -> ImageEntry:
    """The entry of a file of imgkit's own; `path` is where links of the image lead."""
    return ImageEntry(
        names=(path or file.path,),
        kind=file.kind,
        mode=file.mode,
        mtime_s=mtime_s,
        link=file.link,
        size_bytes=len(file.data),
        content=(file.data,),
    )
