"""Read and write files so that they are complete or absent, and that no other user can redirect them.

Other users may be able to write into a run folder, a project folder or /tmp. So a new file is created under a
random name with O_EXCL, which follows no link that another user has put there. The file then gets its name by
a rename, which replaces a link and never follows it. A file that changes what imgkit does is only used if it
belongs to this user.
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
"""Error numbers for a full disk, an exhausted quota, and a file that exceeds the size limit."""

TEMPORARY = ".imgkit-"
"""Beginning of the name of each temporary file, lock and folder that imgkit creates next to a user's files.

A killed process leaves them behind. They are skipped when files are copied into an image or to a run.
"""
MOST_BYTES = 16 << 20
"""Size in bytes of the largest file that `read_bytes` and `read_text` accept by default: 16 MiB."""

# Number of bytes that `read_own` reads from a file: 64 KiB.
_MAX_OWN_BYTES = 1 << 16
# Number of bytes that `read_bytes` reads at once: 1 MiB.
_PIECE_BYTES = 1 << 20


def in_job_folder(path: Path, env: Mapping[str, str]) -> Path:
    """Return `path`, which is relative to the job's folder unless it is absolute.

    The program may start in a folder of the image instead. That folder is read-only, or its changes are lost
    with the container.
    """
    return Path(env.get("IMGKIT_JOB_DIR", ""), path)


def refuse_unusable_folder(path: Path, name: str, *, where: str, hint: str) -> None:
    """Raise UsageError if this user cannot write to the folder `path`, or could not create it.

    Nothing is created. If the folder does not exist, the nearest existing path above it must be a folder.

    Parameters
    ----------
    name : name of the folder in the message, such as ``log folder``.
    where : place of the error.
    hint : what the user can do.
    """
    problem = _find_folder_problem(path)
    if problem:
        raise UsageError(f"the {name} cannot be written: {problem}", where=where, hint=hint)


def _find_folder_problem(path: Path) -> str:
    """Return why `path` cannot be a folder to which this user writes, or "" if it can."""
    # Check `path` itself if it exists, or else the nearest existing path above it.
    for folder in (path, *path.parents):
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:  # the name is too long, a path above it is a file, or access is denied
            return error.strerror or str(error)
        if not stat.S_ISDIR(mode):
            return os.strerror(errno.ENOTDIR)
        # For a folder above `path`, access is not checked: creating `path` will show whether it is allowed.
        if folder == path and not os.access(path, os.W_OK | os.X_OK):
            return os.strerror(errno.EACCES)
        return ""
    return ""


def temporary_name(target: Path, token: str = "") -> Path:
    """Return a temporary name in the folder of `target`, so that a rename stays within one file system.

    For example, the temporary name for ``model.pt`` is ``.imgkit-1f2e3d4c.model.pt.part``. By default, the
    token in it is random.
    """
    return target.with_name(f"{TEMPORARY}{token or secrets.token_hex(4)}.{target.name}.part")


def temporary_files(target: Path) -> list[Path]:
    """Return the temporary files of `target`, left by a killed process or still being written."""
    name = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{8}}\.{re.escape(target.name)}\.part")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


def create_file(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Create the file `path`, and return a stream that writes to it.

    The descriptor is open for both reading and writing: a lock on NFS needs a writable descriptor, and a
    shared memory mapping needs a readable one.

    Parameters
    ----------
    mode : permissions of the file, before the umask is applied.

    Raises
    ------
    FileExistsError : the name exists, even if it is only a link to a missing file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, mode))


@contextlib.contextmanager
def replace_file(target: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `target` in one step when the ``with`` block ends.

    Until then, the file has a temporary name. If the block raises an error, the file is removed, and `target`
    is unchanged.

    Raises
    ------
    OSError : the file cannot be written. If the disk is full, the error names `target`.
    """
    temporary = temporary_name(target)
    try:
        with create_file(temporary, mode=mode) as stream:
            yield stream
            sync_file(stream)
        _rename_file(temporary, target)
    except BaseException as error:  # also remove the file after a KeyboardInterrupt
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in FULL:
            # The error of a write contains no file name, and the error of a copy contains the name of the
            # source.
            error.filename, error.filename2 = str(target), None
        raise


