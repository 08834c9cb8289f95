"""Processes and programs of the machine."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SBIN = ":/usr/sbin:/usr/local/sbin:/sbin"
"""Folders of daemons, which are not on the PATH of every user."""


class ClusterError(Exception):
    """Something that the user of `cluster` can mend."""


class ProcessId(NamedTuple):
    """A process. A pid alone may belong to another process by now."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since the machine's start; -1 if it had ended before anyone looked."""

    def is_alive(self) -> bool:
        """Return True if this very process runs."""
        return read_start_ticks(self.pid) == self.start_ticks

    def end(self, *signals: signal.Signals, seconds: float) -> None:
        """Send one signal after another, until the process has ended `seconds` after one of them."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Asked after the descriptor was opened: from here on it is this process or none.
            if not self.is_alive():
                return
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
                if select.select([fd], [], [], seconds)[0]:
                    return
        finally:
            os.close(fd)


def identify(pid: int) -> ProcessId:
    """Return the identity of the process that has this pid now."""
    ticks = read_start_ticks(pid)
    return ProcessId(pid, -1 if ticks is None else ticks)


def read_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks; None if there is none, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, with any characters in it.
    state, *fields = stat.rpartition(")")[2].split()
    if state in ("Z", "X"):
        return None
    return int(fields[18])


def run_tool(*argv: object, check: bool = True) -> str:
    """Run a program, and return its output and errors. With `check`, raise ClusterError if it fails."""
    args = [str(arg) for arg in argv]
    result = subprocess.run(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if check and result.returncode:
        raise ClusterError(f"{' '.join(args)}: {result.stdout.strip()}")
    return result.stdout


def find_program(name: str) -> str | None:
    """Return the path of a program, which may be a daemon."""
    return shutil.which(name, path=os.environ.get("PATH", "") + SBIN)


def have_programs(*names: str) -> bool:
    """Return True if the machine has all these programs."""
    return all(find_program(name) for name in names)


def is_reachable(host: str, port: int) -> bool:
    """Return True if a TCP port accepts connections."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], bool], seconds: float, subject: str) -> None:
    """Wait until `condition` holds. The error after `seconds` names the subject."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{subject} not there after {seconds} s")
        time.sleep(0.05)
