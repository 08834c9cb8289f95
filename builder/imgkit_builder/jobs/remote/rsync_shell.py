"""The remote shell of rsync, which runs this file: one session of the shared ssh connection.

``rsync_shell.py CONFIG HOST rsync --server ...``, with CONFIG from `jobs.remote.rsync`. rsync's own
ssh would stop at a banner of the login shell, and put names of folders into an argument list on the remote.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
_END_S = 10.0
"""Time for the remote to end after rsync has ended."""
_CONNECTION_LOST = 255
"""ssh's own exit status, also where it could not connect."""


def main(config_json: str, _host: str, *args: str) -> int:
    """Run rsync's server there with `args`; return ssh's exit status, which is kept in a file as well."""
    config = json.loads(config_json)
    server = [argument.replace(config["placeholder"], config["folder"]) for argument in args]
    script = f"{config['prelude']}\nset -- {shlex.join(server)}\n{config['script']}".encode()
    argv = [*config["ssh"], config["line"].format(count=len(script))]
    for descriptor in (0, 1):
        os.set_blocking(descriptor, True)
    # Without a buffer: what ssh did not take must not be written again, and fail, when the pipe is closed.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as ssh:
        assert ssh.stdin is not None  # noqa: S101 - for the type checker: both are pipes
        assert ssh.stdout is not None  # noqa: S101
        threading.Thread(target=_send, args=(ssh, ssh.stdin, script), daemon=True).start()
        output = ssh.stdout.fileno()
        data = _skip_banner(output, config["token"].encode() + b"\n")
        if data is None:
            code = _end_without_command(ssh)
        else:
            _copy(data, output, 1)
            code = ssh.wait()
    # Opened, not made: this process may outlive rsync, and a new file would stop the removal of the folder.
    with contextlib.suppress(FileNotFoundError), Path(config["status"]).open("r+b") as stream:
        stream.write(str(code).encode())
    return code


def _end_without_command(ssh: subprocess.Popen[bytes]) -> int:
    """Return ssh's exit status if the connection was lost, and 1 if the login shell ran no command."""
    try:
        code = ssh.wait(_END_S)
    except subprocess.TimeoutExpired:  # it prints without end
        ssh.kill()
        return 1
    return code if code == _CONNECTION_LOST else 1


def _send(ssh: subprocess.Popen[bytes], sink: IO[bytes], script: bytes) -> None:
    """Send the script, then what rsync writes; end ssh if it outlives rsync."""
    _copy(script, 0, sink.fileno())
    sink.close()
    try:
        ssh.wait(_END_S)
    except subprocess.TimeoutExpired:
        ssh.kill()


def _copy(data: bytes, source: int, sink: int) -> None:
    """Write `data` and then all of `source`, until one of them ends."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(sink, data) :] or os.read(source, CHUNK_BYTES)


def _skip_banner(source: int, token: bytes) -> bytes | None:
    """Return the first data behind the line `token`; None, with a message, if that line does not come."""
    banner = b""
    while len(banner) < CHUNK_BYTES and (data := os.read(source, CHUNK_BYTES)):
        banner += data
        _, separator, rest = banner.partition(token)
        if separator:
            return rest or os.read(source, CHUNK_BYTES)
    text = banner[-200:].decode(errors="replace").strip()
    print(f"the login shell runs no command; it printed: {text}", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
