"""Members of a build context: convert folders of code to members of a tar, and members to bytes."""

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
    """A member of the tar: bytes in memory, a file on disk, a folder or a link."""

    name: str
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    size_bytes: int = 0
    data: bytes = b""
    source: Path | None = None
    """The file with the content. None if `data` is the content."""
    link: str = ""


def memory_file(name: str, data: bytes) -> TarMember:
    """Return a member for a file whose content is in memory."""
    return TarMember(name=name, data=data, size_bytes=len(data))


def empty_folder(name: str) -> TarMember:
    """Return a member for a folder. It does not include the content of the folder."""
    return TarMember(name=name, kind=tarfile.DIRTYPE, mode=0o755)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A folder or file of the user, and its position in the build context."""

    source: Path
    context_folder: str
    """The folder of the context into which the file, or the content of the folder, is packed."""
    where: str
    """The line of the recipe."""
    ignore: tuple[str, ...] = ()
    is_skeleton: bool = False
    """Whether only the skeleton of a project is packed, because each run mounts the code over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCode:
    """The user's code in a build context."""

    members: Mapping[Code, tuple[TarMember, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Names that stay out although the recipe's `ignore` does not exclude them."""
    secret: tuple[str, ...] = ()
    """Names that stay out because such files usually contain secrets."""

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(member.size_bytes for members in self.members.values() for member in members)


def collect_code(codes: Iterable[Code], hidden: Collection[Path]) -> PackedCode:
    """Return the members (files and folders of the context's tar) for all `codes`, without `hidden` files.

    Their content is not read yet. The result also has the names that stay out for another reason.

    Raises
    ------
    UsageError : a source is missing or cannot be read, or contains something other than files, folders and
        links within the source.
    """
    members: dict[Code, tuple[TarMember, ...]] = {}
    left_out: list[str] = []
    secret: list[str] = []
    for code in codes:
        with explain_read_errors(code.source, code.where, "name another source"):
            status = code.source.stat()
        # The folder itself is a member, too, so that it also exists if the source is empty.
        folder = empty_folder(code.context_folder)
        # A source can also be a single file. It is put into its folder of the context.
        if not stat.S_ISDIR(status.st_mode):
            name = f"{code.context_folder}/{code.source.name}"
            members[code] = (folder, _make_file_member(code.source, name, status, code.where))
            continue
        with explain_read_errors(code.source):
            listing = sources.list_source(code.source, code.ignore, hidden=hidden)
            members[code] = (folder, *_list_members(code, listing.entries))
        left_out += listing.left_out
        secret += listing.secret
    # Two steps may pack the same folder, so remove duplicate names. A dict keeps their order.
    return PackedCode(
        members=members, left_out=tuple(dict.fromkeys(left_out)), secret=tuple(dict.fromkeys(secret))
    )


def _list_members(code: Code, entries: Iterable[sources.SourceEntry]) -> Iterator[TarMember]:
    """Yield the members for `entries`, the files and folders in the folder `code.source`."""
    root = code.source.resolve()
    for source_entry in entries:
        dir_entry = source_entry.entry  # of `os.scandir`
        path = Path(dir_entry.path)
        # The name of a source entry is its path below the source: "data/a.txt".
        name = f"{code.context_folder}/{source_entry.name}"
        # A link to a folder is packed as a link, not as the folder.
        if dir_entry.is_dir(follow_symlinks=False):
            yield empty_folder(name)
        elif dir_entry.is_symlink():
            yield _make_link_member(path, name, root)
        else:
            yield _make_file_member(path, name, path.lstat(), code.where)


def _make_file_member(path: Path, name: str, status: os.stat_result, where: str) -> TarMember:
    """Return the member `name` for the file `path`.

    Raises
    ------
    UsageError : the path is a device, FIFO or socket. Reading a FIFO could block forever, and a device may be
        a disk.
    """
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        problem = f"{path} is {kind}, and only files, folders and links go into an image"
        raise UsageError(problem, where=where, hint=_suggest_ignore(path))
    mode = 0o644
    if status.st_mode & stat.S_IXUSR:
        mode = 0o755
    return TarMember(name=name, mode=mode, size_bytes=status.st_size, source=path)


def _make_link_member(path: Path, name: str, root: Path) -> TarMember:
    """Return the member `name` for the symbolic link `path`.

    Raises
    ------
    UsageError : the link leads out of the folder `root`. In the image, it would lead to another file or to
        none.
    """
    target = path.readlink()
    # Compare the resolved target, because "a/../x" may leave the folder if "a" itself is a link.
    if target.is_absolute() or not Path(os.path.realpath(path)).is_relative_to(root):
        raise UsageError(
            f"a link out of the copied folder, to {target}",
            where=str(path),
            hint=f"make it a relative link inside {root}, replace it by a copy, or {_suggest_ignore(path)}",
        )
    return TarMember(name=name, kind=tarfile.SYMTYPE, mode=0o777, link=str(target))


@contextlib.contextmanager
def explain_read_errors(path: Path, where: str = "", hint: str = "") -> Iterator[None]:
    """Convert an OSError inside the block to a UsageError that names the file, by default `path`."""
    try:
        yield
    except OSError as error:
        file = Path(os.fsdecode(error.filename or path))
        raise UsageError(
            f"{file}: cannot be read: {error.strerror}",
            where=where or None,
            hint=hint or f"chmod u+rX it, or {_suggest_ignore(file)}",
        ) from error


def _suggest_ignore(path: Path) -> str:
    return f"add {path.name!r} to this copy's `ignore`"


def tar_chunks(members: Iterable[TarMember]) -> Iterator[bytes]:
    """Yield the tar of `members` in chunks. The last chunk is the object `END`."""
    for member in members:
        yield from member_chunks(member)
    yield END


def tar_size(members: Iterable[TarMember]) -> int:
    """Return the size of the tar of `members` in bytes. The content of the members is not read."""
    size_bytes = len(END)
    for member in members:
        padding_bytes = -member.size_bytes % tarfile.BLOCKSIZE
        size_bytes += len(_make_header(member)) + member.size_bytes + padding_bytes
    return size_bytes


def member_chunks(member: TarMember) -> Iterator[bytes]:
    """Yield the part of the tar that contains `member`: its header, its content and padding."""
    yield _make_header(member)
    yield from _read_content(member)
    # The content of each member is padded to whole blocks.
    yield bytes(-member.size_bytes % tarfile.BLOCKSIZE)


END = bytes(2 * tarfile.BLOCKSIZE)
"""The two empty blocks that end every tar."""


def unpack_members(stream: BinaryIO, folder: Path) -> dict[str, str]:
    """Unpack a tar from `tar_chunks` to `folder`, and return the targets of its links by name.

    Links are not created, because a link could lead out of the folder.
    """
    links = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # noqa: TID251 - imgkit has made this tar
        for member in archive:
            path = folder / member.name
            if member.issym():
                links[member.name] = member.linkname
                continue
            content = archive.extractfile(member)
            if content is None:  # a folder
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as target:
                shutil.copyfileobj(content, target)
            path.chmod(member.mode)
    return links


def _make_header(member: TarMember) -> bytes:
    """Return the tar header of `member`. It does not depend on the user or the time."""
    header = tarfile.TarInfo(member.name)
    header.type = member.kind
    header.mode = member.mode
    header.linkname = member.link
    header.size = member.size_bytes
    header.mtime = files.MTIME_S
    # GNU's format, unlike pax, keeps names outside UTF-8 unchanged. It also allows any size.
    return header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _read_content(member: TarMember) -> Iterator[bytes]:
    """Yield the content of `member`.

    Raises
    ------
    UsageError : the file cannot be read, or its size has changed since it was listed.
    """
    if member.source is None:
        yield member.data
        return
    unread_bytes = member.size_bytes
    with explain_read_errors(member.source), files.open_regular(member.source, buffering=0) as stream:
        while True:
            # Request one byte more than expected. If the read returns it, the file has grown.
            chunk = stream.read(min(files.CHUNK_BYTES, unread_bytes + 1))
            if len(chunk) > unread_bytes:
                raise _make_size_error(member.source, "grew")
            if not chunk:
                break
            unread_bytes -= len(chunk)
            yield chunk
    if unread_bytes:
        raise _make_size_error(member.source, "shrank")


def _make_size_error(file: Path, change: str) -> UsageError:
    """Return the error for a file whose size has changed. `change` is ``grew`` or ``shrank``."""
    return UsageError(
        f"{file} {change} while it was read",
        hint=f"build again when no program writes to it, or {_suggest_ignore(file)}",
    )


def find_text(members: Iterable[TarMember], texts: Collection[bytes]) -> str | None:
    """Return the name of the first member whose content contains one of `texts`, or None.

    `texts` must not be empty.
    """
    longest = max(len(text) for text in texts)
    for member in members:
        previous_end = b""
        for chunk in _read_content(member):
            # A text may begin at the end of one chunk and continue in the next, so search across the border,
            # too.
            window = previous_end + chunk
            if any(text in window for text in texts):
                return member.name
            previous_end = window[-longest:]
    return None
