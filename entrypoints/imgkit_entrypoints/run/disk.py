"""Store the checkpoints of a run on disk, and lock the run's folder. This module does not import torch.

A checkpoint is a folder. Even if the writer is killed, the folder is either complete or absent: it is written
under a temporary name, each file and the folder are synced, and then the folder is renamed. The manifest of a
checkpoint lists exactly its files, with the size and sha256 of each, and contains a sha256 of itself. It is a
JSON file, and is compared with the files before any of them is unpickled.
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

# Version of the manifest. It must change when the content of a checkpoint changes.
SCHEMA = 2
# Name of the folder in a run folder that contains the checkpoints.
FOLDER = "checkpoints"
# Prefix in the name of a checkpoint: ``step-0000000500``.
STEP = "step-"
MANIFEST = "manifest.json"
# Prefixes in the names of checkpoints that are being written, and that are being removed.
WRITING, LEAVING = f"{files.TEMPORARY}writing-", f"{files.TEMPORARY}leaving-"
# Prefix in the name of a checkpoint that could not be read. It is never removed, so that the user can inspect
# it.
SKIPPED = "skipped-"
# Number of bytes that are read at once to compute a sha256.
CHUNK_BYTES = 4 << 20

FileEntry = dict[str, Any]
"""The entry of a file in a manifest: ``{"size_bytes": 4096, "sha256": "9f86..."}``."""


def checkpoint_name(step: int) -> str:
    """Return the folder name for the checkpoint of a step. Sorted by name, checkpoints are sorted by step."""
    return f"{STEP}{step:010d}"


def make_temporary_folder(folder: Path, step: int) -> Path:
    """Create a temporary folder in `folder` for the checkpoint of a step. `commit` renames it.

    Raises
    ------
    OSError : the folder cannot be created, or a later attempt of the run has begun (fence.py).
    """
    # The fence is a file that names the attempt of the job that may write. Any other gets an OSError here.
    fence.check_fence(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)  # makes space for the new checkpoint; `commit` reports what remains
    # The name is random, because a folder that an earlier run has left may be impossible to remove.
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
    """Make a temporary folder a checkpoint, and remove all checkpoints except the `keep` newest.

    The files in the folder must be complete and synced. Checkpoints of later steps are removed, too, because
    the run was resumed from an earlier step. Checkpoints of another user are kept. A checkpoint may be
    impossible to remove, for example because another process has one of its files open on NFS. It is also
    kept, and `warn` receives a message.

    Parameters
    ----------
    entries : the entry of each file in the manifest, by file name.

    Raises
    ------
    OSError : the checkpoint could not be written, another user has a checkpoint of this step, or a later
        attempt of the run has begun (fence.py). Older checkpoints are unchanged.
    """
    folder = temporary.parent
    target = folder / checkpoint_name(step)
    suffix = temporary.suffix  # it is random, so it differs from the suffixes of earlier runs
    manifest = json_text.seal({"schema": SCHEMA, "step": step, "files": dict(entries)})
    files.write_file(temporary / MANIFEST, json.dumps(manifest))
    # Check as late as possible, because a later attempt may have begun while the files were written.
    fence.check_fence(os.environ)
    # A folder cannot be renamed to the name of another one with files, so rename that one first.
    if os.path.lexists(target):
        owner = files.foreign_owner(target, folder.parent)
        if owner:
            raise OSError(errno.EPERM, f"{target.name} belongs to user {owner}")
        _rename_for_removal(target, suffix)
    files.publish_file(temporary, target)
    # Remove others only now, when the new checkpoint exists. Otherwise a crash could leave none.
    for path in _list_old_checkpoints(folder, target, keep):
        try:
            _rename_for_removal(path, suffix)
        except OSError as error:
            warn(f"{path} cannot be removed: {error.strerror}")
    for problem in _remove_leftovers(folder):
        warn(problem)
    return target


def _rename_for_removal(checkpoint: Path, suffix: str) -> None:
    """Rename a checkpoint, so that `_remove_leftovers` removes it.

    If the removal is interrupted, the rest of the folder does not count as a checkpoint.
    """
    checkpoint.rename(checkpoint.with_name(f"{LEAVING}{checkpoint.name}{suffix}"))


def _list_old_checkpoints(folder: Path, newest: Path, keep: int) -> list[Path]:
    """Return the checkpoints of this user to remove: all except `newest` and the `keep - 1` before it.

    `newest` is the checkpoint that was just written. One of a later step is older: it was written before the
    run was resumed from an earlier step. So it is removed, too.
    """
    old_checkpoints = []
    kept_count = 0  # `newest` counts, too
    for path in newest_first(folder):
        if files.foreign_owner(path, folder.parent):  # another user's checkpoint is not removed or counted
            continue
        is_of_later_step = path.name > newest.name  # names sort like their steps
        if is_of_later_step or kept_count == keep:
            old_checkpoints.append(path)
        else:
            kept_count += 1
    return old_checkpoints


def set_aside(checkpoints: Iterable[Path]) -> None:
    """Rename checkpoints that could not be read to ``skipped-...``, so that `commit` does not remove them.

    Raises
    ------
    OSError : a checkpoint cannot be renamed, or a later attempt of the run has begun (fence.py).
    """
    fence.check_fence(os.environ)
    for path in checkpoints:
        if os.path.lexists(path):
            path.rename(path.with_name(f"{SKIPPED}{path.name}.{secrets.token_hex(4)}"))


def describe_file(path: Path) -> FileEntry:
    """Return the entry of a complete file for a manifest."""
    return {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}


def _remove_leftovers(folder: Path) -> list[str]:
    """Remove folders of interrupted writers and checkpoints that are being removed. Return the problems.

    A folder that cannot be removed does no harm: its name is not that of a checkpoint.
    """
    problems = []
    for path in list(folder.iterdir()):  # a list, because the folder changes in the loop
        if not path.name.startswith((WRITING, LEAVING)):
            continue
        try:
            remove_checkpoint(path)
        except OSError as error:
            problems.append(f"{path / (error.filename or '')} cannot be removed: {error.strerror}")
    return problems


def remove_checkpoint(path: Path) -> None:
    """Remove the folder of a checkpoint. If it is a link, remove only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, valid or not, newest first, or ``[]`` if there is no folder.

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
    """Read the manifest of the checkpoint in `folder`, and compare it with the names and sizes of the files.

    The contents of the files are not read here (see `find_damage`).

    Raises
    ------
    InvalidCheckpoint : a file is missing, has another size, or is not in the manifest. Or the manifest cannot
        be read, was changed, has another version, or belongs to another step than the name of the folder.
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
    """Convert the JSON of a manifest to the checkpoint in `folder`.

    Raises
    ------
    InvalidCheckpoint : the manifest has another version, or belongs to another step than the folder's name.
    ValueError, KeyError, TypeError, AttributeError : the JSON is not a manifest, or was changed.
    """
    # Before the other checks, because another version may have other keys.
    schema = manifest["schema"]
    if schema != SCHEMA:
        raise InvalidCheckpoint(f"{folder / MANIFEST} has schema {schema}; this imgkit reads {SCHEMA}")
    json_text.unseal(manifest)  # raises ValueError if the manifest was changed, and removes its digest
    step = int(manifest["step"])
    # The newest checkpoint is found by the names. So an old checkpoint must not have the name of a later
    # step.
    if folder.name.startswith(STEP) and folder.name != checkpoint_name(step):
        raise InvalidCheckpoint(f"{folder} contains the checkpoint of step {step}")
    return StoredCheckpoint(folder, step, manifest["files"])


def _refuse_other_files(checkpoint: Path, entries: Mapping[str, FileEntry]) -> None:
    """Raise InvalidCheckpoint if names or sizes of the files differ from the manifest's `entries`.

    This is fast, because the contents are not read. `find_damage` reads them.
    """
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    sizes.pop(MANIFEST, None)  # the manifest does not list itself
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
    """Return how one of the files `names` differs from its entry in the manifest, or ``""`` if none does.

    The files are read completely. Their names and sizes have been compared before, see `read_manifest`.
    """
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
    """Return the checkpoints at `path`, newest first.

    `path` may be a checkpoint, a folder of checkpoints, or a run folder.
    """
    if (path / MANIFEST).exists():
        return [path]
    return newest_first(path) or newest_first(path / FOLDER)


def iterate_valid(
    path: Path, problems: dict[Path, str], *, trusts_folder: bool = False
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints at `path` that have a valid manifest, newest first.

    Parameters
    ----------
    path : a checkpoint, a folder of checkpoints, or a run folder.
    problems : receives the paths of unusable checkpoints, with the reasons, when the iterator passes them.
    trusts_folder : whether to accept checkpoints of the folder's owner, who may be another user. In any case,
        checkpoints of other users are refused, because loading one can run its code.
    """
    is_checkpoint = (path / MANIFEST).exists()
    for folder in checkpoints_at(path):
        try:
            if not is_checkpoint:  # a user who names a single checkpoint trusts it
                _refuse_foreign(folder, path, trusts_folder=trusts_folder)
            checkpoint = read_manifest(folder)
        except InvalidCheckpoint as error:
            problems[folder] = str(error)
        else:
            yield checkpoint


