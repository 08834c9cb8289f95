"""Files that are complete or absent, and that no other user can redirect.

Others may write into a run's folder, a project's folder or /tmp. So a new file gets a random name and is made
with O_EXCL, which follows no planted link. It takes its name by a rename, which replaces a link and never
follows it. A file that changes what imgkit does counts only if it is this user's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a used up quota, and a file beyond the limit of its size."""

TEMPORARY = ".imgkit-"
"""How every name begins that imgkit makes beside a user's files for a while: parts of files, locks, folders.

A killed process leaves them there. They never go into an image, or to a run as code.
"""
MOST_BYTES = 16 << 20
"""What `read_bytes` and `read_text` take where the caller names no other limit."""

_MARK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


def in_job_folder(path: Path, env: Mapping[str, str]) -> Path:
    """Return `path`, below the job's folder if it is relative, also where the program starts elsewhere.

    Such a folder is in the image, which is read-only, or whose changes are lost with the container.
    """
    return Path(env.get("IMGKIT_JOB_DIR", ""), path)


def refuse_unusable_folder(path: Path, name: str, *, where: str, hint: str) -> None:
    """Raise UsageError if `path` cannot be a folder that this user writes; it need not exist.

    Nothing is made. Of a folder that is absent, only the first one above it that exists counts.
    """
    if fault := _folder_fault(path):
        raise UsageError(f"the {name} cannot be written: {fault}", where=where, hint=hint)


def _folder_fault(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:  # a name too long, a file above it, no permission
            return error.strerror or str(error)
        if not stat.S_ISDIR(mode):
            return os.strerror(errno.ENOTDIR)
        if folder == path and not os.access(path, os.W_OK | os.X_OK):
            return os.strerror(errno.EACCES)
        return ""
    return ""


def temporary_name(target: Path, token: str = "") -> Path:
    """Return a free name beside `target`, so that the rename stays within one file system."""
    return target.with_name(f"{TEMPORARY}{token or secrets.token_hex(4)}.{target.name}.part")


def temporary_files(target: Path) -> list[Path]:
    """Return the files with a `temporary_name` of `target`, of a killed process or one that writes."""
    name = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{8}}\.{re.escape(target.name)}\.part")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


def create_file(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Make the new file `path`, less the bits of the umask, and open it.

    It is open for reading too, although the stream only writes: NFS locks need a writable descriptor, and a
    shared mapping a readable one.

    Raises
    ------
    FileExistsError : the name is taken, also by a link that leads nowhere.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, mode))


@contextlib.contextmanager
def replace_file(target: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces `target` in one step at the end; on an error `target` stays as it was.

    Raises
    ------
    OSError : the file cannot be written; if the disk is full, the error names `target`.
    """
    temporary = temporary_name(target)
    try:
        with create_file(temporary, mode=mode) as stream:
            yield stream
            sync_file(stream)
        _rename_file(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in FULL:
            # A write has no name in its error, and a copy names the file that it reads.
            error.filename, error.filename2 = str(target), None
        raise


@contextlib.contextmanager
def replace_named_file(target: Path, *, failed: str, hint: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Like `replace_file`, for a file that a user has named.

    Raises
    ------
    UsageError : the file cannot be written; its message begins with `failed`.
    """
    try:
        with replace_file(target, mode=mode) as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"{failed}: {error.strerror}", where=str(target), hint=hint) from error


def write_file(target: Path, text: str) -> None:
    """Write `text` as the complete content of `target`; on an error `target` stays as it was.

    Raises
    ------
    OSError : the file cannot be written.
    """
    with replace_file(target) as stream:
        stream.write(text.encode())


def publish_file(temporary: Path, target: Path) -> None:
    """Make `temporary`, which another program has written, durable, then visible as `target` in one step."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _rename_file(temporary, target)


def sync_file(stream: BinaryIO) -> None:
    """Make what was written into `stream` durable."""
    stream.flush()
    os.fsync(stream.fileno())


def remove_file(path: Path) -> None:
    """Remove a file for good: it is not back after a power cut.

    Raises
    ------
    OSError : it is there and cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return
    _sync_folder(path.parent)


def append_file(path: Path, data: bytes) -> None:
    """Add `data` at the end of this user's own file, which is made if it is absent.

    Raises
    ------
    OSError : the file cannot be written, or is not this user's own; `strerror` says which.
    """
    with open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab") as stream:
        stream.write(data)


