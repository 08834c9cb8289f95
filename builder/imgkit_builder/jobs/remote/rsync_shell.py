"""Start rsync's server on the remote over the shared connection. rsync runs this file instead of ssh.

The arguments are ``CONFIG HOST rsync --server ...``. CONFIG is a JSON object from `jobs.remote.rsync`. The
plain ssh that rsync starts by default would have two problems: a banner of the login shell would be an error,
and other users of the remote would see the names of folders in an argument list.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
_END_S = 10.0
"""Seconds for which ssh may go on after rsync has closed its connection."""
_CONNECTION_LOST = 255
"""Exit status of ssh if it could not connect or lost the connection."""


def main(config_json: str, _host: str, *args: str) -> int:
    """Run rsync's server on the remote, and return the exit code of ssh. rsync calls this instead of ssh.

    Parameters
    ----------
    config_json : a JSON object with texts. ``ssh`` is an exception: it is a list, the start of the ssh
        command. The script for the remote consists of ``prelude``, which sets variables and prints ``token``,
        and of ``script``, which runs its arguments. ``line`` is the command line for the login shell, which
        reads ``{count}`` bytes of script from its input. In the arguments of the server, ``placeholder``
        stands for ``folder``. The exit code is also written to the file ``status``, because rsync itself may
        exit with another code.
    args : the command of rsync's server.
    """
    config = json.loads(config_json)
    server_argv = [argument.replace(config["placeholder"], config["folder"]) for argument in args]
    script = f"{config['prelude']}\nset -- {shlex.join(server_argv)}\n{config['script']}".encode()
    login_shell_line = config["line"].format(count=len(script))
    token_line = config["token"].encode() + b"\n"
    code = _run_ssh([*config["ssh"], login_shell_line], script, token_line)
    _write_status(Path(config["status"]), code)
    return code


def _write_status(file: Path, code: int) -> None:
    """Write the exit code of ssh to `file`, unless imgkit has removed it.

    This process may outlive imgkit, which removes its temporary folder at its end. A new file in that folder
    would make the removal fail.
    """
    # "r+b" opens only a file that exists.
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as stream:
        stream.write(str(code).encode())


def _run_ssh(argv: Sequence[str], script: bytes, token_line: bytes) -> int:
    """Run ssh and pass data between ssh and rsync, in both directions. Return the exit code of ssh.

    rsync is on the standard input and output of this process. A thread sends the script and then rsync's data
    to ssh. Meanwhile, this function passes the output of ssh to rsync, without the banner of the login shell.

    Parameters
    ----------
    script : the script that starts rsync's server. It is sent before the data of rsync.
    token_line : the first line that the script prints. The data for rsync follows this line.
    """
    for descriptor in (0, 1):
        os.set_blocking(descriptor, True)  # rsync opens them in non-blocking mode
    # If ssh has ended, a buffered pipe would raise an error when it is closed, because Python would write the
    # rest of the buffer again. So the pipe has no buffer.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as ssh:
        assert ssh.stdin is not None  # noqa: S101 - for the type checker: both are pipes
        assert ssh.stdout is not None  # noqa: S101
        threading.Thread(target=_send_script_and_output, args=(ssh, ssh.stdin, script), daemon=True).start()
        ssh_output = ssh.stdout.fileno()
        # The thread must be running by now, because the script prints nothing before it has arrived.
        data = _skip_banner(ssh_output, token_line)
        if data is None:  # the login shell has not run the script
            return _end_without_command(ssh)
        _copy_stream(data, ssh_output, 1)
        return ssh.wait()


def _end_without_command(ssh: subprocess.Popen[bytes]) -> int:
    """Wait for the end of an ssh that did not print the token, and return the exit code for rsync.

    If the connection was lost, this is the exit code of ssh. Otherwise, the login shell did not run the
    script, and the exit code is 1. If the login shell prints without end, ssh is killed.
    """
    try:
        code = ssh.wait(_END_S)
    except subprocess.TimeoutExpired:
        ssh.kill()
        return 1
    if code == _CONNECTION_LOST:
        return code
    return 1


def _send_script_and_output(ssh: subprocess.Popen[bytes], sink: IO[bytes], script: bytes) -> None:
    """Send the script and then the output of rsync to ssh. If ssh does not end after that, kill it."""
    _copy_stream(script, 0, sink.fileno())
    sink.close()
    try:
        ssh.wait(_END_S)
    except subprocess.TimeoutExpired:
        ssh.kill()


def _copy_stream(data: bytes, source: int, sink: int) -> None:
    """Write `data` and then all data from `source` to `sink`, until `source` ends or `sink` is closed.

    Parameters
    ----------
    source, sink : file descriptors in blocking mode.
    """
    with contextlib.suppress(OSError):
        while data:
            # os.write may write only a part of the data.
            written_bytes = os.write(sink, data)
            data = data[written_bytes:]
            if not data:
                data = os.read(source, CHUNK_BYTES)


def _skip_banner(source: int, token_line: bytes) -> bytes | None:
    """Return the first data after `token_line` from the file descriptor `source`.

    Everything before that line is a banner of the login shell. If the line is missing, an error is printed
    and the result is None.
    """
    first_bytes = b""
    while len(first_bytes) < CHUNK_BYTES:
        data = os.read(source, CHUNK_BYTES)
        if not data:
            break
        first_bytes += data
        _, separator, script_output = first_bytes.partition(token_line)
        if separator:
            # An empty result would look like the end of the output, so wait for the next data.
            return script_output or os.read(source, CHUNK_BYTES)
    banner_end = first_bytes[-200:].decode(errors="replace").strip()
    print(f"the login shell runs no command; it printed: {banner_end}", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
