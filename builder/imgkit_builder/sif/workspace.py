"""Create and remove the temporary files of a conversion: a folder, and the new file beside the target.

``kill -9`` leaves three things behind: the lock file and the new file beside the target, and the temporary
folder. The next run for the same target takes the lock. That proves that no other process uses the files, so
the run removes them.
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
"""Messages with which programs report that a disk is full or that a limit of the user is reached."""
PACKED_SHARE = 0.5
"""Estimated size of a squashfs per byte of the image. Measured were 0.26 to 0.4; the rest is a margin."""
_TOKEN = re.compile(r"[0-9a-f]{8}")
"""The part after `_folder_prefix` in the name of a temporary folder."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of ``flock`` on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The temporary files that a conversion may use inside the block of `workspace`."""

    folder: Path
    """Temporary folder, also for the runtime's own temporary files."""
    new_file: Path
    """File beside the target with a temporary name. It is renamed to the target at the end."""


class _DiskNeed(NamedTuple):
    """How much space a conversion needs on the disk of a folder."""

    folder: Path
    needed_bytes: int
    option: str
    """The option with which the user can choose another disk."""

    @property
    def free_bytes(self) -> int:
        """The free space on the disk of the folder."""
        return disk_usage(self.folder).free


def tmp_base(target: Path, chosen: Path | None) -> Path:
    """Return the folder for temporary files.

    It is the folder `chosen` by the user, or else the folder in a variable such as ``TMPDIR``, or else the
    folder of `target`. /tmp is not the default: on many clusters it is in memory, and a conversion needs
    several times the size of the image.

    Raises
    ------
    UsageError : the folder does not exist, or this user cannot write to it.
    """
    requested = chosen or _find_tmp_in_environment() or target.parent
    folder = requested.expanduser().absolute()
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return folder
    problem = "not writable" if folder.is_dir() else "no such folder"
    raise UsageError(
        f"temporary files cannot go to {folder}: {problem}",
        where="--tmpdir" if chosen else "IMGKIT_TMPDIR, APPTAINER_TMPDIR, TMPDIR",
        hint="--tmpdir DIR with a folder on a large, local disk",
    )


def _find_tmp_in_environment() -> Path | None:
    """Return the folder in the first of `_TMP_VARIABLES` that is set, or None if none is set."""
    for variable in _TMP_VARIABLES:
        value = os.environ.get(variable)
        if value:
            return Path(value)
    return None


def check_space(image_bytes: int, temporary_bytes: int, target: Path, temporary_base: Path) -> None:
    """Raise CheckFailed if there is too little disk space for a conversion.

    The check saves the user from a conversion that fails after minutes.

    Parameters
    ----------
    image_bytes : size of the uncompressed image. The new file is estimated at a share of it, `PACKED_SHARE`.
    temporary_bytes : size of the temporary files.
    target : the file to be written.
    temporary_base : the folder for temporary files, which may be on the same disk.
    """
    packed_bytes = int(image_bytes * PACKED_SHARE)
    if _is_on_one_disk(target, temporary_base):
        # The hint names both options. With only one of them, the next attempt would fail again.
        needs = [_DiskNeed(temporary_base, temporary_bytes + packed_bytes, "--tmpdir DIR and -o FILE.sif")]
    else:
        needs = [
            _DiskNeed(temporary_base, temporary_bytes, "--tmpdir DIR"),
            _DiskNeed(target.parent, packed_bytes, "-o FILE.sif"),
        ]
    unmet_needs = [need for need in needs if need.free_bytes < need.needed_bytes]
    if not unmet_needs:
        return
    # There are one or two unmet needs. The message begins with the first, and adds the other.
    first_need, *other_needs = unmet_needs
    message = (
        f"{size_text(first_need.free_bytes)} are free, "
        f"an image of {size_text(image_bytes)} needs {size_text(first_need.needed_bytes)}"
    )
    for need in other_needs:
        needed, free = size_text(need.needed_bytes), size_text(need.free_bytes)
        message += f"; {needed} in {need.folder}, where {free} are free"
    options = " and ".join(need.option for need in unmet_needs)
    raise CheckFailed(message, where=str(first_need.folder), hint=f"{options} on a larger disk")


