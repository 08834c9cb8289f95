"""The workplace of a conversion: a temporary folder, and a name beside the target, both removed at the end.

``kill -9`` leaves three names: the lock and the part file beside the target, and the temporary folder. The
next run for the same target takes the lock, which proves that nobody uses them, and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.base.sizes import size_text
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

_TMP_VARIABLES = ("IMGKIT_TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR")
NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|file too large", re.IGNORECASE)
"""How programs report that a disk is full or that a limit of the user is reached."""
PACKED_SHARE = 0.5
"""Size of a squashfs per image byte, with a margin: measured 0.26 to 0.4."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of ``flock`` on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Paths that exist inside `workspace`."""

    folder: Path
    """Temporary folder, also for the runtime's own temporary files."""
    part: Path
    """File beside the target, which is renamed to it at the end."""


def tmp_base(target: Path, chosen: Path | None) -> Path:
    """Return the folder for temporary files: `chosen`, or what a variable names, or the target's folder.

    It is not /tmp: on many clusters that is memory, and a conversion needs several times the image's size.

    Raises
    ------
    UsageError : it is not a folder to which this user can write.
    """
    requested = chosen or _tmp_from_environment() or target.parent
    base = requested.expanduser().absolute()
    if base.is_dir() and os.access(base, os.W_OK | os.X_OK):
        return base
    problem = "not writable" if base.is_dir() else "no such folder"
    raise UsageError(
        f"temporary files cannot go to {base}: {problem}",
        where="--tmpdir" if chosen else "IMGKIT_TMPDIR, APPTAINER_TMPDIR, TMPDIR",
        hint="--tmpdir DIR with a folder on a large, local disk",
    )


def _tmp_from_environment() -> Path | None:
    """Return the folder that the first of `_TMP_VARIABLES` with a value names, or None."""
    for variable in _TMP_VARIABLES:
        value = os.environ.get(variable)
        if value:
            return Path(value)
    return None


def check_space(image_bytes: int, temporary_bytes: int, target: Path, base: Path) -> None:
    """Raise CheckFailed if there is too little space to convert an image of `image_bytes` to `target`.

    The conversion puts `temporary_bytes` of other files into the folder `base`.
    """
    packed_bytes = int(image_bytes * PACKED_SHARE)
    is_one_disk = _is_on_one_disk(base, target)
    if is_one_disk:
        needed = {base: temporary_bytes + packed_bytes}
    else:
        needed = {base: temporary_bytes, target.parent: packed_bytes}
    free = {folder: disk_usage(folder).free for folder in needed}
    full_folders = [folder for folder in needed if free[folder] < needed[folder]]
    if not full_folders:
        return
    # All options at once: with one of two alone, the next attempt would end here again.
    options = []
    if base in full_folders:
        options.append("--tmpdir DIR")
    if is_one_disk or target.parent in full_folders:
        options.append("-o FILE.sif")
    first, *further_folders = full_folders
    message = (
        f"{size_text(free[first])} are free, "
        f"an image of {size_text(image_bytes)} needs {size_text(needed[first])}"
    )
    for folder in further_folders:
        message += f"; {size_text(needed[folder])} in {folder}, where {size_text(free[folder])} are free"
    raise CheckFailed(message, where=str(first), hint=f"{' and '.join(options)} on a larger disk")


def spare_bytes(image_bytes: int, disk_share: float, target: Path, base: Path) -> int:
    """Return what `base` has free beside the files of a conversion of an image of `image_bytes`.

    `disk_share` is the size of the temporary files per byte of the image. The target counts if it is on the
    same disk.
    """
    if _is_on_one_disk(base, target):
        disk_share += PACKED_SHARE
    return disk_usage(base).free - int(image_bytes * disk_share)


def _is_on_one_disk(base: Path, target: Path) -> bool:
    return base.stat().st_dev == target.parent.stat().st_dev


@contextlib.contextmanager
def workspace(target: Path, base: Path) -> Iterator[Workspace]:
    """Lock `target`, remove what a killed run of it left, and yield a fresh workspace.

    Raises
    ------
    UsageError : another process is writing `target`, or its folder is not writable.
    ToolFailed : the disk of the target or of `base` is full.
    """
    part = files.temporary_name(target)
    folder = base / f"{_folder_prefix(target)}{secrets.token_hex(4)}"
    with _explain_full_disk(target, base), _locked(target, folder):
        try:
            folder.mkdir(mode=0o700)
            yield Workspace(folder=folder, part=part)
        finally:
            try:
                part.unlink(missing_ok=True)
            finally:
                remove_tree(folder)


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """Yield a new temporary folder, and remove it at the end.

    It is where `tmp_base` says for a file `beside`.
    """
    folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=tmp_base(beside, None)))
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_leftovers(target: Path) -> None:
    """Remove what a killed run of `target` left, unless another run uses it."""
    if _lock_path(target).exists():
        # Taking the lock removes it. A UsageError says that another run holds the lock.
        with contextlib.suppress(UsageError), _locked(target, None):
            pass


