"""The lock on a run folder: only one run at a time writes snapshots into it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

LOCK = "run.lock"
PATIENCE_S = 3.0
"""Time for the processes of an earlier start to end."""


def hold(folder: Path, say: Callable[[str], None]) -> BinaryIO:
    """Lock `folder`, which is made if it is absent, until this process ends or the stream is closed.

    A POSIX lock: file systems that nodes share know it, and processes that this one forks do not keep it.

    Raises
    ------
    UsageError : another run holds it, or the folder cannot be written.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = files.open_own(path, os.O_RDWR | os.O_CREAT, "r+b")
    except OSError as error:
        raise UsageError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(error.filename or path),
            hint="name another folder in Run.start(FOLDER) or IMGKIT_RUN_DIR",
        ) from error
    end = time.monotonic() + PATIENCE_S
    while not _locked(stream, path, say):
        if time.monotonic() > end:
            who = stream.read(200).decode(errors="replace").strip()
            stream.close()
            raise UsageError(
                f"another run writes into this folder ({who})",
                where=str(folder),
                hint="end that run, or name another folder in Run.start(FOLDER) or IMGKIT_RUN_DIR",
            )
        time.sleep(0.1)
    stream.truncate()
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    stream.flush()
    return stream


def _locked(stream: BinaryIO, path: Path, say: Callable[[str], None]) -> bool:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        say(f"warning: {path}: no locks here ({error.strerror}): start one run in it at a time")
    return True
