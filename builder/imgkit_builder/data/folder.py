"""List a folder of data, and give it a name that depends on its content.

A folder of data can be so large that reading all of it before each run would take too long. So this module
does not read the files. Like rsync and make, it assumes that a file has changed if its size or modification
time has changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from imgkit_builder.data.spec import DataSpec
from imgkit_entrypoints.errors import UsageError

# The length of PROJECT in a folder's name: 12 hex digits of a SHA-256. Folders of images have names of the
# same form, and `jobs.remote.store.IMAGE_NAME` matches both.
_PROJECT_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """A local folder of data, as it was when its files were listed."""

    spec: DataSpec
    path: Path
    name: str
    """The name of the folder on a remote: ``DIGEST-PROJECT``.

    DIGEST is computed from the list of files. If a file changes, the folder gets another name, so a running
    job keeps the files that it started with. PROJECT is computed from this machine's name and the folder's
    path, so two projects never share a name. If the folder is a hub repository that has not been downloaded
    yet, the name has another form: see `hub.find`.
    """
    files: int
    """The number of regular files in the folder and below it."""
    size_bytes: int
    """The total size of these files."""

    @property
    def project_part(self) -> str:
        """Return the part PROJECT of `name`, which stays the same when the files change."""
        return self.name.rpartition("-")[2]

    def refuse_changed(self) -> None:
        """List the folder again. Raise UsageError if its files have changed since the first listing."""
        if list_folder(self.spec, self.path) != self:
            raise UsageError(
                "it changed while it was sent",
                where=str(self.path),
                hint="run the command again when no program writes there",
            )


def find_folder(spec: DataSpec, project: Path) -> DataFolder:
    """List the folder of data that `spec` names, below the project's folder `project`.

    Raises
    ------
    UsageError : the folder is missing, empty or unreadable, or contains something that cannot be sent.
    """
    return list_folder(spec, project.absolute() / spec.source)


def list_folder(spec: DataSpec, path: Path) -> DataFolder:
    """List all files in the folder `path`, and return its name, the number of files and their size.

    The name contains a digest of the list of files, with their sizes and times. So the name changes if a file
    changes, although no file is read. It becomes the name of the folder on a remote, where data of the same
    name is not sent again.

    Raises
    ------
    UsageError : the folder is missing, empty or unreadable, or contains something that cannot be sent.
    """
    if not path.is_dir():
        problem = "not a directory" if os.path.lexists(path) else "no such directory"
        hint = "the key `data` of imgkit.toml names folders of the project: make it, or remove the item"
        raise UsageError(problem, where=str(path), hint=hint)
    # The first line is the version of the list's format. With another format, all folders get other names.
    digest = hashlib.sha256(b"imgkit data 1\n")
    file_count = 0
    total_bytes = 0
    try:
        for entry in _walk_entries(path.resolve(), ""):
            digest.update(entry.digest_line)
            # Folders and links count for the digest, but not as files.
            if stat.S_ISREG(entry.status.st_mode):
                file_count += 1
                total_bytes += entry.status.st_size
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="chmod u+r it, or move it away",
        ) from error
    if not file_count:
        raise UsageError("it holds no files", where=str(path), hint="fill it, or remove it from `data`")
    folder_name = f"{digest.hexdigest()}-{_hash_origin(spec, path)}"
    return DataFolder(spec=spec, path=path, name=folder_name, files=file_count, size_bytes=total_bytes)


def _hash_origin(spec: DataSpec, path: Path) -> str:
    """Return the digest of this machine's name and the path of a folder of data.

    It is the end of the folder's name on a remote (`DataFolder.name`). All versions of the folder share it,
    whatever files they contain. The revisions of a hub repository count as versions, so that a new revision
    shares files with earlier ones.
    """
    # The folders of revisions are side by side, so the path of their parent folder is common to them.
    origin_path = path.parent if spec.hub else path
    digest = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{origin_path}"))
    return digest.hexdigest()[:_PROJECT_DIGITS]


class _Entry(NamedTuple):
    """A file, a folder or a symbolic link in a folder of data."""

    name: str
    """The path below the folder of data, such as ``train/0001.tar``."""
    status: os.stat_result
    link: str = ""
    """The target of a symbolic link. Empty for files and folders."""

    @property
    def digest_line(self) -> bytes:
        """The line about this entry that is hashed for the name of the folder of data.

        The size counts only for files, and the modification time for files and links.
        """
        size = self.status.st_size if stat.S_ISREG(self.status.st_mode) else 0
        # The time of a folder is ignored, because a program that only looks into the folder may change it.
        time_ns = 0 if stat.S_ISDIR(self.status.st_mode) else self.status.st_mtime_ns
        fields = (self.name, str(stat.S_IFMT(self.status.st_mode)), str(size), str(time_ns), self.link)
        return b"\0".join(os.fsencode(field) for field in fields) + b"\n"


def _walk_entries(folder: Path, prefix: str) -> Iterator[_Entry]:
    """Yield every file, folder and link in `folder` and below it. Links are not followed.

    Parameters
    ----------
    prefix : the path of `folder` below the folder of data, with a slash at its end, such as ``train/``. It is
        empty for the folder of data itself.

    Raises
    ------
    UsageError : an entry is a device, socket or pipe, or a link that leads out of the folder of data.
    OSError : a folder or a file cannot be read.
    """
    with os.scandir(folder) as scan:
        # The order must be the same in every listing, because the digest depends on it.
        entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name = f"{prefix}{entry.name}"
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(entry.path)  # noqa: PTH115 - Path.readlink loses ./ and //
            _refuse_outside(entry.path, link, name)
            yield _Entry(name, status, link)
            continue
        _refuse_unreadable(entry.path, status)
        yield _Entry(name, status)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk_entries(Path(entry.path), f"{name}/")


def _refuse_unreadable(path: str, status: os.stat_result) -> None:
    """Raise an error for an entry that cannot be sent to a remote.

    It raises UsageError for a device, socket or pipe, and PermissionError if the user may not read the entry.
    Without this check, the transfer would fail only after many GB.
    """
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise UsageError(
            "only files, folders and links can be sent, and this is none",
            where=path,
            hint="remove it from the data",
        )
    # os.access tests the permission without opening the file.
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _refuse_outside(path: str, link: str, name: str) -> None:
    """Raise UsageError if a link leads out of the folder of data.

    The target of such a link is not sent, so the link would be broken on the remote.

    Parameters
    ----------
    path : the path of the link on this machine, for the message.
    link : the target as it is written in the link.
    name : the path of the link below the folder of data.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    is_outside = target == ".." or target.startswith("../")
    if link.startswith("/") or is_outside:
        raise UsageError(
            f"a link out of the folder of data, to {link}",
            where=path,
            hint='put the files in its place; or bind those of the cluster: data = ["/SRC:/DEST"]',
        )
