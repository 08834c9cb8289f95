"""List a folder of data, and name it after what is in it.

A folder of data can be too large to read it before each run. As for rsync and make, a file has changed if its
size or its time of change differs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.data.spec import DataSpec
from imgkit_entrypoints.errors import UsageError

_PROJECT_DIGITS = 12
"""Length of the part of a name that stands for the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """A local folder of data, as it was when its files were listed."""

    spec: DataSpec
    path: Path
    name: str
    """``DIGEST-PROJECT``: the digest of the list of files, and of the machine, the project and the folder.

    Two projects never share a name. A folder that has changed gets another name, so a job that runs goes on
    with the files that it started with.
    """
    files: int
    size_bytes: int

    @property
    def project_part(self) -> str:
        """The part of the name that stays when the files change."""
        return self.name.rpartition("-")[2]

    def refuse_changed(self) -> None:
        """Raise UsageError if the files are no longer those that were listed."""
        if list_folder(self.spec, self.path) != self:
            raise UsageError(
                "it changed while it was sent",
                where=str(self.path),
                hint="run the command again when no program writes there",
            )


def find_folder(spec: DataSpec, project: Path) -> DataFolder:
    """Return the folder of `project` that `spec` names, with a list of its files.

    Raises
    ------
    UsageError : the folder is missing or empty, or cannot be read; or something in it cannot be sent.
    """
    return list_folder(spec, project.absolute() / spec.source)


def list_folder(spec: DataSpec, path: Path) -> DataFolder:
    """List the files of the folder `path`. See `find_folder`."""
    if not path.is_dir():
        problem = "not a directory" if os.path.lexists(path) else "no such directory"
        hint = "the key `data` of imgkit.toml names folders of the project: make it, or remove the item"
        raise UsageError(problem, where=str(path), hint=hint)
    digest = hashlib.sha256(b"imgkit data 1\n")
    file_count = size_bytes = 0
    try:
        for name, status, link in _walk_entries(path.resolve(), ""):
            size = 0
            if stat.S_ISREG(status.st_mode):
                file_count += 1
                size = status.st_size
                size_bytes += size
            # The time of a folder says nothing: a program that looks into it may have renewed it.
            time_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
            fields = (name, str(stat.S_IFMT(status.st_mode)), str(size), str(time_ns), link)
            digest.update(b"\0".join(os.fsencode(field) for field in fields) + b"\n")
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="chmod u+r it, or move it away",
        ) from error
    if not file_count:
        raise UsageError("it holds no files", where=str(path), hint="fill it, or remove it from `data`")
    # All revisions of a repository of the hub are versions of one folder, and share files.
    common_path = path.parent if spec.hub else path
    project = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{common_path}")).hexdigest()
    return DataFolder(
        spec=spec,
        path=path,
        name=f"{digest.hexdigest()}-{project[:_PROJECT_DIGITS]}",
        files=file_count,
        size_bytes=size_bytes,
    )


def _walk_entries(folder: Path, below: str) -> Iterator[tuple[str, os.stat_result, str]]:
    """Yield the path below the folder of data, the status and the link's target of everything in `folder`.

    Raises
    ------
    UsageError : a device, socket or pipe is among it, a link leads out of the data, or a file is unreadable.
    """
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name = f"{below}{entry.name}"
        status = entry.stat(follow_symlinks=False)
        link = ""
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(entry.path)  # noqa: PTH115 - Path.readlink loses ./ and //
            _refuse_outside(entry.path, link, name)
        elif not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UsageError(
                "only files, folders and links can be sent, and this is none",
                where=entry.path,
                hint="remove it from the data",
            )
        elif not os.access(entry.path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)
        yield name, status, link
        if stat.S_ISDIR(status.st_mode):
            yield from _walk_entries(Path(entry.path), f"{name}/")


def _refuse_outside(path: str, link: str, name: str) -> None:
    """Raise UsageError for a link to something that is not sent: on the remote it would lead nowhere."""
    target = os.path.normpath(os.path.join(os.path.dirname(name), link))  # noqa: PTH118, PTH120 - no file is meant
    if link.startswith("/") or target == ".." or target.startswith("../"):
        raise UsageError(
            f"a link out of the folder of data, to {link}",
            where=path,
            hint='put the files in its place; or bind those of the cluster: data = ["/SRC:/DEST"]',
        )