def spare_bytes(image_bytes: int, disk_share: float, target: Path, temporary_base: Path) -> int:
    """Return how many bytes remain free on the disk of `temporary_base` after a conversion.

    The result is negative if the disk is too small for the files that the conversion writes.

    Parameters
    ----------
    image_bytes : size of the uncompressed image.
    disk_share : size of the temporary files per byte of the image.
    target : the file to be written. Its size counts only if it is on the disk of `temporary_base`.
    temporary_base : the folder for temporary files.
    """
    share = disk_share
    if _is_on_one_disk(target, temporary_base):
        share += PACKED_SHARE  # the estimated size of `target` per byte of the image
    return disk_usage(temporary_base).free - int(image_bytes * share)


def _is_on_one_disk(target: Path, temporary_base: Path) -> bool:
    return target.parent.stat().st_dev == temporary_base.stat().st_dev


@contextlib.contextmanager
def workspace(target: Path, temporary_base: Path) -> Iterator[Workspace]:
    """Yield a new folder in `temporary_base`, and a path beside `target` for the new file.

    Both are removed at the end of the block. During the block, the target is locked, so that no other run can
    write it. Before the block, files that a killed run for the same target has left are removed.

    Raises
    ------
    UsageError : another process is writing `target`, or its folder is not writable.
    ToolFailed : the block failed because the disk of `target` or of `temporary_base` was full.
    """
    new_file = files.temporary_name(target)
    folder = temporary_base / f"{_folder_prefix(target)}{secrets.token_hex(4)}"
    # `_locked` writes the path of `folder` into the lock file, so that the next run can remove the folder if
    # this one is killed.
    with _explain_full_disk(target, temporary_base), _locked(target, folder):
        try:
            folder.mkdir(mode=0o700)
            yield Workspace(folder=folder, new_file=new_file)
        finally:
            # The folder must be removed even if the new file cannot be.
            try:
                new_file.unlink(missing_ok=True)
            finally:
                remove_tree(folder)


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """Yield a new temporary folder, and remove it at the end of the block.

    It is created in the folder that a variable such as ``TMPDIR`` names, or else next to the file `beside`.
    """
    folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=tmp_base(beside, None)))
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_leftovers(target: Path) -> None:
    """Remove the temporary files that a killed run for `target` has left.

    The files of a run that is still writing `target` are kept.
    """
    if _lock_path(target).exists():
        # `_locked` removes the files once it has the lock. A UsageError means that another run holds it.
        with contextlib.suppress(UsageError), _locked(target, None):
            pass


def _folder_prefix(target: Path) -> str:
    """Return the prefix in the names of temporary folders for `target`: ``.imgkit-sif.1f2e3d4c5b6a.``."""
    # A digest, since a path can contain slashes and be longer than the name of a folder may be.
    digest = hashlib.sha256(os.fsencode(target.absolute())).hexdigest()
    return f"{files.TEMPORARY}sif.{digest[:12]}."


def _lock_path(target: Path) -> Path:
    return target.with_name(f"{files.TEMPORARY}lock.{target.name}")


@contextlib.contextmanager
def _explain_full_disk(target: Path, temporary_base: Path) -> Iterator[None]:
    """Replace an error that a full disk causes in the block by one that names the disk and an option.

    The error may come from this process, or from mksquashfs or a runtime. Those two report a full disk in
    their last lines.
    """
    try:
        yield
    except ToolFailed as error:
        if not NO_SPACE.search(f"{error.what} {error.hint}"):
            raise
        raise _disk_full_error(target, temporary_base, error.what, error.hint or "") from error
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        raise _disk_full_error(target, temporary_base, error.strerror or "", "") from error


def _disk_full_error(target: Path, temporary_base: Path, message: str, details: str) -> ToolFailed:
    """Return the error that names the full disk, with the option that chooses another disk.

    Parameters
    ----------
    target, temporary_base : the file that was being written, and the folder for temporary files. One of their
        disks is full.
    message : the error of the system or program.
    details : what else is added to the hint, such as the last lines of the program.
    """
    folder = files.fullest_folder(target.parent, temporary_base)
    if _is_on_one_disk(target, temporary_base):
        # Both must move to another disk. If only one of them moved, the disk could be full again.
        option = "-o FILE, and --tmpdir DIR,"
    elif folder == temporary_base:
        option = "--tmpdir DIR"
    else:
        option = "-o FILE"
    hint = f"{option} on a larger disk"
    if details:
        hint += f"\n{details}"
    return ToolFailed(f"the disk of {folder} is full: {message}", where=str(target), hint=hint)


