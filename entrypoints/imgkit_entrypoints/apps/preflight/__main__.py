"""Measure what the node agent requests: ``python -m imgkit_entrypoints.apps.preflight FD [store]``.

FD is the file descriptor of a socket to the node agent (imgkit's process on each node). Each request and each
answer is one line. With ``store``, the process measures nothing. It then runs the server of the key-value
store through which the measuring processes of all nodes find each other.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from imgkit_entrypoints.launch.preflight.run import STORE
from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult

ANSWER_MARGIN_S = 1.5
"""Seconds before the time limit of a stage at which a process reports that it is not done.

The report then reaches the node agent in time.
"""
# Most characters of a backend's error in an answer, because some errors contain a whole stack trace.
MAX_ERROR_CHARACTERS = 300


def give_up(connection: socket.socket, request: MeasureRequest) -> None:
    """Report to the node agent that a stage was not done in time, and end this process."""
    culprit = "it hangs" if len(request.group) == 1 else "this node or a partner hangs"
    error = f"not done within {request.limit_s - ANSWER_MARGIN_S:g} s: {culprit}"
    send(connection, MeasureResult(stage=request.stage, error=error))
    os._exit(0)


def send(connection: socket.socket, answer: MeasureResult) -> None:
    """Send an answer to the node agent as one line."""
    connection.sendall(messages.encode(answer) + b"\n")


def measure_all(connection: socket.socket) -> None:
    """Answer each request of the node agent within its time limit, until the node agent closes the socket.

    A request is for one stage: a measurement of this node alone, or together with another node. If a stage is
    not done in time, `give_up` answers and ends this process.
    """
    for line in connection.makefile("rb"):
        request = messages.decode(line)
        assert isinstance(request, MeasureRequest)
        # Use another thread, because a collective that hangs cannot be interrupted.
        delay_s = max(0.5, request.limit_s - ANSWER_MARGIN_S)
        timer = threading.Timer(delay_s, give_up, (connection, request))
        timer.daemon = True
        timer.start()
        send(connection, answer_request(request))
        timer.cancel()


def answer_request(request: MeasureRequest) -> MeasureResult:
    """Measure a stage, and return its results, or the first line of the error if it fails."""
    try:
        # This imports torch, so the import is part of the time limit of the first request.
        from imgkit_entrypoints.apps.preflight.measure import measure

        return measure(request)
    except Exception as error:  # torch's backends raise many types of errors, and each is a result
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return MeasureResult(stage=request.stage, error=lines[0][:MAX_ERROR_CHARACTERS])


def serve(connection: socket.socket) -> None:
    """Run the server of torch's key-value store until the node agent closes the socket.

    The measuring processes of all nodes find each other through this store.
    """
    from torch.distributed import TCPStore

    # Port 0 lets the kernel choose a free port, which the answer reports.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    send(connection, MeasureResult(stage=0, figures=((STORE, float(store.port)),)))
    connection.recv(1)  # returns when the node agent closes the socket


if __name__ == "__main__":
    os.dup2(2, 1)  # print to stderr, because stdout is for the output of the user's program
    to_agent = socket.socket(fileno=int(sys.argv[1]))
    if STORE in sys.argv[2:]:
        serve(to_agent)
    else:
        measure_all(to_agent)
    os._exit(0)  # a normal exit may hang or crash, because threads of torch still run