def _refuse_foreign(checkpoint: Path, folder: Path, *, trusts_folder: bool) -> None:
    """Raise InvalidCheckpoint if another user may have put the checkpoint into the folder.

    A checkpoint will be unpickled, which can run any code.
    """
    owner = files.foreign_owner(checkpoint, folder, trusts_folder=trusts_folder)
    if owner:
        raise InvalidCheckpoint(f"{checkpoint} belongs to user {owner}")
    if checkpoint.is_symlink():
        raise InvalidCheckpoint(f"{checkpoint} is a link")


LOCK = "run.lock"
_OTHER_FOLDER = "name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR"
# Longest time to wait for the processes of an earlier start to end.
PATIENCE_S = 3.0
# Time between two checks of `wait_until`.
RETRY_S = 0.1
# The lock files that this process has opened, including closed ones. A forked child does not inherit POSIX
# locks.
_LOCKS: weakref.WeakSet[BinaryIO] = weakref.WeakSet()
os.register_at_fork(after_in_child=_LOCKS.clear)


def lock_folder(folder: Path, say: Callable[[str], None], env: Mapping[str, str]) -> BinaryIO:
    """Lock `folder` until this process ends or the returned stream is closed.

    If the folder does not exist, it is created. A POSIX lock is used, because shared file systems support it,
    and because forked processes do not inherit it. The lock of a lost node may remain for a long time. So a
    later attempt of the same job ignores the lock. fence.py prevents the workers of the earlier attempt from
    writing.

    Raises
    ------
    UsageError : another run, possibly in this process, holds the lock, or the folder is not writable.
    """
    path = folder / LOCK
    # A process always gets its own POSIX locks again, so they do not keep two runs of a process apart.
    if _is_locked_by_process(path):
        raise UsageError(
            "another run of this process writes into this folder",
            where=str(folder),
            hint=f"end it first (with Run.start(...)), or {_OTHER_FOLDER}",
        )
    stream = _open_lock(path)
    # Attempts of the same job have the same suffix. It is empty outside of a job.
    job_suffix = _make_job_suffix(env)
    if wait_until(lambda: _try_lock(stream, path, say), PATIENCE_S):
        _write_holder(stream, job_suffix)
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
    """Open the lock file `path`. If the file or its folder does not exist, create it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = files.open_own(path, os.O_RDWR | os.O_CREAT, "r+b")
    except OSError as error:
        problem = f"the run folder cannot be written: {error.strerror}"
        where = str(error.filename or path)
        # Without `from None`, the traceback of the cause would be printed below the hint.
        raise UsageError(problem, where=where, hint=_OTHER_FOLDER) from None
    _LOCKS.add(stream)
    return stream


def _write_holder(stream: BinaryIO, job_suffix: str) -> None:
    """Replace the line in a lock file by one that names this process.

    Another run that does not get the lock reads this line for its message.
    """
    holder = f"process {os.getpid()} on {socket.gethostname()}{job_suffix}\n"
    stream.truncate()  # remove the line of the previous run
    stream.write(holder.encode())
    stream.flush()


def wait_until(is_met: Callable[[], bool], patience_s: float) -> bool:
    """Wait until ``is_met()`` is true, at most `patience_s` seconds. Return whether it is."""
    deadline = time.monotonic() + patience_s
    while not is_met():
        if time.monotonic() > deadline:
            return False
        time.sleep(RETRY_S)
    return True


def _is_locked_by_process(path: Path) -> bool:
    """Return whether another run in this process holds the lock.

    POSIX locks do not work inside a single process. A second lock of the same process would succeed, and
    closing either stream would release the lock.
    """
    for stream in _LOCKS:
        if stream.closed or not path.exists():
            continue
        if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
            return True
    return False


def _make_job_suffix(env: Mapping[str, str]) -> str:
    """Return the end of the line in the lock file, by which the attempts of a job recognize each other.

    An example is `` of 1234``, where 1234 is the id of the job. Without a job, it is the random token of the
    dist-run command, which all of the command's attempts share. Outside of dist-run, the text is empty.
    """
    if not env.get("IMGKIT_ATTEMPT"):  # dist-run sets it for all workers
        return ""
    token = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
    if token == stop_protocol.LOCAL_JOB:  # no scheduler has given a job id
        token = env.get(fence.RUN_ID_VARIABLE, "")  # dist-run sets it for the workers on the head
    return f" of {token}" if token else ""


def _try_lock(stream: BinaryIO, path: Path, say: Callable[[str], None]) -> bool:
    """Try to take the lock. Return False if another process holds it.

    If the file system does not support locks, warn the user, and return True.
    """
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # held by another process
            return False
        say(f"warning: {path}: file locks do not work here ({error.strerror}): start one run in it at a time")
    return True
