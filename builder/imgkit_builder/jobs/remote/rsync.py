"""Run rsync over the shared ssh connection.

Use only options that both rsync 2.6.9 and openrsync support, because macOS ships one or the other. Never use
``--append``, ``--append-verify`` or ``--inplace``. With ``--append-verify``, rsync 3.2.7 skips an edited file
of the same size without an error, and rewrites a longer file in place.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import ErrorsTooLong, Exited
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.jobs.remote import rsync_shell
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, LOGIN_SHELL_LINE, Connection
from imgkit_builder.jobs.systems.fanout import SSH_FAILED
from imgkit_entrypoints.errors import ToolFailed, ToolMissing

INSTALL = "apt-get install rsync, dnf install rsync or brew install rsync"
PARTIAL = ".imgkit-part"
"""Name of the folder beside a file where rsync keeps the part that arrived before a connection was lost."""
FOLDER = "/imgkit-folder"
"""Placeholder for the absolute path of the folder on the remote, in options such as ``--link-dest``.

From 3.2.4 on, rsync escapes blanks and quotes in its arguments for a shell on the remote. imgkit passes the
arguments on without a shell, so the escapes would stay. Instead, `rsync_shell` replaces the placeholder by
the path after rsync has written its arguments.
"""
FILE_ERROR = 11
"""Exit code of rsync if it cannot read or write a file, for example because the disk is full."""
NO_FOLDER = 125
"""Exit code of the command on the remote if the folder does not exist."""
_NOT_FOUND = 127
"""Exit code of the command on the remote if rsync is not installed there."""
_CONNECTION_LOST = (10, 12, 30, 35, SSH_FAILED)
"""Exit codes that mean a lost connection.

rsync uses them for errors in the socket (10) and the protocol (12), and for two time limits (30 and 35). The
last code is that of ssh.
"""
_OPTIONS = (f"--partial-dir={PARTIAL}", "--timeout=60", "--progress", "--stats")
# The script that starts rsync's server in the folder. Its arguments are the command by which rsync calls the
# server.
_SERVER = FIND_PROGRAM + f'umask 077\ncd -- "$folder" || exit {NO_FOLDER}\nexec "$@"\n'
_POSITION = re.compile(rb"\r\s*(?P<bytes>[\d,.']+)\s+(?P<percent>\d+)%")
"""A line that ``--progress`` prints about the current file: ``\\r  1,048,576  25%  12.30MB/s  0:00:01``."""
_STATISTICS = re.compile(
    r"files transferred: (?P<files>[\d,.']+)\s.*file size: (?P<bytes>[\d,.']+)"
    r"(?:.*Literal data: (?P<new_bytes>[\d,.']+))?",
    re.DOTALL,
)
"""The output of ``--stats``.

``Number of regular files transferred: 2 ... Total transferred file size: 4,096 bytes ... Literal data: 12``
"""
_TAIL_BYTES = 1 << 14
"""How many bytes at the end of rsync's output are searched for the statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The files that one run of rsync transferred."""

    files: int
    """Number of files."""
    size_bytes: int
    """Size of these files."""
    new_bytes: int
    """Number of bytes that were sent, because the basis on the receiving side did not contain them."""

    def __str__(self) -> str:
        plural = "" if self.files == 1 else "s"
        return f"{self.files} file{plural}, {size_text(self.size_bytes)}"


