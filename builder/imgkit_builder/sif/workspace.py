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
_FOLDER = f"{files.TEMPORARY}sif."
NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|file too large", re.IGNORECASE)
"""How programs report that a disk is full or that a limit of the user is reached."""
PACKED_SHARE = 0.5
"""Size of a squashfs per image byte, with a margin: measured 0.26 to 0.4."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What ``flock`` says on a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Paths that exist inside `workspace`."""

    folder: Path
    """Temporary folder, also for the runtime's own temporary files."""
    part: Path
    """File beside the target, which is renamed to it at the end."""


def tmp_base(target: Path, chosen: Path | None) -> Path:
    """Return the folder for temporary files: `chosen`, else that of a variable, else the target's own.

    It is not /tmp: on many clusters that is memory, and a conversion needs several times the image's size.
    """
    base = chosen
    where = "--tmpdir"
    if base is None:
        base = target.parent
        where = "IMGKIT_TMPDIR, APPTAINER_TMPDIR, TMPDIR"
        # Backwards: the first variable of the list wins.
        for variable in reversed(_TMP_VARIABLES):
            base = Path(os.environ.get(variable) or base)
    base = base.expanduser().absolute()
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        problem = "not writable" if base.is_dir() else "no such folder"
        raise UsageError(
            f"temporary files cannot go to {base}: {problem}",
            where=where,
            hint="--tmpdir DIR with a folder on a large, local disk",
        )
    return base


def check_space(size: int, temporary: int, target: Path, base: Path) -> None:
    """Raise CheckFailed if an image of `size` bytes, with `temporary` ones in `base`, has no space."""
    packed = int(size * PACKED_SHARE)
    one_disk = _on_one_disk(base, target)
    needs = {base: temporary}
    if one_disk:
        needs[base] += packed
    else:
        needs[target.parent] = packed
    free = {folder: disk_usage(folder).free for folder in needs}
    short = [folder for folder in needs if free[folder] < needs[folder]]
    if not short:
        return
    # All options at once: with one of two alone, the next attempt would end here again.
    options = []
    if base in short:
        options.append("--tmpdir DIR")
    if one_disk or target.parent in short:
        options.append("-o FILE.sif")
    first, *rest = short
    message = (
        f"{size_text(free[first])} are free, an image of {size_text(size)} needs {size_text(needs[first])}"
    )
    for folder in rest:
        message += f"; {size_text(needs[folder])} in {folder}, where {size_text(free[folder])} are free"
    raise CheckFailed(message, where=str(first), hint=f"{' and '.join(options)} on a larger disk")


def spare_bytes(size: int, disk_share: float, target: Path, base: Path) -> int:
    """Return what `base` has free beside the temporary files and the .sif of an image of `size` bytes."""
    if _on_one_disk(base, target):
        disk_share += PACKED_SHARE
    return disk_usage(base).free - int(size * disk_share)


def _on_one_disk(base: Path, target: Path) -> bool:
    return base.stat().st_dev == target.parent.stat().st_dev


@contextlib.contextmanager
def workspace(target: Path, base: Path) -> Iterator[Workspace]:
    """Lock `target`, remove what a killed run of it left, and yield a fresh workspace.

    Raises
    ------
    UsageError : another process is writing `target`, or its folder is not writable.
    ToolFailed : the disk of the target or of `base` is full.
    """
    key = _key(target)
    part = files.temporary_name(target)
    folder = base / f"{_FOLDER}{key}.{secrets.token_hex(4)}"
    with _explain_full_disk(target, base), _locked(target, key, folder):
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
    """Yield a temporary folder where `tmp_base` says, for what is beside `beside`.

    It is removed at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=tmp_base(beside, None)))
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_leftovers(target: Path) -> None:
    """Remove what a killed run of `target` left, unless another run uses it."""
    if _lock_path(target).exists():
        with contextlib.suppress(UsageError), _locked(target, _key(target), None):
            pass


def _key(target: Path) -> str:
    return hashlib.sha256(os.fsencode(target.absolute())).hexdigest()[:12]


def _lock_path(target: Path) -> Path:
    return target.with_name(f"{files.TEMPORARY}lock.{target.name}")


@contextlib.contextmanager
def _explain_full_disk(target: Path, base: Path) -> Iterator[None]:
    """Name the full disk and the option for another one, also where the runtime or mksquashfs met it."""
    try:
        yield
    except ToolFailed as error:
        # The programs say it in their own words, somewhere in their last lines.
        if not NO_SPACE.search(f"{error.what} {error.hint}"):
            raise
        raise _disk_full_error(target, base, error.what, error.hint or "") from error
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        raise _disk_full_error(target, base, error.strerror or "", "") from error


def _disk_full_error(target: Path, base: Path, message: str, details: str) -> ToolFailed:
    folder = files.fullest_folder(target.parent, base)
    option = "-o FILE" if folder != base else "--tmpdir DIR"
    if _on_one_disk(base, target):
        option = "-o FILE, and --tmpdir DIR,"  # it fills again after either alone
    hint = f"{option} on a larger disk"
    if details:
        hint += f"\n{details}"
    return ToolFailed(f"the disk of {folder} is full: {message}", where=str(target), hint=hint)


@contextlib.contextmanager
def _locked(target: Path, key: str, folder: Path | None) -> Iterator[None]:
    """Hold the lock of `target`, which names this process and its `folder`.

    What a killed run of it has left is removed.
    """
    path = _lock_path(target)
    try:
        # Not a second name of another file, either: what is in it is replaced.
        with files.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            descriptor = os.dup(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write into {target.parent}: {error.strerror}",
            where=str(target),
            hint="-o FILE.sif in a folder that you can write to",
        ) from error
    try:
        has_lock = _lock(descriptor, path, target)
        try:
            if has_lock:
                _remove_stale(target, key, _holder(descriptor))
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


def _lock(descriptor: int, path: Path, target: Path) -> bool:
    """Take the lock. Return False if the file system has no locks: then nothing is known to be stale."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        holder = _holder(descriptor)
        raise UsageError(
            f"another imgkit process is writing this file (pid {holder.get('pid')} on {holder.get('host')})",
            where=str(target),
            hint="wait for it, or choose another name with -o",
        ) from error
    try:
        is_same_file = os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        is_same_file = False
    if not is_same_file:
        # The run that held the lock has just ended and removed the file that we opened.
        raise UsageError(
            "another imgkit process created this file in the meantime", where=str(target), hint="run it again"
        )
    return True


def _holder(descriptor: int) -> dict[str, Any]:
    """Return what the process that wrote the lock says about itself."""
    try:
        values = json_text.parse(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return values


def _remove_stale(target: Path, key: str, holder: dict[str, Any]) -> None:
    """Remove what a killed run left, but only our names and files: anybody may have written the lock."""
    for part in files.temporary_files(target):
        if _is_ours(part, stat.S_ISREG):
            part.unlink(missing_ok=True)
    folder = Path(str(holder.get("folder", "")))
    is_named_so = re.fullmatch(rf"{re.escape(_FOLDER)}{key}\.[0-9a-f]{{8}}", folder.name)
    if is_named_so and _is_ours(folder, stat.S_ISDIR):
        remove_tree(folder)


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and is_kind(status.st_mode)


def remove_tree(folder: Path) -> None:
    """Remove `folder`, even with folders that deny access, as images have them."""

    def open_and_retry(function: Callable[..., Any], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=open_and_retry)
