"""What a program such as qsub and the server send each other over the server's socket.

The program sends the size of its request and two descriptors, its standard output and error, then the request
itself. The server sends one answer when the program is to end. Both are JSON.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIZE_BYTES = 4
"""Bytes of a request's size, which is sent before it."""


class RefusedError(Exception):
    """A request that PBS refuses. The message is what the program prints before it ends with 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of a program by a user or a job script."""

    program: str
    """The name of the program: ``"qsub"``."""
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    script: str = ""
    """The job script, which qsub reads from its standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the program prints, and its exit status."""

    code: int
    out: str = ""
    err: str = ""


def send_request(link: socket.socket, request: Request, streams: Sequence[int]) -> Answer:
    """Send a request with two open descriptors, and wait for the answer."""
    data = json.dumps(dataclasses.asdict(request)).encode()
    socket.send_fds(link, [len(data).to_bytes(SIZE_BYTES, "big")], streams)
    link.sendall(data)
    answer = b"".join(iter(lambda: link.recv(65536), b""))
    if not answer:  # the server has been ended
        return Answer(code=1)
    return Answer(**json.loads(answer))


def receive_request(link: socket.socket) -> tuple[Request, list[int]]:
    """Return a request, and the two descriptors that came with it."""
    head, streams, _, _ = socket.recv_fds(link, SIZE_BYTES, 2)
    size = int.from_bytes(head, "big")
    data = b""
    while len(data) < size:
        data += link.recv(size - len(data))
    return Request(**json.loads(data)), streams


def send_answer(link: socket.socket, answer: Answer) -> None:
    """Send an answer, after which the program ends."""
    link.sendall(json.dumps(dataclasses.asdict(answer)).encode())