def _folder_prefix(target: Path) -> str:
    """Return how the names of the temporary folders for `target` begin: ``.imgkit-sif.1f2e3d4c5b6a.``."""
    digest = hashlib.sha256(os.fsencode(target.absolute())).hexdigest()
    return f"{files.TEMPORARY}sif.{digest[:12]}."


def _lock_path(target: Path) -> Path:
    return target.with_name(f"{files.TEMPORARY}lock.{target.name}")


@contextlib.contextmanager
def _explain_full_disk(target: Path, base: Path) -> Iterator[None]:
    """Turn the errors of a full disk into one that names the disk and the option for another.

    mksquashfs or the runtime may have met it, and reports it in its last lines.
    """
    try:
        yield
    except ToolFailed as error:
        if not NO_SPACE.search(f"{error.what} {error.hint}"):
            raise
        raise _disk_full_error(target, base, error.what, error.hint or "") from error
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        raise _disk_full_error(target, base, error.strerror or "", "") from error


def _disk_full_error(target: Path, base: Path, message: str, details: str) -> ToolFailed:
    """Return the error that names the full disk, and the option for another. `details` end the hint."""
    folder = files.fullest_folder(target.parent, base)
    if _is_on_one_disk(base, target):
        option = "-o FILE, and --tmpdir DIR,"  # it fills again after either alone
    elif folder == base:
        option = "--tmpdir DIR"
    else:
        option = "-o FILE"
    hint = f"{option} on a larger disk"
    if details:
        hint += f"\n{details}"
    return ToolFailed(f"the disk of {folder} is full: {message}", where=str(target), hint=hint)


@contextlib.contextmanager
def _locked(target: Path, folder: Path | None) -> Iterator[None]:
    """Hold the lock of `target`, and remove what a killed run of it has left.

    The lock names this process and its temporary `folder`, if any.
    """
    path = _lock_path(target)
    descriptor = _open_lock(path, target)
    try:
        has_lock = _take_lock(descriptor, path, target)
        try:
            if has_lock:
                _remove_stale(target, _read_holder(descriptor))
            os.ftruncate(descriptor, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(folder)}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            yield
        finally:
            # Where the folder could not be removed, the next run finds its name in the lock.
            if folder is None or not folder.exists():
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open_lock(path: Path, target: Path) -> int:
    """Open or create the lock file `path` of `target`, and return its descriptor."""
    try:
        # It must not be a hard link to another file, since its content is replaced.
        with files.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            return os.dup(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write into {target.parent}: {error.strerror}",
            where=str(target),
            hint="-o FILE.sif in a folder that you can write to",
        ) from error


def _take_lock(descriptor: int, path: Path, target: Path) -> bool:
    """Take the lock of `target`, whose file `path` is open as `descriptor`.

    Return False if the file system has no locks. Then nothing is known to be stale.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        holder = _read_holder(descriptor)
        raise UsageError(
            f"another imgkit process is writing this file (pid {holder.get('pid')} on {holder.get('host')})",
            where=str(target),
            hint="wait for it, or choose another name with -o",
        ) from error
    if not _is_open_file(descriptor, path):
        # The run that held the lock has just ended and removed the file that we opened.
        raise UsageError(
            "another imgkit process created this file in the meantime", where=str(target), hint="run it again"
        )
    return True


def _is_open_file(descriptor: int, path: Path) -> bool:
    """Return whether the file `path` is still the one that is open as `descriptor`."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Return what the process that wrote the lock says about itself, or nothing if that cannot be read."""
    try:
        values = json_text.parse(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return values


def _remove_stale(target: Path, holder: dict[str, Any]) -> None:
    """Remove the files of a killed run for `target`, whose lock says `holder`.

    Anybody may have written the lock: only a folder of our own with a name of ours is removed.
    """
    for part in files.temporary_files(target):
        if _is_ours(part, stat.S_ISREG):
            part.unlink(missing_ok=True)
    folder = Path(str(holder.get("folder", "")))
    has_our_name = re.fullmatch(rf"{re.escape(_folder_prefix(target))}[0-9a-f]{{8}}", folder.name)
    if has_our_name and _is_ours(folder, stat.S_ISDIR):
        remove_tree(folder)


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether `path` is this user's and `is_kind`, such as ``stat.S_ISDIR``, accepts its mode."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and is_kind(status.st_mode)


def remove_tree(folder: Path) -> None:
    """Remove `folder`, even with folders in it that deny access. Images have such folders."""

    def open_and_retry(function: Callable[..., Any], path: str, _: object) -> None:
        """Remove `path` after its mode and that of its folder have been changed."""
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=open_and_retry)
