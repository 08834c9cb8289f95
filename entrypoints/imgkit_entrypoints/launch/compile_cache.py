"""A private folder of compiled code on each node, and a copy of it in one file.

If nodes share a home directory, Triton's cache in it can lose files between Triton's check for a file and its
read. One rank then ends with "Stale file handle", and the other ranks wait for it (triton issues 2688 and
11512, pytorch issue 173679). An empty cache, on the other hand, costs minutes on every node. So each node
compiles into a folder on its own disk, whose name depends on the image. With ``--compile-cache FILE``, node 0
packs the folder into FILE at the end, and all nodes unpack FILE at the next start.

The files are machine code that workers load, so the folder and FILE must belong to this user. FILE is a zip
file. Links in it are not restored. It is unpacked completely or not at all: if it is damaged, or contains a
path that leads elsewhere, nothing of it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError, shorten_message

FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
"""The variables by which libraries find their caches, each with the name of a folder in our folder."""
BUILD_LOCK = "lock"
"""Name of the file that torch creates while a process builds an extension (torch/utils/file_baton.py)."""
HEADER = "imgkit-compile-cache"
"""Name of the first member of a packed cache. Its content is the key of the image that compiled the rest."""
# Largest total size of the files in a packed cache: 16 GiB.
MAX_BYTES = 16 << 30
# What a damaged packed cache can raise. The zip file may be cut off (EOFError) or have a member that is
# encrypted (RuntimeError), and `_extract_files` raises ValueError for content that must not be used.
_UNPACK_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile)
# Offset in bytes of the first member's name in a zip file. A fixed header of 30 bytes precedes it.
_NAME_OFFSET = 30


def find_folder(env: Mapping[str, str], key: str, *, is_shared: Callable[[str], bool]) -> Path | None:
    """Return the folder for this node's compiled code, such as ``/tmp/imgkit-cache-1000-0f3a5c7b9d1e``.

    Its parent is the first of TMPDIR, /tmp and /dev/shm that this user can write to and that is not shared
    with other nodes. If another user has made a folder of the same name, it is not used, because that user
    could put code into it. Return None if there is no suitable folder.

    Parameters
    ----------
    key : the key of the image, from `make_key`.
    is_shared : returns whether a path is on a file system that several nodes mount.
    """
    for parent in (env.get("TMPDIR"), "/tmp", "/dev/shm"):  # noqa: S108 - the folder is the user's own
        if not parent or not os.access(parent, os.W_OK | os.X_OK) or is_shared(parent):
            continue
        folder = Path(parent).absolute() / f"imgkit-cache-{os.geteuid()}-{key}"
        # `lexists` also finds a link, which another user could have made in the shared parent.
        is_foreign = os.path.lexists(folder) and files.is_foreign_folder(folder)
        if not is_foreign:
            return folder
    return None


def make_key(image: str) -> str:
    """Return the key of an image's caches, which is a digest of 12 hexadecimal digits.

    `image` is the text of the image's manifest. If there is no manifest, it is any text that differs between
    images.
    """
    return hashlib.sha256(image.encode()).hexdigest()[:12]


def cache_variables(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead libraries to their parts of `folder`, except those set in `env`."""
    return {name: str(folder / part) for name, part in FOLDERS.items() if name not in env}


