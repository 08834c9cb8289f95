"""Nodes of a roll call as threads of the test process."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - sockets import it; another user may not reach this Python's files
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, ports
from imgkit_entrypoints.rollcall.messages import EndRun, Event, NodeInfo
from imgkit_entrypoints.rollcall.session import Session
from imgkit_entrypoints.schedulers.placement import Placement, job_port

_jobs = itertools.count()


@contextlib.contextmanager
def kept_file_limit() -> Iterator[int]:
    """Yield this process' soft limit of open files, and restore it: the roll call may raise it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def head_placement(nnodes: int = 2) -> Placement:
    """Return the head's placement in a job that no other test has, with a free port."""
    jobs = (f"{os.getpid()}.{number}" for number in _jobs)
    return Placement(
        scheduler="manual",
        nnodes=nnodes,
        node_rank=0,
        hosts=("as07r3b12", "as07r3b13", "as07r3b14"),
        head="127.0.0.1",
        port=None,
        job_id=next(job for job in jobs if ports.is_free(job_port(job))),
        source={},
    )


class CallThread(threading.Thread):
    """One node's call, and what came of it."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        *,
        timeout_s: float = 10.0,
        secret: bytes | None = None,
        **node: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.placement = replace(placement, node_rank=rank)
        self.node = NodeInfo(host=placement.hosts[rank], **node)
        self.timeout_s, self.secret = timeout_s, secret
        self.log_lines: list[str] = []
        self.session: Session | None = None
        self.error: NoPlan | None = None
        self.start()

    def run(self) -> None:
        """Call."""
        try:
            self.session = gather.meet_nodes(
                self.placement,
                self.node,
                timeout_s=self.timeout_s,
                log=self.log_lines.append,
                secret=self.secret,
            )
        except NoPlan as error:
            self.error = error

    def roll(self) -> Session:
        """Wait for the start; the roll."""
        self.join(timeout=20)
        assert self.session is not None, self.error
        return self.session

    def refusal(self) -> str:
        """Wait for the refusal; its text."""
        self.join(timeout=20)
        assert self.error is not None
        return str(self.error)


def meet(placement: Placement, **node: Any) -> list[Session]:
    """Start all nodes of `placement`, and return their rolls by rank."""
    calls = [CallThread(placement, rank, **node) for rank in range(placement.nnodes)]
    return [call.roll() for call in calls]


def start_others(head: CallThread, *ranks: int) -> list[Session]:
    """Call as other nodes (node 1 by default) with the head's secret. Return all rolls, the head's first."""
    others = [CallThread(head.placement, rank, secret=head.secret) for rank in ranks or (1,)]
    return [call.roll() for call in (head, *others)]


def hear(
    rolls: list[Session], is_complete: Callable[[list[list[Event]]], bool], within_s: float = 5.0
) -> list[list[Event]]:
    """Tick all rolls until `is_complete` holds for their events, and return the events of each."""
    events: list[list[Event]] = [[] for _ in rolls]
    end = time.monotonic() + within_s
    while time.monotonic() < end and not is_complete(events):
        for seen, roll in zip(events, rolls, strict=True):
            seen.extend(roll.poll())
        time.sleep(0.01)
    return events


def end_run(rolls: list[Session], code: int = 0) -> None:
    """End the run on all nodes, with nothing before, and close all."""
    rolls[0].send_all(EndRun(code=code))
    assert hear(rolls, lambda seen: all(seen)) == [[EndRun(code=code)]] * len(rolls)
    close(rolls)


def close(rolls: list[Session]) -> None:
    """Close all, the head last."""
    for roll in rolls[::-1]:
        roll.close()


def stranger(placement: Placement, within_s: float = 10.0) -> socket.socket:
    """A connection to the head's port, as soon as it listens."""
    end = time.monotonic() + within_s
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", job_port(placement.job_id)), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return connection


@contextlib.contextmanager
def squatting(placement: Placement, answer: bytes | None = None) -> Iterator[socket.socket]:
    """Listen as another program on the head's port, which answers every call with the same bytes."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                connection.recv(4096)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", job_port(placement.job_id))) as listener:
        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield listener


def heard_until_closed(connection: socket.socket) -> bytes:
    """All bytes that arrive until the other end closes."""
    heard = b""
    try:
        while data := connection.recv(65536):
            heard += data
    except ConnectionResetError:
        pass
    return heard
