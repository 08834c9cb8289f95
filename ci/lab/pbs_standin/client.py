"""A program such as qsub, as users and job scripts call it: all it does is ask the server."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pbs_standin.protocol import Request, send_request

STREAMS = (1, 2)
"""Standard output and error, to which the ranks of mpiexec write."""


def call_program(folder: Path, program: str, args: Sequence[str]) -> int:
    """Ask the server whose folder is given, print its answer, and return the program's exit status."""
    if program == "pbsdsh":  # it does not end at a signal while it waits
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
    request = Request(
        program=program,
        args=args,
        env=dict(os.environ),
        cwd=str(Path.cwd()),
        script=sys.stdin.read() if program == "qsub" else "",
    )
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / "socket"))
        answer = send_request(link, request, STREAMS)
    sys.stdout.write(answer.out)
    sys.stderr.write(answer.err)
    return answer.code
