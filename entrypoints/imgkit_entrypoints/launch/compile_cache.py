"""The folder of compiled code, private to this user on each node, and its copy in one file.

Triton's cache below a home that nodes share loses files between its check and its read: one rank ends with
"Stale file handle", and the others wait for it (triton issues 2688 and 11512, pytorch issue 173679). A cold
cache costs minutes on every node. So each node compiles into a folder of its own disk, which is keyed by the
image. With ``--compile-cache FILE``, node 0 packs the folder at the end, and all nodes unpack it at the next
start.

The files are machine code that workers load. So the folder and FILE must be this user's own. FILE is a zip
file, which has no links, and is unpacked as a whole or not at all: a damaged one, or one with a path that
leads elsewhere, is not used.
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
from collections.abc import Callable, Mapping
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
"""Variables of the workers, and their folders within the cache."""
BUILD_LOCK = "lock"
"""Name of the file by which torch shows that a process builds an extension (torch/utils/file_baton.py)."""
HEADER = "imgkit-compile-cache"
"""First member of a packed cache: the key of the image that has compiled it."""
MOST_BYTES = 16 << 30
_NAME_AT = 30
"""Where a zip file has the name of its first member."""


def find_folder(env: Mapping[str, str], key: str, *, is_shared: Callable[[str], bool]) -> Path | None:
    """Return where this node's cache is: on its own disk, else in memory; None if there is neither.

    Another user may have made a folder of this name, which then is not used.

    Parameters
    ----------
    key : the image, as `make_key` returns it.
    is_shared : whether a path is on a file system that several nodes mount.
    """
    for parent in filter(None, (env.get("TMPDIR"), "/tmp", "/dev/shm")):  # noqa: S108 - the folder is the user's own
        folder = Path(parent).absolute() / f"imgkit-cache-{os.geteuid()}-{key}"
        is_usable = os.access(parent, os.W_OK | os.X_OK) and not is_shared(parent)
        if is_usable and not (os.path.lexists(folder) and files.foreign_folder_reason(folder)):
            return folder
    return None


def make_key(image: str) -> str:
    """Return the name for the caches of an image; `image` is its manifest, or else what is known of it."""
    return hashlib.sha256(image.encode()).hexdigest()[:12]


def variables(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' variables, without those that `env` already has."""
    return {name: str(folder / part) for name, part in FOLDERS.items() if name not in env}


@dataclass(slots=True, kw_only=True)
class CompileCache:
    """The cache of this node."""

    folder: Path
    key: str
    file: Path | None = None
    """Where node 0 packs it; None: nowhere."""
    _packed: frozenset[str] = frozenset()
    """Names that `file` has, as far as it is used."""

    def make(self) -> None:
        """Make the folder, or take the one that an earlier run of this user has left.

        Raises
        ------
        UsageError : it cannot be made, or is another user's.
        """
        try:
            for path in (self.folder, *(self.folder / part for part in FOLDERS.values())):
                files.make_own_folder(path)
            self._remove_abandoned_locks()
        except OSError as error:
            raise UsageError(
                f"the folder for compiled code cannot be used: {error.strerror}",
                where=str(self.folder),
                hint=f"remove it, or set {', '.join(FOLDERS)} yourself",
            ) from error

    def _remove_abandoned_locks(self) -> None:
        """Remove the locks of builds that were killed, unless another start uses this cache.

        Every process that needs an extension waits until its lock is gone, so after a kill all later starts
        on this node would wait for ever (pytorch issue 189245).
        """
        extensions = self.folder / FOLDERS["TORCH_EXTENSIONS_DIR"]
        # Each start on this node holds a shared lock on the folder. Its descriptor stays open until this
        # process, or the program that replaces it, has ended.
        in_use = os.open(extensions, os.O_RDONLY | os.O_DIRECTORY)  # noqa: TID251 - a folder
        os.set_inheritable(in_use, True)
        # It fails if another start holds its lock, or if the file system has no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for lock in extensions.rglob(BUILD_LOCK):
                lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fcntl.flock(in_use, fcntl.LOCK_SH)

    def unpack(self) -> str:
        """Add the files of `file` to the folder; return why they are not used, empty if they are.

        Raises
        ------
        UsageError : `file` is no packed cache, so that packing would replace a file of another kind.
        """
        if self.file is None or not os.path.lexists(self.file):
            return ""
        temporary = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=self.folder))
        try:
            with files.open_own(self.file) as stream:
                names = self._extract(stream, temporary)
            for name in names:
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (temporary / name).replace(target)
            self._packed = frozenset(names)
        except (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return f"{self.file} is not used: {shorten_message(reason)}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def _extract(self, stream: BinaryIO, target: Path) -> list[str]:
        """Write the files of a packed cache below `target`, and return their names."""
        if stream.read(_NAME_AT + len(HEADER))[_NAME_AT:] != HEADER.encode():
            raise UsageError(
                "this file exists, and is no packed cache of compiled code",
                where=f"--compile-cache {self.file}",
                hint="name another file, or remove this one",
            )
        with zipfile.ZipFile(stream) as archive:  # noqa: TID251 - a stream
            header, *members = archive.infolist()
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise ValueError(f"it holds more than {MOST_BYTES} bytes")
            if archive.read(header).decode() != self.key:
                raise ValueError("it is for another image, and is replaced at the end")
            for member in members:
                folder, *names = member.filename.split("/")
                if folder not in FOLDERS.values() or not names or not {"", ".", ".."}.isdisjoint(names):
                    raise ValueError(f"it holds {member.filename!r}, which is no file of a cache")
                path = target / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, files.create_file(path, mode=0o700) as output:
                    shutil.copyfileobj(source, output)
        return [member.filename for member in members]

    def pack(self) -> str:
        """Write `file` if the folder has files that it lacks; return what was done, empty if nothing."""
        paths = (path for part in FOLDERS.values() for path in (self.folder / part).rglob("*"))
        names = sorted(
            str(path.relative_to(self.folder))
            for path in paths
            if path.is_file() and not path.is_symlink() and path.name != BUILD_LOCK
        )
        if self.file is None or self._packed.issuperset(names):
            return ""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with (
                files.replace_file(self.file, mode=0o600) as stream,
                zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,  # noqa: TID251 - a stream
            ):
                archive.writestr(zipfile.ZipInfo(HEADER), self.key)
                for name in names:
                    with contextlib.suppress(FileNotFoundError):  # a worker's temporary file is gone by now
                        archive.write(self.folder / name, name)
        except OSError as error:
            return f"warning: {self.file}: {error.strerror}; the next start compiles again"
        return f"packed {len(names)} files of compiled code into {self.file}"
