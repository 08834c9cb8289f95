"""What a run keeps on disk: the lock on its folder, and its checkpoints. No torch.

A checkpoint is a folder, complete or absent, however the writer ends. It is written under a temporary name,
each file and the folder are synced, and then it is renamed. Its manifest names exactly the files that are
there, with the sha256 of each, and has a sha256 of its own: later disk errors are detected too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from imgkit_entrypoints import fence, files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.run import shard_file

SCHEMA = 1
MANIFEST = "manifest.json"
WRITING, LEAVING = f"{files.TEMPORARY}writing-", f"{files.TEMPORARY}leaving-"
CHUNK = 4 << 20


class Sink(Protocol):
    """The file of a checkpoint, written in sequence."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""

    def flush(self) -> None:
        """Do nothing, because nothing is buffered; torch.save calls it."""


WriteFile = Callable[[Sink], object]
"""Writes the content of one file into a sink."""
Rows = Mapping[str, dict[str, int | str]]
"""Size and sha256 of files by name, as a manifest has them."""


class _File:
    """A new file that is hashed while it is written, and synced at the end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._sum = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        self._sum.update(view)
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done : done + CHUNK])
        self.size_bytes += done
        return done

    def flush(self) -> None:
        pass

    def finish(self) -> dict[str, int | str]:
        os.fsync(self._descriptor)
        return {"size_bytes": self.size_bytes, "sha256": self._sum.hexdigest()}

    def close(self) -> None:
        os.close(self._descriptor)


def checkpoint_name(step: int) -> str:
    """Folder name of a step's checkpoint; names sort like steps."""
    return f"step-{step:010d}"


def write_checkpoint(
    folder: Path,
    step: int,
    parts: Mapping[str, WriteFile],
    *,
    keep: int,
    warn: Callable[[str], None] = print,
    held: Callable[[], Collection[Path]] = tuple,
    env: Mapping[str, str] = os.environ,
    shards: Callable[[Path], Rows] | None = None,
) -> Path:
    """Write a checkpoint into `folder`, and remove all but the `keep` newest.

    Checkpoints of later steps are removed too: the run was resumed from before them. What cannot be removed
    stays, as a file on NFS that another process holds open: `warn` gets a line about it. `held` returns those
    that are in use and stay until a later call. `env` names this worker's attempt: one that is over changes
    nothing in `folder` (fence.py). `shards` gets the unfinished checkpoint, into which all
    ranks write, and returns the rows of their files for the manifest.

    Raises
    ------
    OSError : the checkpoint could not be written, or the attempt is over; older ones are unchanged.
    """
    target = folder / checkpoint_name(step)
    # Random: what an earlier run has left under the same name may be impossible to remove.
    token = secrets.token_hex(4)
    temporary = folder / f"{WRITING}{target.name}.{token}"
    fence.check(env)
    _clear(folder)
    try:
        os.mkdir(temporary)  # noqa: PTH102 - tests interrupt each os call of this module
        _fill(temporary, step, parts, shards(temporary) if shards else {})
        fence.check(env)
        if os.path.lexists(target):
            os.rename(target, folder / f"{LEAVING}{target.name}.{token}")  # noqa: PTH104
        os.rename(temporary, target)  # noqa: PTH104
        _sync(folder)
    except Exception:  # torch.save turns an OSError of its file into a RuntimeError
        _discard(temporary)
        raise
    # The new checkpoint is safe.
    found = newest_first(folder)
    here = found.index(target) if target in found else len(found)
    in_use = held()
    for path in (*found[:here], *found[here + keep :]):
        if path in in_use:
            continue
        try:
            os.rename(path, folder / f"{LEAVING}{path.name}.{token}")  # noqa: PTH104
        except OSError as error:
            warn(f"{path} cannot be removed: {error.strerror}")
    for what in _clear(folder):
        warn(what)
    return target


def _fill(temporary: Path, step: int, parts: Mapping[str, WriteFile], shards: Rows) -> None:
    files = dict(shards)

    def manifest(sink: Sink) -> None:
        values = json_text.sealed({"schema": SCHEMA, "step": step, "files": files})
        sink.write(json.dumps(values).encode())

    for part_name, part in (*parts.items(), (MANIFEST, manifest)):
        files[part_name] = write_file(temporary / part_name, part)
    _sync(temporary)


def write_file(path: Path, write: WriteFile) -> dict[str, int | str]:
    """Write and sync a new file; return its row of the manifest."""
    file = _File(path)
    try:
        write(file)
        return file.finish()
    finally:
        file.close()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> list[str]:
    """Remove what an interrupted writer left, and checkpoints that are being removed; return what stays."""
    stays = []
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        return [f"{folder} cannot be tidied: {error.strerror}"]
    for entry in entries:
        if entry.startswith((WRITING, LEAVING)):
            try:
                _remove(folder / entry)
            except OSError as error:
                part = error.filename if isinstance(error.filename, str) else ""
                stays.append(f"{folder / entry / part} cannot be removed: {error.strerror}")
    return stays


def _discard(temporary: Path) -> None:
    """Remove this writer's own unfinished checkpoint, and not that of a worker of the next attempt."""
    with contextlib.suppress(OSError):  # the next writer tidies up
        _remove(temporary)


