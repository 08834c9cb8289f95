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
from typing import Any, NamedTuple

from imgkit_builder.base import files
from imgkit_builder.base.sizes import size_text
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

_TMP_VARIABLES = ("IMGKIT_TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR")
NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|file too large", re.IGNORECASE)
"""How programs report that a disk is full or that a limit of the user is reached."""
PACKED_SHARE = 0.5
"""Size of a squashfs per image byte, with a margin: measured 0.26 to 0.4."""
_TOKEN = re.compile(r"[0-9a-f]{8}")
"""What follows `_folder_prefix` in the name of a temporary folder."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of ``flock`` on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The temporary files of a conversion, which the block of `workspace` may use."""

    folder: Path
    """Temporary folder, also for the runtime's own temporary files."""
    part: Path
    """File beside the target, which is renamed to it at the end."""


class _DiskNeed(NamedTuple):
    """What a conversion needs of the disk of a folder."""

    folder: Path
    needed_bytes: int
    option: str
    """The option with which the user can choose another disk."""

    @property
    def free_bytes(self) -> int:
        """The free space on the disk."""
        return disk_usage(self.folder).free


def tmp_base(target: Path, chosen: Path | None) -> Path:
    """Return the folder for temporary files.

    It is the folder `chosen` by the user, or the one that a variable such as ``TMPDIR`` names, or the folder
    of `target`. /tmp is no default, since on many clusters it is memory, and a conversion needs several times
    the image's size.

    Raises
    ------
    UsageError : the folder does not exist, or this user cannot write to it.
    """
    requested = chosen or _tmp_from_environment() or target.parent
    folder = requested.expanduser().absolute()
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return folder
    problem = "not writable" if folder.is_dir() else "no such folder"
    raise UsageError(
        f"temporary files cannot go to {folder}: {problem}",
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
    """Raise CheckFailed if there is too little disk space for a conversion, before it runs for minutes.

    Parameters
    ----------
    image_bytes : size of the uncompressed image. The new file is guessed to take half of it.
    temporary_bytes : size of the temporary files.
    target : the file to be written.
    base : the folder for temporary files, which may be on the same disk.
    """
    packed_bytes = int(image_bytes * PACKED_SHARE)
    if _is_on_one_disk(base, target):
        # Both options: with one alone, the next attempt would fail here again.
        needs = [_DiskNeed(base, temporary_bytes + packed_bytes, "--tmpdir DIR and -o FILE.sif")]
    else:
        needs = [
            _DiskNeed(base, temporary_bytes, "--tmpdir DIR"),
            _DiskNeed(target.parent, packed_bytes, "-o FILE.sif"),
        ]
    unmet_needs = [need for need in needs if need.free_bytes < need.needed_bytes]
    if not unmet_needs:
        return
    first, *others = unmet_needs
    message = (
        f"{size_text(first.free_bytes)} are free, "
        f"an image of {size_text(image_bytes)} needs {size_text(first.needed_bytes)}"
    )
    for need in others:
        needed, free = size_text(need.needed_bytes), size_text(need.free_bytes)
        message += f"; {needed} in {need.folder}, where {free} are free"
    options = " and ".join(need.option for need in unmet_needs)
    raise CheckFailed(message, where=str(first.folder), hint=f"{options} on a larger disk")


def spare_bytes(image_bytes: int, disk_share: float, target: Path, base: Path) -> int:
    """Return how many bytes stay free on the disk of `base` when a conversion has written all its files.

    The result is negative if the disk is too small.

    Parameters
    ----------
    image_bytes : size of the uncompressed image.
    disk_share : size of the temporary files per byte of the image.
    target : the file to be written. It counts only if it is on the same disk.
    base : the folder for temporary files.
    """
    if _is_on_one_disk(base, target):
        disk_share += PACKED_SHARE
    return disk_usage(base).free - int(image_bytes * disk_share)


def _is_on_one_disk(base: Path, target: Path) -> bool:
    return base.stat().st_dev == target.parent.stat().st_dev


@contextlib.contextmanager
def workspace(target: Path, base: Path) -> Iterator[Workspace]:
    """Yield temporary files for writing `target`, and remove them at the end of the block.

    The target is locked meanwhile, so that no other run writes it. What a killed run for the same target has
    left is removed first.

    Raises
    ------
    UsageError : another process is writing `target`, or its folder is not writable.
    ToolFailed : (at the end of the block) the disk of the target or of `base` was full.
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
    """Yield a new temporary folder, and remove it at the end of the block.

    It lies in the folder that a variable such as ``TMPDIR`` names, or else next to the file `beside`.
    """
    folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=tmp_base(beside, None)))
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_leftovers(target: Path) -> None:
    """Remove the temporary files that a killed run for `target` has left.

    The files of a run that still writes `target` are left alone.
    """
    if _lock_path(target).exists():
        # `_locked` removes the files when it has the lock. A UsageError says that another run holds it.
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
    """Turn an error of the block that a full disk has caused into one that names the disk and an option.

    The error may be this process's own, or that of mksquashfs or a runtime, which say so in their last lines.
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
    """Return the error that names the full disk, with the option that chooses another disk.

    `message` is the error of the system or program, and `details`, such as its last lines, end the hint.
    """
    folder = files.fullest_folder(target.parent, base)
    if _is_on_one_disk(base, target):
        option = "-o FILE, and --tmpdir DIR,"  # with one of them alone, the disk would be full again
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
    """Hold the lock of `target` during the block, and first remove what a killed run for it has left.

    The lock is a file beside the target. It states this process and its temporary `folder`, so that the next
    run finds the folder if this one is killed. `folder` is None if the block makes none.

    Raises
    ------
    UsageError : another process holds the lock, or the lock file cannot be written.
    """
    path = _lock_path(target)
    descriptor = _open_lock(path, target)
    try:
        has_lock = _acquire_lock(descriptor, path, target)
        try:
            if has_lock:
                _remove_stale_files(target, _read_holder(descriptor))
            os.ftruncate(descriptor, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(folder)}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            yield
        finally:
            # If the folder could not be removed, the lock file stays, and tells the next run its name.
            if folder is None or not folder.exists():
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open_lock(path: Path, target: Path) -> int:
    """Open or create the lock file `path` of `target`, and return its descriptor.

    Raises
    ------
    UsageError : this user cannot write to the folder.
    """
    try:
        # `open_own` refuses a hard link to another file, whose content would be replaced.
        with files.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            return os.dup(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write into {target.parent}: {error.strerror}",
            where=str(target),
            hint="-o FILE.sif in a folder that you can write to",
        ) from error


def _acquire_lock(descriptor: int, path: Path, target: Path) -> bool:
    """Take the lock of `target`, whose file `path` is open as `descriptor`.

    Return False if the file system has no locks. Then nobody can tell whether the files of another run are
    left from a killed one, so they must stay.

    Raises
    ------
    UsageError : another process holds the lock.
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
    """Return the content of a lock file: ``{"pid": 17, "host": "login1", "folder": "/tmp/.imgkit-sif..."}``.

    The result is empty if the file cannot be parsed.
    """
    try:
        values = json_text.parse(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return values


def _remove_stale_files(target: Path, holder: dict[str, Any]) -> None:
    """Remove the temporary files of a killed run for `target`.

    `holder` is the content of its lock file. Anybody may have written that, so the folder it names is removed
    only if it belongs to this user and has a name that imgkit gives to such folders.
    """
    for path in files.temporary_files(target):
        if _is_ours(path, stat.S_ISREG):
            path.unlink(missing_ok=True)
    folder = Path(str(holder.get("folder", "")))
    prefix = _folder_prefix(target)
    is_named_by_imgkit = folder.name.startswith(prefix) and _TOKEN.fullmatch(folder.name, len(prefix))
    if is_named_by_imgkit and _is_ours(folder, stat.S_ISDIR):
        remove_tree(folder)


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether `path` belongs to this user and `is_kind`, such as ``stat.S_ISDIR``, accepts its mode.

    Links are not followed. Return False if `path` does not exist.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and is_kind(status.st_mode)


def remove_tree(folder: Path) -> None:
    """Remove `folder` and all that is in it. Images have folders that deny access even to their owner."""

    def open_and_retry(function: Callable[..., Any], path: str, _: object) -> None:
        """Remove `path`, which `shutil.rmtree` could not, after allowing access to it and its folder."""
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=open_and_retry)
