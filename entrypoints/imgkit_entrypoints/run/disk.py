"""What a run keeps on disk: the lock on its folder, and its checkpoints. This module imports no torch.

A checkpoint is a folder, complete or absent, however the writer ends. It is written under a temporary name,
each file and the folder are synced, and then it is renamed. Its manifest names exactly the files that are
there, with size and sha256 of each, and has a sha256 of its own. It is JSON, and is compared with the files
before anything unpickles one of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from imgkit_entrypoints import fence, files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol

# Version of the manifest. A change of what a checkpoint holds needs another one.
SCHEMA = 2
# Name of the folder of checkpoints in a run folder.
FOLDER = "checkpoints"
# How the name of each checkpoint begins: ``step-0000000500``.
STEP = "step-"
MANIFEST = "manifest.json"
# How the name of a checkpoint begins that is being written, and of one that is being removed.
WRITING, LEAVING = f"{files.TEMPORARY}writing-", f"{files.TEMPORARY}leaving-"
# How the name of a checkpoint begins that could not be read, and that a later run has left to its user.
SKIPPED = "skipped-"
# Bytes that are read at once for a sha256.
CHUNK_BYTES = 4 << 20

FileEntry = dict[str, Any]
"""What a manifest has about a file: ``{"size_bytes": 4096, "sha256": "9f86..."}``."""


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint. Names sort like steps."""
    return f"{STEP}{step:010d}"


def make_temporary_folder(folder: Path, step: int) -> Path:
    """Make a temporary folder in `folder` for a step's checkpoint, which `commit` renames.

    Raises
    ------
    OSError : it cannot be made, or a later attempt of the run has begun (fence.py).
    """
    fence.check_fence(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    # Random: what an earlier run has left under the same name may be impossible to remove.
    temporary = folder / f"{WRITING}{checkpoint_name(step)}.{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    step: int,
    entries: Mapping[str, FileEntry],
    *,
    keep: int,
    warn: Callable[[str], None] = print,
) -> Path:
    """Rename a folder whose files are complete and synced, and remove all checkpoints but the `keep` newest.

    Checkpoints of later steps are removed too, since the run was resumed from before them. Those of another
    user stay. A checkpoint that cannot be removed, for example because another process holds a file of it
    open on NFS, stays too, and `warn` gets a line about it.

    Parameters
    ----------
    entries : what the manifest has about each file, by name.

    Raises
    ------
    OSError : the checkpoint could not be written, another user has one of this step, or a later attempt of
        the run has begun (fence.py). Older checkpoints are unchanged.
    """
    folder = temporary.parent
    target = folder / checkpoint_name(step)
    suffix = temporary.suffix  # random, so it differs from the suffixes of earlier runs
    manifest = json_text.seal({"schema": SCHEMA, "step": step, "files": dict(entries)})
    files.write_file(temporary / MANIFEST, json.dumps(manifest))
    # As late as possible: a later attempt may have begun while the files were written.
    fence.check_fence(os.environ)
    if os.path.lexists(target):
        owner = files.foreign_owner(target, folder.parent)
        if owner:
            raise OSError(errno.EPERM, f"{target.name} belongs to user {owner}")
        _rename_for_removal(target, suffix)
    files.publish_file(temporary, target)
    for path in _old_checkpoints(folder, target, keep):
        try:
            _rename_for_removal(path, suffix)
        except OSError as error:
            warn(f"{path} cannot be removed: {error.strerror}")
    for problem in _remove_leftovers(folder):
        warn(problem)
    return target


def _rename_for_removal(checkpoint: Path, suffix: str) -> None:
    """Rename a checkpoint that `_remove_leftovers` removes. If it is removed halfway, it must not count."""
    checkpoint.rename(checkpoint.with_name(f"{LEAVING}{checkpoint.name}{suffix}"))


def _old_checkpoints(folder: Path, newest: Path, keep: int) -> list[Path]:
    """Return the checkpoints of this user to remove: all but `newest` and the `keep - 1` just before it."""
    old_checkpoints = []
    remaining = 0
    for path in newest_first(folder):
        if files.foreign_owner(path, folder.parent):
            continue
        is_later = path.name > newest.name  # from before the run was resumed at an earlier step
        if is_later or remaining == keep:
            old_checkpoints.append(path)
        else:
            remaining += 1
    return old_checkpoints


def set_aside(checkpoints: Iterable[Path]) -> None:
    """Rename checkpoints that could not be read to ``skipped-...``, so that `commit` removes none of them.

    Raises
    ------
    OSError : one cannot be renamed, or a later attempt of the run has begun (fence.py).
    """
    fence.check_fence(os.environ)
    for path in checkpoints:
        if os.path.lexists(path):
            path.rename(path.with_name(f"{SKIPPED}{path.name}.{secrets.token_hex(4)}"))