def _remove(path: Path) -> None:
    """Remove a checkpoint's folder; of a link, the link alone."""
    try:
        inside = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        os.unlink(path)  # noqa: PTH108
        return
    try:
        for file in os.listdir(inside):  # noqa: PTH208
            os.unlink(file, dir_fd=inside)
    finally:
        os.close(inside)
    os.rmdir(path)  # noqa: PTH106


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, valid or not, newest first."""
    try:
        found = [path for path in folder.iterdir() if path.name.startswith("step-")]
    except OSError:
        return []
    return sorted(found, key=lambda path: path.name, reverse=True)


def problem(checkpoint: Path) -> str | None:
    """The reason why `checkpoint` cannot be used; None if every file is as it was written.

    Of shards it compares the sizes alone: all ranks together read those (shared_folder.py).
    """
    try:
        manifest = json_text.load(checkpoint / MANIFEST)
        if manifest["schema"] != SCHEMA:
            return f"{checkpoint / MANIFEST} has schema {manifest['schema']}; this imgkit reads {SCHEMA}"
        json_text.unseal(manifest)
        if manifest.keys() != {"schema", "step", "files"} or not manifest["files"]:
            return f"{checkpoint / MANIFEST} is not a manifest"
        there = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
        if odd := sorted(there ^ manifest["files"].keys()):
            where = "in the folder, but not in the manifest" if odd[0] in there else "missing"
            return f"{checkpoint / odd[0]} is {where}"
        if type(manifest["step"]) is not int:
            raise TypeError("the step is no whole number")
        for part_name, said in manifest["files"].items():
            if (size := (checkpoint / part_name).stat().st_size) != said["size_bytes"]:
                return f"{checkpoint / part_name} has {size} bytes, not {said['size_bytes']}"
            if not part_name.endswith(shard_file.SUFFIX) and (damage := damaged(checkpoint, part_name, said)):
                return damage
    except OSError as error:
        return f"{error.filename or checkpoint}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint / MANIFEST} is not a manifest, or damaged"
    return None


def damaged(checkpoint: Path, part_name: str, row: Mapping[str, Any]) -> str:
    """The message if a file differs from its row in the manifest; empty: it does not."""
    if _sha256(checkpoint / part_name) == row["sha256"]:
        return ""
    return f"{checkpoint / part_name} is damaged: its sha256 differs from the manifest"


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with files.open_regular(path) as file:
        while data := file.read(CHUNK):
            found.update(data)
    return found.hexdigest()


def step_of(checkpoint: Path) -> int:
    """The step after which a valid checkpoint was taken."""
    return int(json_text.load(checkpoint / MANIFEST)["step"])


def _not_mine(checkpoint: Path) -> str | None:
    """The reason why another user may have put `checkpoint` into a folder that is not that user's."""
    try:
        return f"{checkpoint} is another user's, or a link" if files.foreign_folder(checkpoint) else None
    except OSError as error:
        return f"{checkpoint}: {error.strerror}"


def valid_ones(path: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield valid checkpoints, newest first. `path` is a checkpoint, a folder of them, or a run folder.

    Reports every checkpoint that is skipped, with the reason.
    """
    alone = (path / MANIFEST).exists()
    for one in [path] if alone else newest_first(path) or newest_first(path / "checkpoints"):
        why = (None if one == path else _not_mine(one)) or problem(one)
        if why is None:
            yield one
        else:
            say(f"checkpoint skipped: {why}")


LOCK = "run.lock"
PATIENCE_S = 3.0
"""Time for the processes of an earlier start to end."""


def lock(folder: Path, say: Callable[[str], None], env: Mapping[str, str]) -> BinaryIO:
    """Lock `folder`, which is made if it is absent, until this process ends or the stream is closed.

    A POSIX lock: file systems that nodes share know it, and processes that this one forks do not keep it. The
    lock of a lost node may stay for long: a later attempt of the same job ignores it, since the fence
    keeps the workers of the earlier one from writing (fence.py).

    Raises
    ------
    UsageError : another run holds it, or the folder cannot be written.
    """
    path, job = folder / LOCK, _job(env)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = files.open_own(path, os.O_RDWR | os.O_CREAT, "r+b")
    except OSError as error:
        raise UsageError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(error.filename or path),
            hint="name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR",
        ) from None  # its traceback would come below the hint
    end = time.monotonic() + PATIENCE_S
    while not _locked(stream, path, say):
        if time.monotonic() > end:
            who = stream.read(200).decode(errors="replace").strip()
            if job and who.endswith(job):
                say(f"warning: {path}: an earlier attempt still has the lock ({who})")
                return stream
            stream.close()
            raise UsageError(
                f"another run writes into this folder ({who})",
                where=str(folder),
                hint="stop that run, or name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR",
            )
        time.sleep(0.1)
    stream.truncate()
    stream.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n".encode())
    stream.flush()
    return stream


def _job(env: Mapping[str, str]) -> str:
    """What the attempts of one job have in common: its id, or a word of the start where there is no job."""
    job = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
    name = env.get(fence.VARIABLE, "") if job == stop_protocol.LOCAL_JOB else job
    return f" of {name}" if name and env.get("IMGKIT_ATTEMPT") else ""


def _locked(stream: BinaryIO, path: Path, say: Callable[[str], None]) -> bool:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        say(f"warning: {path}: file locks do not work here ({error.strerror}): start one run in it at a time")
    return True
