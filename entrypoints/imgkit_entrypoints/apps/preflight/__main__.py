"""``python -m imgkit_entrypoints.apps.preflight FD [store]``: measure what the node agent asks for on FD."""

from __future__ import annotations

import os
import socket
import sys
import threading

from imgkit_entrypoints.launch.preflight.run import STORE
from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult

EARLIER_S = 1.5
"""Time before the limit of a stage at which a process that waits for its partner says so."""


class Orders:
    """The node agent's orders. The first one is taken here: its time limit counts the import of torch."""

    def __init__(self, descriptor: int) -> None:
        self.connection = socket.socket(fileno=descriptor)
        self._lines = self.connection.makefile("rb")
        self._next = self._taken()

    def answer_all(self) -> None:
        """Answer orders until the node agent closes the socket."""
        while self._next is not None:
            order, timer = self._next
            found = _measured(order)
            timer.cancel()
            self.send(found)
            self._next = self._taken()

    def send(self, found: MeasureResult) -> None:
        """Send an answer."""
        self.connection.sendall(messages.encode(found) + b"\n")

    def _taken(self) -> tuple[MeasureRequest, threading.Timer] | None:
        line = self._lines.readline()
        order = messages.from_head(line) if line else None
        if not isinstance(order, MeasureRequest):
            return None
        timer = threading.Timer(max(0.5, order.limit_s - EARLIER_S), self._give_up, [order])
        timer.daemon = True
        timer.start()
        return order, timer

    def _give_up(self, order: MeasureRequest) -> None:
        who = "this node or a partner hangs" if len(order.group) > 1 else "it hangs"
        self.send(
            MeasureResult(stage=order.stage, error=f"not done within {order.limit_s - EARLIER_S:g} s: {who}")
        )
        os._exit(0)


def _measured(order: MeasureRequest) -> MeasureResult:
    from imgkit_entrypoints.apps.preflight import measure

    try:
        return measure.stage(order)
    except Exception as error:  # whatever a backend raises is a finding
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return MeasureResult(stage=order.stage, error=said[:300])


def serve(descriptor: int) -> None:
    """Serve the store in which the measuring processes of all nodes meet, until the node agent is done."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection = socket.socket(fileno=descriptor)
    connection.sendall(messages.encode(MeasureResult(stage=0, figures=((STORE, float(store.port)),))) + b"\n")
    connection.recv(1)


if __name__ == "__main__":
    os.dup2(2, 1)  # the run's standard output belongs to the program
    first = None if STORE in sys.argv[2:] else Orders(int(sys.argv[1]))
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(first.answer_all if first else lambda: serve(int(sys.argv[1])))