@contextlib.contextmanager
def replace_named_file(target: Path, *, failed: str, hint: str) -> Iterator[BinaryIO]:
    """Yield a new file that replaces a file that the user has named. It works like `replace_file`.

    Parameters
    ----------
    failed : beginning of the error message, such as ``the report cannot be written``.
    hint : what the user can do.

    Raises
    ------
    UsageError : the file cannot be written.
    """
    try:
        with replace_file(target) as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"{failed}: {error.strerror}", where=str(target), hint=hint) from error


def write_file(target: Path, text: str) -> None:
    """Replace the content of `target` with `text` in one step. After an error, `target` is unchanged.

    Raises
    ------
    OSError : the file cannot be written.
    """
    with replace_file(target) as stream:
        stream.write(text.encode())


def publish_file(temporary: Path, target: Path) -> None:
    """Rename the file `temporary`, which another program has written, to `target`.

    Before that, its content is written to the disk, so that a power failure cannot leave an empty `target`.
    """
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _rename_file(temporary, target)


def sync_file(stream: BinaryIO) -> None:
    """Wait until everything that was written to `stream` is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def remove_file(path: Path) -> None:
    """Remove a file if it exists. It does not come back after a power failure.

    Raises
    ------
    OSError : the file exists and cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return
    _sync_folder(path.parent)


def append_file(path: Path, data: bytes) -> None:
    """Append `data` to a file of this user, which is created if it does not exist.

    Raises
    ------
    OSError : the file cannot be written, or belongs to another user. `strerror` says which.
    """
    with open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab") as stream:
        stream.write(data)


def read_own(path: Path) -> str:
    """Return the text of a small file of this user. A longer file is cut after 64 KiB.

    Raises
    ------
    OSError : the file cannot be read, or belongs to another user. `strerror` says which.
    UnicodeDecodeError : the file is not UTF-8.
    """
    with open_own(path) as stream:
        return stream.read(_MAX_OWN_BYTES).decode()


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, and refuse anything else that another user may have put in its place.

    Opening a named pipe without a writer would block forever, /dev/zero has no end, and some devices act when
    they are opened.

    Raises
    ------
    OSError : the file cannot be opened, or is not a regular file. `strerror` says which.
    """
    return open(path, "rb", buffering, opener=_open_regular)


def _open_regular(name: str, _: int) -> int:
    """Open a regular file for reading, and return its descriptor. This is the `opener` of ``open``."""
    # Check before opening the file, because some devices act when they are opened.
    _refuse_special(Path(name).stat(), name)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        # Check again, because the name may belong to another file by now.
        _refuse_special(os.fstat(descriptor), name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_special(status: os.stat_result, name: str) -> None:
    """Raise OSError if `status` is that of a folder, named pipe, device or socket."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", name)


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes.

    Raises
    ------
    OSError : the file cannot be read, is not a regular file, or is larger.
    """
    content = bytearray()
    with open_regular(path, buffering=0) as stream:
        # Read in pieces, because reading `most_bytes` at once would allocate that much memory even for a
        # small file. One byte more than allowed is read, so that a larger file is noticed.
        while piece := stream.read(min(most_bytes + 1 - len(content), _PIECE_BYTES)):
            content += piece
    if len(content) > most_bytes:
        raise OSError(errno.EINVAL, f"it has more than {most_bytes} bytes", str(path))
    return bytes(content)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """Return the text of a regular UTF-8 file of at most `most_bytes` bytes.

    Parameters
    ----------
    errors : what to do with bytes that are not UTF-8, as in ``bytes.decode``.

    Raises
    ------
    OSError : the file cannot be read, is not a regular file, or is larger.
    UnicodeDecodeError : the file is not UTF-8, and `errors` is ``strict``.
    """
    return read_bytes(path, most_bytes=most_bytes).decode(errors=errors)


def open_own(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> BinaryIO:
    """Open a file, and refuse it if another user may have put it there (see `foreign_file_reason`).

    Parameters
    ----------
    flags : flags for ``os.open``, such as O_APPEND.
    mode : mode of the stream, which must be binary.

    Raises
    ------
    PermissionError : the path is a link or not a regular file, or the file belongs to another user.
        `strerror` says which.
    """
    # With O_NONBLOCK, a named pipe without a writer does not block.
    safe_flags = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, safe_flags, 0o666)
    except OSError as error:
        # With O_NOFOLLOW, opening a link fails with one of these errors. With O_NONBLOCK, opening a named
        # pipe or a socket does. Raise an error that says what the path is.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            _refuse_foreign_file(os.lstat(path), path)
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _refuse_foreign_file(status, path)
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]  # a binary mode
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_foreign_file(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError if the file with this status is not trusted (see `foreign_file_reason`)."""
    reason = _explain_foreign_status(status, path.parent)
    if reason:
        raise PermissionError(errno.EPERM, reason, str(path))


