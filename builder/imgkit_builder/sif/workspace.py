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
from typing import Any

from imgkit_builder.base import files
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError

_TMP_VARIABLES = ("IMGKIT_TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR")
_FOLDER = f"{files.TEMPORARY}sif."
_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|file too large", re.IGNORECASE)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Paths that exist inside `workspace`."""

    folder: Path
    """Temporary folder, also for the runtime's own temporary files."""
    part: Path
    """File beside the target, which is renamed to it at the end."""


def tmp_base(target: Path, chosen: Path | None) -> Path:
    """The folder for temporary files: `chosen`, the first variable that is set, or the target's own folder.

    Not /tmp: on many clusters that is memory, and a conversion needs several times the image's size.
    """
    if chosen is not None:
        base = chosen
    else:
        named = next((value for name in _TMP_VARIABLES if (value := os.environ.get(name))), None)
        base = Path(named) if named else target.parent
    base = base.expanduser().absolute()
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(
            f"temporary files cannot go to {base}: {'not writable' if base.is_dir() else 'no such folder'}",
            where="--tmpdir" if chosen is not None else "IMGKIT_TMPDIR, APPTAINER_TMPDIR, TMPDIR",
            hint="--tmpdir DIR with a folder on a large, local disk",
        )
    return base


@contextlib.contextmanager
def workspace(target: Path, base: Path) -> Iterator[Workspace]:
    """Lock `target`, remove what a killed run of it left, and yield a fresh workspace.

    Raises
    ------
    UsageError : another process is writing `target`, or its folder is not writable.
    ToolFailed : the disk of the target or of `base` is full.
    """
    key, part = _key(target), files.temporary_name(target)
    folder = base / f"{_FOLDER}{key}.{secrets.token_hex(4)}"
    with _named_if_full(target, base), _locked(target, key, folder):
        try:
            folder.mkdir(mode=0o700)
            yield Workspace(folder=folder, part=part)
        finally:
            try:
                part.unlink(missing_ok=True)
            finally:
                remove_tree(folder)


@contextlib.contextmanager
def scratch(beside: Path, chosen: Path | None = None) -> Iterator[Path]:
    """A temporary folder where `tmp_base` says, for what is beside `beside`; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY, dir=tmp_base(beside, chosen)))
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
def _named_if_full(target: Path, base: Path) -> Iterator[None]:
    """Name the full disk and the option for another one, also where the runtime or mksquashfs met it."""
    try:
        yield
    except (OSError, ToolFailed) as error:
        tool = error if isinstance(error, ToolFailed) else None
        if tool and not _NO_SPACE.search(f"{tool.what} {tool.hint}"):
            raise
        if isinstance(error, OSError) and error.errno not in files.FULL:
            raise
        said = tool.what if tool else getattr(error, "strerror", "")
        folder = files.fullest(target.parent, base)
        other = "-o FILE" if folder != base else "--tmpdir DIR"
        one_disk = target.parent.stat().st_dev == base.stat().st_dev  # it fills again after either alone
        both = "-o FILE, and --tmpdir DIR," if one_disk else other
        raise ToolFailed(
            f"the disk of {folder} is full: {said}",
            where=str(target),
            hint="\n".join(filter(None, (f"{both} on a larger disk", tool.hint if tool else ""))),
        ) from error


@contextlib.contextmanager
def _locked(target: Path, key: str, folder: Path | None) -> Iterator[None]:
    path = _lock_path(target)
    descriptor = _open_lock(path, target)
    try:
        locked = _take(descriptor, path, target)
        try:
            if locked:
                _clean(target, key, _read(descriptor))
            os.ftruncate(descriptor, 0)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "folder": str(folder)}
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
            yield
        finally:
            # Where the folder could not be removed, the next run finds its name in the lock.
            if folder is None or not folder.exists():
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open_lock(path: Path, target: Path) -> int:
    try:
        # Not a second name of another file, either: what is in it is replaced.
        with files.open_own(path, os.O_RDWR | os.O_CREAT) as stream:
            return os.dup(stream.fileno())
    except OSError as error:
        raise UsageError(
            f"cannot write into {target.parent}: {error.strerror}",
            where=str(target),
            hint="-o FILE.sif in a folder that you can write to",
        ) from error


def _take(descriptor: int, path: Path, target: Path) -> bool:
    """Lock; False if the file system has no locks (then nothing is known to be stale)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        about = _read(descriptor)
        raise UsageError(
            f"another imgkit process is writing this file (pid {about.get('pid')} on {about.get('host')})",
            where=str(target),
            hint="wait for it, or choose another name with -o",
        ) from error
    try:
        same = os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        same = False
    if not same:
        # The run that held the lock has just ended and removed the file that we opened.
        raise UsageError(
            "another imgkit process created this file meanwhile", where=str(target), hint="run it again"
        )
    return True


def _read(descriptor: int) -> dict[str, Any]:
    try:
        values = json_text.parse(os.pread(descriptor, 1 << 16, 0))
        return values if isinstance(values, dict) else {}
    except ValueError:
        return {}


def _clean(target: Path, key: str, about: dict[str, Any]) -> None:
    """Remove what a killed run left, but only our names and files: anybody may have written the lock."""
    for part in files.temporary_files(target):
        if _ours(part, stat.S_ISREG):
            part.unlink(missing_ok=True)
    left = Path(str(about.get("folder", "")))
    if re.fullmatch(rf"{re.escape(_FOLDER)}{key}\.[0-9a-f]{{8}}", left.name) and _ours(left, stat.S_ISDIR):
        remove_tree(left)


def _ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and is_kind(found.st_mode)


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
