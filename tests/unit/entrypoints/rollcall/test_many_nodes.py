"""A head of many nodes, which are simulated: limits of open files, and nodes that fail in the handshake."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rollcall_nodes import CallThread, close, head_placement, kept_file_limit, stranger
from simulated_nodes import ME, SECRET, SimulatedNode, SimulatedNodes

from imgkit_entrypoints.launch.agent import NodeAgent
from imgkit_entrypoints.launch.node_attempt import NodeCommand, NodeConfig
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.rollcall import gather
from imgkit_entrypoints.rollcall.connection import Handshake
from imgkit_entrypoints.rollcall.server import MAX_STRANGERS
from imgkit_entrypoints.schedulers.placement import Placement


def limit(pid: int) -> int:
    """Soft limit of open files of a process."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(int(line.split()[3]) for line in lines if line.startswith("Max open files"))


def launcher(placement: Placement, printed: Path) -> None:
    """A head with the usual limit of a shell, whose program prints its own limit and stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    tempfile.tempdir = str(printed.parent)  # this process is killed: its stop folder would stay in /tmp
    config = NodeConfig(
        command=NodeCommand(
            argv=["sh", "-c", 'ulimit -n > "$0"; exec sleep 600', str(printed)],
            env=dict(os.environ),
        ),
        placement=placement,
        node=ME,
        log=lambda _: None,
        timeouts=Timeouts(rollcall_s=120),
        secret=SECRET,
    )
    NodeAgent(config).run()


def test_1020_nodes_start_below_a_soft_limit_of_1024(tmp_path):
    placement, printed = replace(head_placement(), nnodes=1020, hosts=()), tmp_path / "the limit"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1020 + 512:
        pytest.skip(f"the hard limit of open files is {hard}")
    head = os.fork()
    if not head:
        try:
            launcher(placement, printed)
        finally:
            os._exit(1)
    try:
        with kept_file_limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            with contextlib.closing(SimulatedNodes(placement)) as nodes:
                nodes.call()
                nodes.start()
                end = time.monotonic() + 60
                while not (printed.exists() and printed.read_text()):
                    assert time.monotonic() < end
                    time.sleep(0.01)
                assert printed.read_text() == "1024\n"
                assert limit(head) == 1020 + MAX_STRANGERS + gather.AGENT_FILES
    finally:
        os.kill(head, signal.SIGKILL)
        os.waitpid(head, 0)


def test_node_that_dies_in_the_handshake_can_call_again(placement):
    head = CallThread(placement, 0, secret=SECRET)
    for reset in (False, True):
        with stranger(placement) as connection:
            connection.sendall(Handshake(secret=SECRET, job_id=placement.job_id, node_rank=1).opening + b"\n")
            assert connection.recv(200).startswith(b"imgkit-head ")
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    close([call.roll() for call in (head, CallThread(placement, 1, secret=SECRET))])


def test_trickle_in_the_handshake_delays_no_other_node(placement):
    placement = replace(placement, nnodes=3)
    head = CallThread(placement, 0, secret=SECRET)
    handshake = Handshake(secret=SECRET, job_id=placement.job_id, node_rank=2)
    slow = SimulatedNode(2, stranger(placement), handshake)
    over = threading.Event()

    def trickle() -> None:
        for byte in handshake.opening + b"\n":
            slow.connection.sendall(bytes([byte]))
            over.wait(0.001)

    sending = threading.Thread(target=trickle)
    sending.start()
    calls = [CallThread(placement, rank, secret=SECRET) for rank in (1, 2)]
    sending.join()
    close([call.roll() for call in (head, *calls)])
    slow.connection.close()
