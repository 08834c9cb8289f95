"""Measure what the node agent asks for: ``python -m imgkit_entrypoints.apps.preflight FD [store]``.

FD is the number of a socket to the node agent, on which requests and answers are lines. With ``store``, the
process serves the store in which the processes of all nodes meet, and measures nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from imgkit_entrypoints.launch.preflight.run import STORE
from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult

EARLIER_S = 1.5
"""How long before the limit of a stage a process that waits for its partner answers that it is not done."""
# Characters of a backend's error in the answer, which is one line; some quote a whole stack.
MAX_ERROR_CHARACTERS = 300


def give_up(connection: socket.socket, request: MeasureRequest) -> None:
    """Answer that a stage was not done in time, and end the process."""
    culprit = "it hangs" if len(request.group) == 1 else "this node or a partner hangs"
    error = f"not done within {request.limit_s - EARLIER_S:g} s: {culprit}"
    send(connection, MeasureResult(stage=request.stage, error=error))
    os._exit(0)


def send(connection: socket.socket, answer: MeasureResult) -> None:
    """Send an answer to the node agent as one line."""
    connection.sendall(messages.encode(answer) + b"\n")


def measure_all(connection: socket.socket) -> None:
    """Answer each request of the node agent before its time limit, until the node agent closes the socket.

    A request names a stage: a measurement of this node alone, or together with another node.
    """
    for line in connection.makefile("rb"):
        request = messages.decode(line)
        assert isinstance(request, MeasureRequest)
        # A collective that hangs cannot be interrupted, so a thread answers and ends the process.
        timer = threading.Timer(max(0.5, request.limit_s - EARLIER_S), give_up, (connection, request))
        timer.daemon = True
        timer.start()
        send(connection, answer_request(request))
        timer.cancel()


def answer_request(request: MeasureRequest) -> MeasureResult:
    """Return the figures of a stage, or the first line of the error with which it failed."""
    try:
        # Imports torch, which counts in the time limit of the first request.
        from imgkit_entrypoints.apps.preflight.measure import measure

        return measure(request)
    except Exception as error:  # whatever a backend raises is a finding
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return MeasureResult(stage=request.stage, error=lines[0][:MAX_ERROR_CHARACTERS])


def serve(connection: socket.socket) -> None:
    """Serve the store in which the processes of all nodes meet, until the node agent closes the socket."""
    from torch.distributed import TCPStore

    # Port 0 lets the kernel choose a free port, which the answer reports.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    send(connection, MeasureResult(stage=0, figures=((STORE, float(store.port)),)))
    connection.recv(1)


if __name__ == "__main__":
    os.dup2(2, 1)  # the run's standard output belongs to the program
    to_agent = socket.socket(fileno=int(sys.argv[1]))
    if STORE in sys.argv[2:]:
        serve(to_agent)
    else:
        measure_all(to_agent)
    os._exit(0)  # torch's threads may outlive the interpreter
