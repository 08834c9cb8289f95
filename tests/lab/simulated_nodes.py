"""A simulation of all nodes of a run but the head: sockets that speak the protocol, without launchers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.connection import Handshake
from imgkit_entrypoints.rollcall.messages import (
    Heartbeat,
    JoinRequest,
    NodeInfo,
    ProbePort,
    ProbeReport,
    Software,
)
from imgkit_entrypoints.schedulers.placement import Placement, job_port

HERE = "127.0.0.1"
SECRET = os.urandom(32)
ME = NodeInfo(
    host="node", software=Software(image="0" * 12, torch="2.13.0", nccl="2.27.5"), nproc=4, gpu="H100",
    address=HERE, interface="lo",
)  # fmt: skip


def await_listener(port: int) -> None:
    """Wait until a program listens on `port`; a connection would be a stranger's."""
    while not any(
        fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
        for name in ("tcp", "tcp6")
        for fields in map(str.split, Path("/proc/net", name).read_text().splitlines()[1:])
    ):
        time.sleep(0.0005)


@dataclass(slots=True)
class SimulatedNode:
    """One connection that speaks for a node."""

    rank: int
    connection: socket.socket
    handshake: Handshake
    is_known: bool = False
    """The head has proved the secret."""

    def send(self, message: messages.Message) -> None:
        """Send a message."""
        self.connection.sendall(messages.encode(message) + b"\n")


class SimulatedNodes:
    """All nodes but the head."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.nodes: list[SimulatedNode] = []
        self.calling_s = self.after_last_s = 0.0
        self._waiting = selectors.DefaultSelector()
        self._listener = socket.create_server((HERE, 0), backlog=64)
        port = self._listener.getsockname()[1]
        self._offer = ProbePort(address=HERE, interface="lo", port=port)
        self._started = 0

    def call(self) -> None:
        """Call for every node; answers that have arrived are heard in between."""
        port = job_port(self.placement.job_id)
        await_listener(port)
        start_s = time.monotonic()
        for rank in range(1, self.placement.nnodes):
            node = SimulatedNode(
                rank,
                socket.create_connection((HERE, port)),
                Handshake(secret=SECRET, job_id=self.placement.job_id, node_rank=rank),
            )
            node.connection.sendall(node.handshake.opening + b"\n")
            self._waiting.register(node.connection, selectors.EVENT_READ, node)
            self.nodes.append(node)
            if rank % 64 == 0:
                self._hear(0)
        self.calling_s = time.monotonic() - start_s

    def start(self) -> None:
        """Answer the head until every node has its start."""
        start_s = time.monotonic()
        while self._started < self.placement.nnodes - 1:
            self._hear(1.0)
        self.after_last_s = time.monotonic() - start_s

    def beat(self, seconds: float) -> None:
        """Beat for each node every `session.BEAT_S`, the nodes spread evenly over that time."""
        start_s, sent = time.monotonic(), 0
        while (passed := time.monotonic() - start_s) < seconds:
            due = int(passed / session.BEAT_S * len(self.nodes))
            while sent < due:
                self.nodes[sent % len(self.nodes)].send(Heartbeat(positions=(7, 8)))
                sent += 1
            self._hear(0.002)
            time.sleep(0.002)

    def close(self) -> None:
        """Leave."""
        for node in self.nodes:
            node.connection.close()
        self._listener.close()
        self._waiting.close()

    def _hear(self, seconds: float) -> None:
        for key, _ in self._waiting.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            heard = key.fileobj.recv(65536)
            assert heard, "the head closed a connection"
            node: SimulatedNode = key.data
            if not node.is_known:
                confirmed = node.handshake.confirm(heard.rstrip(b"\n"))
                assert confirmed, heard
                placement, node.is_known = self.placement, True
                request = JoinRequest(
                    job=placement.job_id,
                    node_rank=node.rank,
                    nnodes=placement.nnodes,
                    node=ME,
                    probe=self._offer,
                )
                node.connection.sendall(confirmed.sign(messages.encode(request)) + b"\n")
            if b'"ProbeRequest"' in heard:
                node.send(ProbeReport(failures=()))
            self._started += heard.count(b'"RunStart"')