def run_rsync(
    connection: Connection, folder: str, args: Sequence[str], report: Reporter, size_bytes: int | None = None
) -> Transferred | None:
    """Run rsync with `args`, in which ``remote:PATH`` is a path relative to `folder` on the remote.

    rsync starts its server on the remote by the script `rsync_shell` instead of plain ssh. So the shared ssh
    connection of imgkit is used, and the server runs in `folder`.

    Parameters
    ----------
    args : the options of rsync, its source and its target.
    size_bytes : the expected size of all files, for the progress report. None if it is unknown.

    Returns
    -------
    The number and the size of the transferred files. None if rsync prints no statistics.

    Raises
    ------
    ToolMissing : rsync is missing on this machine or on the remote.
    Cut : the connection was lost.
    ScriptFailed : rsync failed.
    """
    process.require_program("rsync", hint=INSTALL)
    host = connection.choose_host(by_transfer=True)
    # openrsync splits the value of --rsh at blanks. So the folder is in /tmp, whose path contains none. The
    # file `shell` is run by sh, because some sites do not allow programs to be executed in /tmp.
    with tempfile.TemporaryDirectory(prefix="imgkit-", dir="/tmp") as work:
        status_file = Path(work, "status")  # rsync_shell writes the exit code of ssh into it
        files.write_file(status_file, "")
        config = _shell_config(connection, host, folder, status_file)
        shell = shlex.join((sys.executable, "-I", "-S", rsync_shell.__file__, config))
        files.write_file(Path(work, "shell"), f'exec {shell} "$@"\n')
        argv = (shutil.which("rsync") or "rsync", *_OPTIONS, f"--rsh=sh {work}/shell", *args)
        try:
            return _run_with_progress(process.bound_to_parent(argv), report, size_bytes)
        except ErrorsTooLong as error:
            raise connection.flood_error(error, host) from error
        except Exited as error:
            # If only rsync on this machine failed, the file is empty or contains 0.
            remote_code = int(files.read_text(status_file) or 0)
            raise _exit_error(connection, host, remote_code or error.code, error.errors) from error


def _shell_config(connection: Connection, host: str, folder: str, status_file: Path) -> str:
    """Return the first argument of `rsync_shell`: a JSON object that describes how to run rsync's server.

    Parameters
    ----------
    host : the host on which the server runs.
    folder : the folder on the host in which the server runs.
    status_file : the file to which `rsync_shell` writes the exit code of ssh.
    """
    # The script prints the token, so that `rsync_shell` can tell its output from the banner of the login
    # shell.
    token = secrets.token_hex(16)
    config = {
        "ssh": connection.ssh_argv(host),
        "line": LOGIN_SHELL_LINE,
        "token": token,
        "prelude": connection.prelude(token, {"folder": folder, "program": "rsync"}),
        "script": _SERVER,
        "placeholder": FOLDER,
        "folder": folder,
        "status": str(status_file),
    }
    return json.dumps(config)


def _exit_error(connection: Connection, host: str, code: int, errors: str) -> ToolFailed | ToolMissing:
    """Return the error for an rsync that exited with `code` on this machine or on `host`."""
    if code == _NOT_FOUND:
        hint = f"there: {INSTALL}; or a host that has it: imgkit remote add ... --transfer USER@HOST"
        return ToolMissing(f"there is no rsync on {host}", where=connection.remote.name, hint=hint)
    if code in _CONNECTION_LOST:
        code = SSH_FAILED  # `exit_error` returns `Cut` for this code, after which the caller connects again
    return connection.exit_error(code, errors, host)


def _run_with_progress(argv: Sequence[str], report: Reporter, size_bytes: int | None) -> Transferred | None:
    """Run rsync, and report how many bytes of all files it has processed.

    rsync prints only the position in the current file. So the sizes of the finished files are added to it.
    If rsync fails, `Exited` is raised, which the caller translates for the user.

    Parameters
    ----------
    size_bytes : the expected size of all files. None if it is unknown.

    Returns
    -------
    The statistics at the end of rsync's output. None if rsync prints no statistics.
    """
    finished_bytes = 0
    output_end = b""
    for chunk in process.filter_through(argv, ()):  # rsync gets an empty input
        # Only the end of the output is kept, because the statistics are there and the output can be long.
        output_end = (output_end + chunk)[-_TAIL_BYTES:]
        # A position that is split between two chunks is missed. Then only the reported progress is too low.
        for match in _POSITION.finditer(chunk):
            position = finished_bytes + _parse_number(match["bytes"].decode())
            report.advance(position, size_bytes)
            if match["percent"] == b"100":  # the current file is complete
                finished_bytes = position
    return _parse_statistics(output_end.decode(errors="replace"))


def _parse_statistics(output: str) -> Transferred | None:
    """Return the number and the size of the transferred files from rsync's output, or None if it has none."""
    statistics = _STATISTICS.search(output)
    if statistics is None:
        return None
    return Transferred(
        files=_parse_number(statistics["files"]),
        size_bytes=_parse_number(statistics["bytes"]),
        new_bytes=_parse_number(statistics["new_bytes"] or statistics["bytes"]),
    )


def _parse_number(text: str) -> int:
    """Return a number that rsync printed with thousands separators, which depend on the user's locale."""
    return int(re.sub(r"\D", "", text) or 0)