def describe_file(path: Path) -> FileEntry:
    """Return what a manifest has about a complete file."""
    return {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}


def _remove_leftovers(folder: Path) -> list[str]:
    """Remove what an interrupted writer left, and checkpoints that are being removed; return the problems."""
    problems = []
    for path in list(folder.iterdir()):
        if not path.name.startswith((WRITING, LEAVING)):
            continue
        try:
            remove_checkpoint(path)
        except OSError as error:
            problems.append(f"{path / (error.filename or '')} cannot be removed: {error.strerror}")
    return problems


def remove_checkpoint(path: Path) -> None:
    """Remove the folder of a checkpoint. Of a link, only the link is removed."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, valid or not, newest first, or [] if it is absent.

    Raises
    ------
    OSError : the folder cannot be listed.
    """
    try:
        checkpoints = [path for path in folder.iterdir() if path.name.startswith(STEP)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(checkpoints, key=lambda path: path.name, reverse=True)


class InvalidCheckpoint(Exception):
    """A checkpoint cannot be used. The message says why."""


class StoredCheckpoint(NamedTuple):
    """A checkpoint whose manifest is valid. The contents of its files may still be damaged."""

    folder: Path
    step: int
    files: dict[str, FileEntry]
    """Entries of the manifest by the names of the files."""


def read_manifest(folder: Path) -> StoredCheckpoint:
    """Return the checkpoint in `folder`, if all its files are there and have the sizes in its manifest.

    The contents of the files are not read here (see `find_damage`).

    Raises
    ------
    InvalidCheckpoint : a file is missing, has another size or is not in the manifest; or the manifest cannot
        be read, was changed, or has another version or another step than the name of the folder.
    """
    path = folder / MANIFEST
    try:
        checkpoint = _parse_manifest(folder, json_text.load(path))
        _refuse_other_files(folder, checkpoint.files)
    except OSError as error:
        raise InvalidCheckpoint(f"{error.filename or path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidCheckpoint(f"{path} is not a manifest, or damaged") from None
    return checkpoint


def _parse_manifest(folder: Path, manifest: Any) -> StoredCheckpoint:
    """Return the checkpoint in `folder` as its manifest describes it.

    Raises
    ------
    InvalidCheckpoint : it has another version, or another step than the name of the folder.
    ValueError, KeyError, TypeError, AttributeError : it is not a manifest, or was changed.
    """
    schema = manifest["schema"]
    if schema != SCHEMA:
        raise InvalidCheckpoint(f"{folder / MANIFEST} has schema {schema}; this imgkit reads {SCHEMA}")
    json_text.unseal(manifest)
    step = int(manifest["step"])
    # Names sort like steps: an old checkpoint under a later name would count as the newest.
    if folder.name.startswith(STEP) and folder.name != checkpoint_name(step):
        raise InvalidCheckpoint(f"{folder} contains the checkpoint of step {step}")
    return StoredCheckpoint(folder, step, manifest["files"])


def _refuse_other_files(checkpoint: Path, entries: Mapping[str, FileEntry]) -> None:
    """Raise InvalidCheckpoint if the files have other names or sizes than in the manifest."""
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    sizes.pop(MANIFEST, None)
    for name in sorted(sizes.keys() | entries.keys()):
        path = checkpoint / name
        if name not in entries:
            raise InvalidCheckpoint(f"{path} is in the folder, but not in the manifest")
        if name not in sizes:
            raise InvalidCheckpoint(f"{path} is missing")
        size_bytes = entries[name]["size_bytes"]
        if sizes[name] != size_bytes:
            raise InvalidCheckpoint(f"{path} has {sizes[name]} bytes, not {size_bytes}")


def find_damage(checkpoint: Path, entries: Mapping[str, FileEntry], names: Collection[str]) -> str:
    """Return how a file of these `names` differs from its entry in the manifest, or "" if none does."""
    for name in names:
        path = checkpoint / name
        try:
            digest = _sha256(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if digest != entries[name]["sha256"]:
            return f"{path} is damaged: its sha256 differs from the manifest"
    return ""


def _sha256(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with files.open_regular(path) as file:
        while True:
            data = file.read(CHUNK_BYTES)
            if not data:
                return digest.hexdigest()
            digest.update(data)


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints at `path`, newest first: a checkpoint, a folder of them, or a run folder."""
    if (path / MANIFEST).exists():
        return [path]
    return newest_first(path) or newest_first(path / FOLDER)


def iterate_valid(
    path: Path, problems: dict[Path, str], *, trusts_folder: bool = False
) -> Iterator[StoredCheckpoint]:
    """Yield checkpoints with a valid manifest, newest first.

    Parameters
    ----------
    path : a checkpoint, a folder of them, or a run folder.
    problems : gets, for each checkpoint that cannot be used, the reason by its path.
    trusts_folder : whether to accept checkpoints of the folder's owner, who may be another user.
    """
    is_checkpoint = (path / MANIFEST).exists()
    for folder in checkpoints_at(path):
        try:
            if not is_checkpoint:
                _refuse_foreign(folder, path, trusts_folder=trusts_folder)
            checkpoint = read_manifest(folder)
        except InvalidCheckpoint as error:
            problems[folder] = str(error)
        else:
            yield checkpoint


def _refuse_foreign(checkpoint: Path, folder: Path, *, trusts_folder: bool) -> None:
    """Raise InvalidCheckpoint for what another user may have put into the folder: it will be unpickled."""
    owner = files.foreign_owner(checkpoint, folder, trusts_folder=trusts_folder)
    if owner:
        raise InvalidCheckpoint(f"{checkpoint} belongs to user {owner}")
    if checkpoint.is_symlink():
        raise InvalidCheckpoint(f"{checkpoint} is a link")


LOCK = "run.lock"
_OTHER_FOLDER = "name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR"
# Time for the processes of an earlier start to end.
PATIENCE_S = 3.0
# Time between two checks of `wait_until`.
RETRY_S = 0.1
# The locks of this process, also those that were closed. A child has none of its parent's.
_LOCKS: weakref.WeakSet[BinaryIO] = weakref.WeakSet()
os.register_at_fork(after_in_child=_LOCKS.clear)


def lock_folder(folder: Path, say: Callable[[str], None], env: Mapping[str, str]) -> BinaryIO:
    """Lock `folder`, which is made if it is absent, until this process ends or the stream is closed.

    It is a POSIX lock, since file systems that nodes share support it, and forked processes do not keep it.
    The lock of a lost node may stay for long. So a later attempt of the same job ignores it: fence.py keeps
    the workers of the earlier attempt from writing.

    Raises
    ------
    UsageError : another run holds it, also one of this process; or the folder cannot be written.
    """
    path = folder / LOCK
    if _is_locked_by_process(path):
        raise UsageError(
            "another run of this process writes into this folder",
            where=str(folder),
            hint=f"end it first (with Run.start(...)), or {_OTHER_FOLDER}",
        )
    stream = _open_lock(path)
    job_suffix = _job_suffix(env)
    if wait_until(lambda: _try_lock(stream, path, say), PATIENCE_S):
        holder = f"process {os.getpid()} on {socket.gethostname()}{job_suffix}\n"
        stream.truncate()  # the line of the run before
        stream.write(holder.encode())
        stream.flush()
        return stream
    other_holder = stream.read(200).decode(errors="replace").strip()  # "process 4711 on gpu03 of 1234"
    is_same_job = job_suffix != "" and other_holder.endswith(job_suffix)
    if not is_same_job:
        stream.close()
        problem = f"another run writes into this folder ({other_holder})"
        raise UsageError(problem, where=str(folder), hint=f"stop that run, or {_OTHER_FOLDER}")
    say(f"warning: {path}: an earlier attempt still has the lock ({other_holder})")
    return stream


def _open_lock(path: Path) -> BinaryIO:
    """Open the file of a lock, and make it and its folder if they are absent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = files.open_own(path, os.O_RDWR | os.O_CREAT, "r+b")
    except OSError as error:
        problem = f"the run folder cannot be written: {error.strerror}"
        where = str(error.filename or path)
        # Without `from None`, the traceback of the cause would come below the hint.
        raise UsageError(problem, where=where, hint=_OTHER_FOLDER) from None
    _LOCKS.add(stream)
    return stream


def wait_until(is_met: Callable[[], bool], patience_s: float) -> bool:
    """Return whether a condition is met within some seconds; it is checked every `RETRY_S`."""
    deadline = time.monotonic() + patience_s
    while not is_met():
        if time.monotonic() > deadline:
            return False
        time.sleep(RETRY_S)
    return True


def _is_locked_by_process(path: Path) -> bool:
    """Return whether another run of this process has the lock.

    A POSIX lock does not exclude its own process: a second request for it would succeed, and the first close
    of either stream would drop the lock.
    """
    for stream in _LOCKS:
        if stream.closed or not path.exists():
            continue
        if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
            return True
    return False


def _job_suffix(env: Mapping[str, str]) -> str:
    """Return the end of the lock's line, which the attempts of one job have in common: `` of 1234``.

    It names the job's id, or the token of a start without a job; it is empty outside of dist-run.
    """
    if not env.get("IMGKIT_ATTEMPT"):
        return ""
    token = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
    if token == stop_protocol.LOCAL_JOB:
        token = env.get(fence.VARIABLE, "")
    return f" of {token}" if token else ""


def _try_lock(stream: BinaryIO, path: Path, say: Callable[[str], None]) -> bool:
    """Return False if another process has the lock. Where file locks do not work, warn and go on without."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        say(f"warning: {path}: file locks do not work here ({error.strerror}): start one run in it at a time")
    return True
