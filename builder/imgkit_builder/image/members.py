"""Members of a build context: folders of code as the tar's members, and the members as bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files
from imgkit_builder.recipe import sources
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """One member of the tar: bytes in memory, a file on disk, a folder or a link."""

    name: str
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    size_bytes: int = 0
    data: bytes = b""
    source: Path | None = None
    """The file with the content; None: `data` is the content."""
    link: str = ""


def file(name: str, data: bytes) -> TarMember:
    """Return a file whose content is in memory."""
    return TarMember(name=name, data=data, size_bytes=len(data))


def folder(name: str) -> TarMember:
    """Return a folder without its content."""
    return TarMember(name=name, kind=tarfile.DIRTYPE, mode=0o755)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A folder or file of the user, and its position in the context."""

    source: Path
    member: str
    """The folder that holds a file, or the content of a folder."""
    where: str
    """The recipe's line."""
    ignore: tuple[str, ...] = ()
    is_skeleton: bool = False
    """Whether only a project's skeleton is packed, because each run mounts the code over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What goes into the context of the user's code."""

    parts: Mapping[Code, tuple[TarMember, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Names that stay out although the recipe's `ignore` does not list them."""
    secret: tuple[str, ...] = ()
    """Names that stay out because they usually hold secrets."""

    @property
    def size_bytes(self) -> int:
        """Return the size of all files."""
        return sum(member.size_bytes for part in self.parts.values() for member in part)


def pack(codes: Iterable[Code], hidden: Collection[Path] = ()) -> Packed:
    """Look at all files of `codes` without `hidden` ones, and read none.

    Raises
    ------
    UsageError : a source is missing, unreadable, or more than files, folders and links inside itself.
    """
    left_out: list[str] = []
    secret: list[str] = []
    parts = {code: tuple(_members(code, hidden, left_out, secret)) for code in codes}
    return Packed(parts=parts, left_out=tuple(dict.fromkeys(left_out)), secret=tuple(dict.fromkeys(secret)))


def _members(
    code: Code, hidden: Collection[Path], left_out: list[str], secret: list[str]
) -> Iterator[TarMember]:
    """Yield the files of `code`; `left_out` and `secret` receive the names of those that stay out."""
    yield folder(code.member)
    with readable(code.source, code.where, "name another source"):
        status = code.source.stat()
    if not stat.S_ISDIR(status.st_mode):
        yield _regular_file(code.source, f"{code.member}/{code.source.name}", status, code.where)
        return
    root = code.source.resolve()
    with readable(code.source):
        for item in sources.walk(code.source, code.ignore, hidden=hidden, left_out=left_out, secret=secret):
            path, name = Path(item.entry.path), f"{code.member}/{item.name}"
            if item.entry.is_dir(follow_symlinks=False):
                yield folder(name)
            elif item.entry.is_symlink():
                yield _link(path, name, root)
            else:
                yield _regular_file(path, name, path.lstat(), code.where)


def _regular_file(path: Path, name: str, status: os.stat_result, where: str) -> TarMember:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        problem = f"{path} is {kind}, and only files, folders and links go into an image"
        raise UsageError(problem, where=where, hint=_ignore_hint(path))
    mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    return TarMember(name=name, mode=mode, size_bytes=status.st_size, source=path)


def _link(path: Path, name: str, root: Path) -> TarMember:
    target = path.readlink()
    # The resolved target counts: "a/../x" leaves the folder if a is itself a link to a deeper folder.
    if target.is_absolute() or not Path(os.path.realpath(path)).is_relative_to(root):
        raise UsageError(
            f"a link out of the copied folder, to {target}",
            where=str(path),
            hint=f"make it a relative link inside {root}, replace it by a copy, or {_ignore_hint(path)}",
        )
    return TarMember(name=name, kind=tarfile.SYMTYPE, mode=0o777, link=str(target))


@contextlib.contextmanager
def readable(path: Path, where: str = "", hint: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into an error that names its file, by default `path`."""
    try:
        yield
    except OSError as error:
        file = Path(os.fsdecode(error.filename or path))
        raise UsageError(
            f"{file}: cannot be read: {error.strerror}",
            where=where or None,
            hint=hint or f"chmod u+rX it, or {_ignore_hint(file)}",
        ) from error


def _ignore_hint(path: Path) -> str:
    return f"add {path.name!r} to this copy's `ignore`"


def tar(members: list[TarMember] | tuple[TarMember, ...]) -> Iterator[bytes]:
    """Yield the archive in chunks; the last chunk is the object `END`."""
    for member in members:
        yield from part(member)
    yield END


def part(member: TarMember) -> Iterator[bytes]:
    """Yield the part of the archive that holds `member`."""
    yield _header(member)
    yield from _content(member)
    yield bytes(-member.size_bytes % tarfile.BLOCKSIZE)


END = bytes(2 * tarfile.BLOCKSIZE)


def unpack(stream: BinaryIO, folder: Path) -> dict[str, str]:
    """Write what `tar` yielded below `folder`, and return the links, which are left out, by their names."""
    links: dict[str, str] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # noqa: TID251 - imgkit has made this tar
        for member in archive:
            path, content = folder / member.name, archive.extractfile(member) if member.isfile() else None
            if member.issym():
                links[member.name] = member.linkname
            elif content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as target:
                    shutil.copyfileobj(content, target)
                path.chmod(member.mode)
    return links


def _header(member: TarMember) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.type, info.mode, info.linkname = member.kind, member.mode, member.link
    info.size, info.mtime = member.size_bytes, files.MTIME_S
    # GNU's format, not pax: it keeps names outside UTF-8 unchanged and allows any size.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _content(member: TarMember) -> Iterator[bytes]:
    if member.source is None:
        yield member.data
        return
    remaining = member.size_bytes
    with readable(member.source), files.open_regular(member.source, buffering=0) as stream:
        # Reading one byte more than expected detects a file that grew.
        while remaining >= 0 and (chunk := stream.read(min(files.CHUNK_BYTES, remaining + 1))):
            remaining -= len(chunk)
            if remaining >= 0:
                yield chunk
    if remaining:
        raise UsageError(
            f"{member.source} {'grew' if remaining < 0 else 'shrank'} while it was read",
            hint=f"build again when no program writes to it, or {_ignore_hint(member.source)}",
        )


def holding(members: Iterable[TarMember], needles: Collection[bytes]) -> Iterator[str]:
    """Yield the names of members whose content holds one of `needles`."""
    longest = max(map(len, needles))
    for member in members:
        end = b""
        for chunk in _content(member):
            window = end + chunk
            if any(needle in window for needle in needles):
                yield member.name
                break
            end = window[-longest:]