def read_own(path: Path) -> str:
    """Return the text of a small file of this user.

    Raises
    ------
    OSError : the file cannot be read, or is not this user's own; `strerror` says which.
    UnicodeDecodeError : it is not text.
    """
    with open_own(path) as stream:
        return stream.read(_MARK_BYTES).decode()


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file for reading that a stranger may have put there: no named pipe, no device and no socket.

    A pipe without a writer would block for ever, /dev/zero has no end, and some devices act when opened.

    Raises
    ------
    OSError : it cannot be opened, or is not a regular file; `strerror` says which.
    """
    return open(path, "rb", buffering, opener=_open_regular)


def _open_regular(name: str, _: int) -> int:
    _refuse_special(Path(name).stat(), name)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(descriptor), name)  # the name may be another file's by now
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_special(status: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", name)


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most_bytes`; see `open_regular`.

    Raises
    ------
    OSError : as `open_regular`, or it has more bytes.
    """
    content = bytearray()
    with open_regular(path, buffering=0) as stream:
        # A read of all that may be there would take that much memory before it begins.
        while piece := stream.read(min(most_bytes + 1 - len(content), _PIECE_BYTES)):
            content += piece
    if len(content) > most_bytes:
        raise OSError(errno.EINVAL, f"it has more than {most_bytes} bytes", str(path))
    return bytes(content)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """Read a regular file of UTF-8 as `read_bytes` does.

    Raises
    ------
    OSError : as `read_bytes`. UnicodeDecodeError : it is not UTF-8, and `errors` is strict.
    """
    return read_bytes(path, most_bytes=most_bytes).decode(errors=errors)


def open_own(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a file that only this user can have put there; see `foreign_file_reason`.

    Raises
    ------
    PermissionError : it is a link, no regular file, or another user's; `strerror` says which.
    """
    # O_NONBLOCK: a named pipe without a writer would block for ever.
    safe = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, safe, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK) and (reason := foreign_file_reason(path)):
            raise PermissionError(errno.EPERM, reason, str(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if reason := _foreign_status_reason(status, path.parent):
            raise PermissionError(errno.EPERM, reason, str(path))
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]  # a binary mode
    except BaseException:
        os.close(descriptor)
        raise


def make_own_folder(path: Path) -> None:
    """Make the folder `path`, into which no other user can write, or take the one that this user has made.

    Raises
    ------
    OSError : it cannot be made, or it is a link, no folder, or another user's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if foreign_folder_reason(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, a file or another user's folder", str(path))


def make_links(folder: Path, links: Mapping[str, str]) -> None:
    """Make `folder` with a symbolic link for each of `links`, or take it if it holds exactly these.

    Raises
    ------
    OSError : it cannot be made, holds something else, or others could have put something into it.
    """
    new = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        for name, target in links.items():
            (new / name).symlink_to(target)
        with contextlib.suppress(OSError):  # another process of this user may have made it
            new.rename(folder)
            return
    finally:
        shutil.rmtree(new, ignore_errors=True)
    status = os.lstat(folder)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not is_own or {path.name: os.readlink(path) for path in folder.iterdir()} != dict(links):  # noqa: PTH115
        raise FileExistsError(errno.EEXIST, "it holds something else, or others may write there", str(folder))


def foreign_folder_reason(path: Path) -> bool:
    """Return whether `path` is no folder of this user, of root, or of the owner of the folder around it.

    Raises
    ------
    OSError : it is absent, or cannot be seen.
    """
    status = os.lstat(path)
    return not stat.S_ISDIR(status.st_mode) or not _is_trusted(status, path.parent)


def foreign_file_reason(path: Path) -> str:
    """Return why another user may have put `path` there; empty if it is a regular file of this user or root.

    The folder's owner counts as this user, because a folder's owner can do anything with its files. So a file
    that a person makes outside of a container, where the program is root, is the person's own.

    Raises
    ------
    OSError : it is absent, or cannot be seen.
    """
    return _foreign_status_reason(os.lstat(path), path.parent)


def foreign_owner(path: Path, folder: Path, *, trusts_folder: bool = False) -> str:
    """Return the number of the other user who has made `path`, which lies below `folder`.

    Empty if it was made by this user, root or, with `trusts_folder`, the owner of `folder`; and if it cannot
    be seen.
    """
    # In a container, the program may be root, and the folder that of the person who has started it.
    is_trusted = _is_trusted if trusts_folder or os.geteuid() == 0 else _is_own
    try:
        status = os.lstat(path)
        return "" if is_trusted(status, folder) else str(status.st_uid)
    except OSError:
        return ""


def _foreign_status_reason(status: os.stat_result, folder: Path) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_nlink > 1:
        return "it has more than one hard link"
    return "" if _is_trusted(status, folder) else f"it belongs to another user ({status.st_uid})"


def _is_trusted(status: os.stat_result, folder: Path) -> bool:
    return status.st_uid == folder.stat().st_uid or _is_own(status, folder)


def _is_own(status: os.stat_result, folder: Path) -> bool:
    return status.st_uid in (os.geteuid(), 0) or status.st_uid == _owner_of_new_files(folder)


def _owner_of_new_files(folder: Path) -> int:
    """Return this process's user in `folder`, or -1 if it cannot make a file there.

    NFS turns root into nobody.
    """
    probe = temporary_name(folder / "owner")
    try:
        with create_file(probe) as stream:
            probe.unlink()
            return os.fstat(stream.fileno()).st_uid
    except OSError:
        return -1


def _rename_file(temporary: Path, target: Path) -> None:
    temporary.replace(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where its file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder in which one may write, and not look
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
