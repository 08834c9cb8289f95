"""The lock on a run folder: only one run at a time writes snapshots into it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints import fence, files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol

LOCK = "run.lock"
PATIENCE_S = 3.0
"""Time for the processes of an earlier start to end."""


def hold(folder: Path, say: Callable[[str], None], env: Mapping[str, str]) -> BinaryIO:
    """Lock `folder`, which is made if it is absent, until this process ends or the stream is closed.

    A POSIX lock: file systems that nodes share know it, and processes that this one forks do not keep it. The
    lock of a lost node may stay for long: a later attempt of the same job goes on without it, since the fence
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
        ) from error
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
                hint="end that run, or name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR",
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
        say(f"warning: {path}: no locks here ({error.strerror}): start one run in it at a time")
    return True