@contextlib.contextmanager
def _locked(target: Path, folder: Path | None) -> Iterator[None]:
    """Hold the lock of `target` during the block.

    Before the block, files that a killed run for `target` has left are removed. The lock is a file beside the
    target. It contains the id of this process and the path of its temporary `folder`. If this run is killed,
    the next run finds the folder there. `folder` is None if the block does not create one.

    Raises
    ------
    UsageError : another process holds the lock, or the lock file cannot be written.
    """
    path = _lock_path(target)
    descriptor = _open_lock(path, target)
    try:
        # If another process holds the lock, this raises an error. It is outside the inner `try`, because the
        # lock file of the other process must not be removed.
        has_lock = _acquire_lock(descriptor, path, target)
        try:
            # Without a lock, the files of the earlier run may still be in use. Its entry in the lock file is
            # read before `ftruncate` removes it.
            if has_lock:
                _remove_stale_files(target, _read_holder(descriptor))
            os.ftruncate(descriptor, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(folder)}
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            yield
        finally:
            # If the folder could not be removed, keep the lock file: the next run reads its name there.
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
        # `open_own` refuses a hard link, since writing the lock would replace the content of another file.
        with files.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            # The copy of the descriptor stays open after the `with` block.
            return os.dup(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write into {target.parent}: {error.strerror}",
            where=str(target),
            hint="-o FILE.sif in a folder that you can write to",
        ) from error


def _acquire_lock(descriptor: int, path: Path, target: Path) -> bool:
    """Take the lock of `target`. The lock file `path` is already open as `descriptor`.

    Return False if the file system does not support locks. Then nobody knows whether the files of another run
    are still in use, so the caller must not remove them.

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
        # Another run has just ended and removed the file that this process opened. A lock on the removed file
        # would not keep other runs away.
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

    Return an empty dict if the file cannot be parsed.
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

    The caller must hold the lock of `target`, so that no other run still uses the files. `holder` is the
    content of the killed run's lock file. Another user may have written the lock file. So the folder in it is
    removed only if it belongs to this user and has a name that imgkit gives to its folders.
    """
    # `_is_ours` tests the owner and the type of a file. It is false for a link, so no link is followed.
    for path in files.temporary_files(target):
        if _is_ours(path, stat.S_ISREG):
            path.unlink(missing_ok=True)
    folder = Path(str(holder.get("folder", "")))
    if _is_named_by_imgkit(folder, target) and _is_ours(folder, stat.S_ISDIR):
        remove_tree(folder)


def _is_named_by_imgkit(folder: Path, target: Path) -> bool:
    """Return whether `folder` has a name that `workspace` gives to its folder for `target`.

    Such a name is a prefix for the target and 8 random digits: ``.imgkit-sif.1f2e3d4c5b6a.90abcdef``.
    """
    prefix = _folder_prefix(target)
    token = folder.name.removeprefix(prefix)
    return folder.name.startswith(prefix) and _TOKEN.fullmatch(token) is not None


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether `path` belongs to this user and has the type that `is_kind` tests.

    `is_kind` is a function such as ``stat.S_ISDIR``. Links are not followed. If `path` does not exist, the
    result is False.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and is_kind(status.st_mode)


def remove_tree(folder: Path) -> None:
    """Remove `folder` and everything in it, even folders that deny access to their owner, as images have."""

    def open_and_retry(function: Callable[..., Any], path: str, _: object) -> None:
        """Allow access to `path` and its folder, and try again to remove `path`.

        `shutil.rmtree` calls this after an error. An error of the second attempt is ignored.
        """
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.exists():
        # `onerror` is deprecated from Python 3.12 on, but its successor `onexc` does not exist before.
        shutil.rmtree(folder, onerror=open_and_retry)