@dataclass(slots=True, kw_only=True)
class CompileCache:
    """The folder of compiled code on this node, and the file into which node 0 packs it."""

    folder: Path
    key: str
    """The key of the image (`make_key`). A packed cache with another key is not unpacked."""
    packed_file: Path | None = None
    """The packed cache, or None if the user has not requested one."""
    _unpacked_names: frozenset[str] = frozenset()
    """Names of the files that `unpack` has extracted from `packed_file`."""

    def make_folders(self) -> None:
        """Create the cache's folder on this node, and a folder in it for each compiler.

        Folders that an earlier run of this user has left are reused.

        Raises
        ------
        UsageError : a folder cannot be made, or belongs to another user.
        """
        try:
            for path in (self.folder, *(self.folder / part for part in FOLDERS.values())):
                files.make_own_folder(path)
            self._lock_extensions()
        except OSError as error:
            raise UsageError(
                f"the folder for compiled code cannot be used: {error.strerror}",
                where=str(self.folder),
                hint=f"remove it, or set {', '.join(FOLDERS)} yourself",
            ) from error

    def _lock_extensions(self) -> None:
        """Hold a shared lock on the folder of torch's extensions until this program has ended.

        The lock shows other starts on this node that a build may be running. If no other start holds one,
        first remove what killed builds have left.
        """
        extensions = self.folder / FOLDERS["TORCH_EXTENSIONS_DIR"]
        folder_lock = os.open(extensions, os.O_RDONLY | os.O_DIRECTORY)  # noqa: TID251 - a folder
        # The descriptor is never closed. A program that replaces this process inherits it, and so the lock.
        os.set_inheritable(folder_lock, True)
        _remove_abandoned_locks(extensions, folder_lock)
        # This replaces the exclusive lock, if there is one. Some file systems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(folder_lock, fcntl.LOCK_SH)

    def unpack(self) -> str:
        """Add the files of the packed cache to this node's folder.

        The packed cache is a zip file from an earlier run. Return why it is not used, or "" if it was
        unpacked or does not exist yet.

        Raises
        ------
        UsageError : `packed_file` is another kind of file. This is an error because `pack` would later
            replace the user's file.
        """
        if self.packed_file is None or not os.path.lexists(self.packed_file):
            return ""
        # All files are extracted before the first one is moved, so that a damaged cache adds none of them.
        # The temporary folder is on the same file system, so that `replace` can move them.
        temporary = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=self.folder))
        try:
            with files.open_own(self.packed_file) as stream:
                names = self._extract_files(stream, temporary)  # this may raise UsageError
            for name in names:
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                (temporary / name).replace(path)
            self._unpacked_names = frozenset(names)  # `pack` compares with these names
        except _UNPACK_ERRORS as error:
            reason = getattr(error, "strerror", None) or str(error)
            return f"{self.packed_file} is not used: {shorten_message(reason)}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def _extract_files(self, stream: BinaryIO, target: Path) -> list[str]:
        """Write the files of a packed cache below `target`, and return their names.

        The caller, `unpack`, only skips a cache for which this raises ValueError. After any error, it removes
        `target` with the files that were already written.

        Raises
        ------
        UsageError : `stream` is not a packed cache.
        ValueError : the cache is too large, belongs to another image, or contains a path outside of its
            folders.
        """
        self._refuse_other_file(stream)
        with zipfile.ZipFile(stream) as archive:  # noqa: TID251 - a stream
            # The first member is the header, whose content is the key of the image.
            header, *members = archive.infolist()
            # The sizes come from the list of members. They are checked before anything is written, so that a
            # small file cannot fill the disk.
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise ValueError(f"it holds more than {MAX_BYTES} bytes")
            if archive.read(header).decode() != self.key:
                raise ValueError("it is for another image, and is replaced at the end")
            for member in members:
                _refuse_foreign_path(member.filename)  # before the first use of the path
                path = target / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                # A link is written as an ordinary file, so none can lead out of `target`.
                with archive.open(member) as source, files.create_file(path, mode=0o700) as output:
                    shutil.copyfileobj(source, output)
        return [member.filename for member in members]

    def _refuse_other_file(self, stream: BinaryIO) -> None:
        """Raise UsageError if `stream`, which is `packed_file`, is not a packed cache.

        A file of another kind is an error, but a damaged cache is only skipped. zipfile, which reads the list
        of members at the end of the file, cannot tell them apart. So the name of the first member is checked.
        """
        start = stream.read(_NAME_OFFSET + len(HEADER))
        if start[_NAME_OFFSET:] != HEADER.encode():
            raise UsageError(
                "this file exists, and is no packed cache of compiled code",
                where=f"--compile-cache {self.packed_file}",
                hint="name another file, or remove this one",
            )

    def pack(self) -> str:
        """Write the packed cache if this node's folder contains files that are missing in it.

        The packed cache is a zip file. Its first member is a header with the key of the image, so that only
        runs of the same image use it. Return a message about the new file or about an error, or "" if there
        was nothing to do.
        """
        names = self._list_files()
        if self.packed_file is None or self._unpacked_names.issuperset(names):
            return ""
        try:
            self._write_packed_file(self.packed_file, names)
        except OSError as error:
            return f"warning: {self.packed_file}: {error.strerror}; the next start compiles again"
        return f"packed {len(names)} files of compiled code into {self.packed_file}"

    def _write_packed_file(self, packed_file: Path, names: Sequence[str]) -> None:
        """Write the files `names` of this node's folder into the zip file `packed_file`."""
        packed_file.parent.mkdir(parents=True, exist_ok=True)
        with (
            files.replace_file(packed_file, mode=0o600) as stream,
            zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,  # noqa: TID251 - a stream
        ):
            # In a zip file, the name of the first member is at a fixed offset. There, `_refuse_other_file`
            # recognizes a packed cache.
            archive.writestr(zipfile.ZipInfo(HEADER), self.key)
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a temporary file that a worker has removed
                    archive.write(self.folder / name, name)

    def _list_files(self) -> list[str]:
        """Return the sorted names of the compiled files in the folder, such as ``triton/ab/kernel.so``.

        Links and the lock files of torch's builds are left out, because a packed cache must not contain them.
        A lock file in it would make later builds wait forever.
        """
        names = []
        for part in FOLDERS.values():
            for path in (self.folder / part).rglob("*"):
                if path.is_file() and not path.is_symlink() and path.name != BUILD_LOCK:
                    names.append(str(path.relative_to(self.folder)))
        return sorted(names)


def _remove_abandoned_locks(extensions: Path, folder_lock: int) -> None:
    """Remove the lock files of killed builds in `extensions`, unless another start is using this folder.

    While torch builds an extension, it keeps a lock file, and every process that needs the extension waits
    until the file is gone. If the build is killed, all later starts on this node wait forever (pytorch issue
    189245). `folder_lock` is a descriptor of the folder. If the files could be removed, it has an exclusive
    lock afterwards.
    """
    # Taking the exclusive lock fails if another start holds a lock, or if the file system has no locks. The
    # lock files then stay, since a build may be running.
    with contextlib.suppress(OSError):
        fcntl.flock(folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock_file in extensions.rglob(BUILD_LOCK):
            lock_file.unlink(missing_ok=True)


def _refuse_foreign_path(name: str) -> None:
    """Raise ValueError unless `name` is a path in one of `FOLDERS`, such as ``triton/ab/kernel.so``."""
    folder, *parts = name.split("/")
    if folder not in FOLDERS.values() or not parts or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"it holds {name!r}, which is no file of a cache")