def make_own_folder(path: Path) -> None:
    """Create the folder `path` with access only for this user, or accept an existing folder.

    Raises
    ------
    OSError : the folder cannot be created, or `path` is a link, a file or another user's folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if is_foreign_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, a file or another user's folder", str(path))


def make_links(folder: Path, links: Mapping[str, str]) -> None:
    """Create `folder` with a symbolic link for each name in `links`, or accept a folder that has these links.

    The links are made in a temporary folder, which is then renamed, so that `folder` is complete or absent.

    Parameters
    ----------
    links : the target of each link by its name.

    Raises
    ------
    OSError : the folder cannot be created, holds something else, or is writable by others.
    """
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        for name, target in links.items():
            (temporary / name).symlink_to(target)
        # Renaming fails if the folder exists, because another process of this user may have made it. Then its
        # links are checked below.
        with contextlib.suppress(OSError):
            temporary.rename(folder)
            return
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    status = os.lstat(folder)
    # Others can predict the folder's path. So another user may have made it, with links to other files.
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    others_can_write = status.st_mode & 0o022
    if is_own and not others_can_write:
        existing_links = {path.name: os.readlink(path) for path in folder.iterdir()}  # noqa: PTH115
        if existing_links == dict(links):
            return
    raise FileExistsError(errno.EEXIST, "it holds something else, or others may write there", str(folder))


def is_foreign_folder(path: Path) -> bool:
    """Return whether `path` is not a folder, or belongs to another user.

    A folder that belongs to root, or to the owner of the folder above it, is treated as this user's.

    Raises
    ------
    OSError : the path does not exist, or cannot be accessed.
    """
    status = os.lstat(path)
    return not stat.S_ISDIR(status.st_mode) or not _is_trusted(status, path.parent)


def foreign_file_reason(path: Path) -> str:
    """Return why another user may have put the file `path` there, or "" if the file can be trusted.

    A regular file of this user or of root is trusted. So is a file that belongs to the owner of its folder,
    who can do anything with the files in it anyway. This matters if the program is root in a container.
    There, files that the person has created outside of the container belong to another user.

    Raises
    ------
    OSError : the file does not exist, or cannot be accessed.
    """
    return _explain_foreign_status(os.lstat(path), path.parent)


def foreign_owner(path: Path, folder: Path, *, trusts_folder: bool = False) -> str:
    """Return the number of another user who owns `path`, which is below `folder`, or "".

    The result is "" if the owner is this user or root. With `trusts_folder`, or if this process runs as root,
    it is also "" for the owner of `folder`. And it is "" if the path or the folder cannot be accessed.
    """
    # In a container, the program may run as root, while the folder belongs to the person who has started the
    # container. So root always trusts the owner of the folder.
    trusts_folder = trusts_folder or os.geteuid() == 0
    try:
        status = os.lstat(path)
        is_trusted = _is_trusted(status, folder) if trusts_folder else _is_own(status, folder)
    except OSError:
        return ""
    return "" if is_trusted else str(status.st_uid)


def _explain_foreign_status(status: os.stat_result, folder: Path) -> str:
    """Return why a file in `folder` with this status is not trusted, or "" if it is trusted.

    The docstring of `foreign_file_reason` contains the rules.
    """
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_nlink > 1:
        return "it has more than one hard link"
    if not _is_trusted(status, folder):
        return f"it belongs to another user ({status.st_uid})"
    return ""


def _is_trusted(status: os.stat_result, folder: Path) -> bool:
    """Return whether the owner is this user, root, or the owner of `folder`."""
    return status.st_uid == folder.stat().st_uid or _is_own(status, folder)


def _is_own(status: os.stat_result, folder: Path) -> bool:
    """Return whether the owner is this user or root, or the user to whom NFS assigns new files."""
    return status.st_uid in (os.geteuid(), 0) or status.st_uid == _find_owner_of_new_files(folder)


def _find_owner_of_new_files(folder: Path) -> int:
    """Return the user who owns a file that this process creates in `folder`.

    To find out, a file is created and removed at once. On NFS, its owner may differ from the user of the
    process, because the server turns root into nobody. Return -1 if no file can be created.
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
    """Wait until new and removed names in `folder` are on the disk, if the file system supports that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # the folder can be written, but not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # The file system does not support fsync of a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
