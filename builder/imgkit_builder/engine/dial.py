"""The way to an engine on another machine: the program ssh, and ``docker system dial-stdio`` there.

Standard library only. The program reads ``~/.ssh/config``, as for Docker's own command. Its ends are one
socket, so that a direction can be closed and a full one waited for, as with an engine of this machine.
"""

from __future__ import annotations

import socket
import subprocess
from urllib.parse import urlsplit

from imgkit_builder.base import process

_REMOTE = ("docker", "system", "dial-stdio")
# Ctrl-C reaches all processes of the terminal, and imgkit still has to clean up on the engine.
_UNINTERRUPTED = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")


def words(host: str) -> list[str]:
    """The command that connects to ``ssh://[USER@]HOST[:PORT]``."""
    parts = urlsplit(host)
    user = ["-l", parts.username] if parts.username else []
    port = ["-p", str(parts.port)] if parts.port else []
    return ["ssh", *user, *port, "-T", "--", parts.hostname or "", *_REMOTE]


def dial(host: str, timeout_s: float | None) -> socket.socket:
    """Start ssh to `host`, and return a socket that leads to the engine there.

    What ssh says goes to this program's standard error. An engine that cannot be reached ends the connection.

    Raises
    ------
    ToolMissing : there is no program ssh.
    """
    process.need("ssh", "sudo apt-get install openssh-client")
    ours, theirs = socket.socketpair()
    with theirs:
        # It ends when the socket is closed.
        subprocess.Popen([*_UNINTERRUPTED, *words(host)], stdin=theirs.fileno(), stdout=theirs.fileno())
    ours.settimeout(timeout_s)
    return ours
