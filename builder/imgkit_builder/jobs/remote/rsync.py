"""Run rsync over the shared ssh connection.

Only options that rsync 2.6.9 and openrsync know: macOS has had one or the other. Never ``--append*`` or
``--inplace``: rsync 3.2.7 with ``--append-verify`` skips an edited file of the same size without an error,
and rewrites a longer one in place.
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
from imgkit_entrypoints.errors import ToolMissing

INSTALL = "apt-get install rsync, dnf install rsync or brew install rsync"
PARTIAL = ".imgkit-part"
"""Folder beside a file for what has arrived of it when the connection is lost."""
FOLDER = "/imgkit-folder"
"""Stands for the absolute path of the folder there, in arguments that name another folder below it.

rsync from 3.2.4 on escapes blanks and quotes in its arguments for a shell; none reads them here. So the path
comes in after rsync has written its arguments.
"""
NO_FOLDER = 125
"""Exit code if the folder there does not exist."""
_NOT_FOUND = 127
_CONNECTION_LOST = (10, 12, 30, 35, SSH_FAILED)
"""Exit codes of rsync, here or there: socket, protocol stream, both time limits; and that of ssh."""
_OPTIONS = (f"--partial-dir={PARTIAL}", "--timeout=60", "--progress", "--stats")
_SERVER = FIND_PROGRAM + f'umask 077\ncd -- "$folder" || exit {NO_FOLDER}\nexec "$@"\n'
_POSITION = re.compile(rb"\r\s*([\d,.']+)\s+(\d+)%")
_STATISTICS = re.compile(
    r"files transferred: ([\d,.']+)\s.*file size: ([\d,.']+)(?:.*Literal data: ([\d,.']+))?", re.DOTALL
)
"""``Number of regular files transferred: 2 ... Total transferred file size: 4,096 bytes``, and what of it was
new."""
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """What one run of rsync has done."""

    files: int
    size_bytes: int
    """Size of these files."""
    new_bytes: int
    """What of it the other side did not have."""

    def __str__(self) -> str:
        return f"{self.files} file{'' if self.files == 1 else 's'}, {size_text(self.size_bytes)}"


def run(
    connection: Connection, folder: str, args: Sequence[str], report: Reporter, size_bytes: int | None = None
) -> Transferred | None:
    """Run rsync with `args`, where ``remote:PATH`` is below the `folder` of the remote.

    Parameters
    ----------
    size_bytes : expected size of all files, for the progress.

    Returns
    -------
    What was transferred; None if rsync does not say it.

    Raises
    ------
    ToolMissing : there is no rsync, here or there.
    Cut : the connection was lost.
    ScriptFailed : rsync failed.
    """
    process.need("rsync", hint=INSTALL)
    host, token = connection.host(by_transfer=True), secrets.token_hex(16)
    # openrsync splits the remote shell at blanks, and some sites mount /tmp without permission to execute.
    with tempfile.TemporaryDirectory(prefix="imgkit-", dir="/tmp") as work:
        status = Path(work, "status")
        config = {
            "ssh": connection.ssh_argv(host),
            "line": LOGIN_SHELL_LINE,
            "token": token,
            "prelude": connection.prelude(token, {"folder": folder, "program": "rsync"}),
            "script": _SERVER,
            "placeholder": FOLDER,
            "folder": folder,
            "status": str(status),
        }
        shell = shlex.join((sys.executable, "-I", "-S", rsync_shell.__file__, json.dumps(config)))
        files.put(status, "")
        files.put(Path(work, "shell"), f'exec {shell} "$@"\n')
        try:
            argv = (shutil.which("rsync") or "rsync", *_OPTIONS, f"--rsh=sh {work}/shell", *args)
            return _follow(process.bound(argv), report, size_bytes)
        except ErrorsTooLong as error:
            raise connection.flood_error(error, host) from error
        except Exited as error:
            code = int(files.read_text(status) or 0) or error.code
            if code == _NOT_FOUND:
                hint = f"there: {INSTALL}; or a host that has it: imgkit remote add ... --transfer USER@HOST"
                where = connection.remote.name
                raise ToolMissing(f"there is no rsync on {host}", where=where, hint=hint) from error
            code = SSH_FAILED if code in _CONNECTION_LOST else code
            raise connection.exit_error(code, error.errors, host) from error


def _follow(argv: Sequence[str], report: Reporter, size_bytes: int | None) -> Transferred | None:
    """Run rsync, and report the bytes of finished files and of the current one."""
    finished_bytes, tail = 0, b""
    for chunk in process.through(argv, ()):
        tail = (tail + chunk)[-_TAIL_BYTES:]
        for match in _POSITION.finditer(chunk):
            position = finished_bytes + _number(match[1].decode())
            report.advance(position, size_bytes)
            finished_bytes = position if match[2] == b"100" else finished_bytes
    statistics = _STATISTICS.search(tail.decode(errors="replace"))
    if statistics is None:
        return None
    return Transferred(
        files=_number(statistics[1]),
        size_bytes=_number(statistics[2]),
        new_bytes=_number(statistics[3] or statistics[2]),
    )


def _number(text: str) -> int:
    """Return the number that rsync printed with the separators of some language."""
    return int(re.sub(r"\D", "", text) or 0)
