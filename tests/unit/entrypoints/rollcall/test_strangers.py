"""Attacks by another user of the same machine, on starts with and without a secret."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollcall_nodes import (
    CallThread,
    close,
    end_run,
    head_placement,
    hear,
    heard_until_closed,
    kept_file_limit,
    meet,
    squatting,
    start_others,
    stranger,
)

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, messages, ports, server, session
from imgkit_entrypoints.rollcall.messages import (
    AttemptEnded,
    EndRun,
    JoinRequest,
    MeasureResult,
    NodeInfo,
    RankFailure,
)
from imgkit_entrypoints.rollcall.server import MAX_STRANGERS, Server
from imgkit_entrypoints.schedulers.placement import Placement, job_port

SECRET = os.urandom(32)
ANOTHER_USER = 12345
PAYLOADS = (
    b"[" * 2048 + b"\n",
    b'{"node_rank": Infinity}\n',
    b'{"type": "Heartbeat", "positions": [1]}\n',
    b'{"type": "AttemptEnded", "code": "x"}\n',
    b'{"type": "AttemptEnded", "code": ' + b"9" * 5000 + b"}\n",
    b'{"type": "StopOrder", "reason": "now", "requeue": false}\n',
    b'{"type": "Refused", "what": "go away"}\n',
    b"imgkit-join 1 " + b"0" * 32 + b'\n{"type": "StopOrder", "reason": "now"}\n',
    b"imgkit-join 99999999 " + b"0" * 32 + b"\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\x00" * 5000,
    b"",
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAIT_S", 1.0)


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    value: bytes | None = request.param
    return value


Attack = Callable[[Callable[[], None]], None]


@contextlib.contextmanager
def attacker(attack: Attack) -> Iterator[Callable[[], None]]:
    """Another user, who attacks in a process of its own; yields what waits for its `ready`."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user: sudo pytest")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
            attack(lambda: os.write(writer, b"."))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)

    def wait() -> None:
        assert os.read(reader, 1) == b".", "the attacker failed"

    try:
        yield wait
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def test_rubbish_changes_nothing_before_and_after_the_start(placement, secret):
    def attack(ready: Callable[[], None]) -> None:
        for _ in range(2):
            for payload in PAYLOADS:
                with stranger(placement) as connection:
                    with contextlib.suppress(OSError):  # the head has closed it already
                        connection.sendall(payload)
                        connection.shutdown(socket.SHUT_WR)
                    heard_until_closed(connection)
            ready()

    with attacker(attack) as wait:
        head = CallThread(placement, 0, secret=secret)
        wait()
        rolls = start_others(head)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert hear(rolls, lambda _: not waiting.is_alive()) == [[], []]
        waiting.join()
        end_run(rolls)
    assert any(
        "127.0.0.1 sent something other than an imgkit roll call; ignored" in text for text in head.log_lines
    )
    assert len(head.log_lines) <= server.MAX_REPORTS + 2


def test_scan_changes_nothing(placement, secret):
    def attack(ready: Callable[[], None]) -> None:
        for _ in range(1320):
            stranger(placement).close()
        ready()

    with attacker(attack) as wait:
        head = CallThread(placement, 0, secret=secret)
        wait()
        end_run(start_others(head))
    assert len(head.log_lines) == 1


def test_text_of_an_open_head_is_printed_without_control_characters(placement):
    with squatting(placement) as listener:
        node = CallThread(placement, 1)
        connection, _ = listener.accept()
        text = "\x1b]0;x\x07 \u202egnp.exe \x9b31m \x7f \ud800"
        connection.sendall(json.dumps({"type": "Refused", "what": text, "hint": text}).encode() + b"\n")
        assert r"\x1b]0;x\x07 \u202egnp.exe \x9b31m \x7f \ud800" in node.refusal()
        connection.close()
    assert not set(node.refusal()) & {"\x1b", "\x07", "\u202e", "\x9b", "\x7f", "\ud800"}


def test_slow_loris_does_not_fill_the_head(placement, secret):
    """A head that may open 1,024 files, among 1,100 connections that say a little now and then."""

    def attack(ready: Callable[[], None]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, 1200))
        connections = [stranger(placement) for _ in range(1100)]
        ready()
        while True:
            for position, connection in enumerate(connections):
                with contextlib.suppress(OSError):
                    connection.send(b"{")
                    continue
                with contextlib.suppress(OSError):
                    connection.close()
                    connections[position] = stranger(placement)

    def head(ready: Callable[[], None]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        lead_until_report(placement, secret)
        ready()

    with attacker(head) as until_done, attacker(attack) as wait:
        wait()
        roll = CallThread(placement, 1, secret=secret, timeout_s=20).roll()
        assert hear([roll], lambda _: False, within_s=1.0) == [[]]
        report_end(roll, until_done)


def test_refused_caller_that_goes_on_sending_costs_no_memory(placement, secret):
    call = JoinRequest(job="other", node_rank=1, nnodes=2, node=NodeInfo(host="other"))

    def head(ready: Callable[[], None]) -> None:
        before = memory("VmRSS")
        lead_until_report(placement, secret)
        assert memory("VmHWM") - before < 32 << 20
        ready()

    with attacker(head) as until_done:
        for _ in range(4):
            with stranger(placement) as connection, contextlib.suppress(OSError):  # the head closes it
                connection.sendall(messages.encode(call) + b"\n")
                for _ in range(100):
                    connection.sendall(b"ab\n" * 30_000)
        report_end(CallThread(placement, 1, secret=secret, timeout_s=20).roll(), until_done)


def report_end(roll: session.Session, until_done: Callable[[], None]) -> None:
    """Report the end of a node, whose head ends the run then."""
    roll.report(AttemptEnded(code=0))
    until_done()
    assert hear([roll], lambda seen: all(seen)) == [[EndRun(code=0)]]
    roll.close()


def lead_until_report(placement: Placement, secret: bytes | None) -> None:
    """Be the head, and end the run when the other node has reported its end."""
    me = NodeInfo(host="head")
    roll = gather.meet_nodes(placement, me, timeout_s=30, log=lambda _: None, secret=secret)
    while not roll.reports:
        roll.wait([], 0.1)
        roll.poll()
    roll.send_all(EndRun(code=0))
    roll.close()


def memory(kind: str) -> int:
    """Bytes of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def test_flood_during_the_run_wakes_the_head_seldom(placement, monkeypatch):
    """A head whose workers train has no processor to spare for strangers, and still refuses late callers."""
    reads: list[float] = []
    receive = Server.receive

    def counted(head: Server, seconds: float = 0.0, *, missing: int = 0) -> list[Any]:
        reads.append(time.monotonic())
        return receive(head, seconds, missing=missing)

    monkeypatch.setattr(session, "BEAT_S", 5.0)
    head, node = meet(placement)
    monkeypatch.setattr(Server, "receive", counted)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            stranger(placement).close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    start_s = time.monotonic()
    while time.monotonic() < start_s + 1.0:
        head.wait([], 0.5)
        head.poll()
        node.poll()
    stop.set()
    # Each turn of the loop above polls once, too.
    assert 2 <= len(reads) <= 3 * (time.monotonic() - start_s) / session.STRANGERS_PAUSE_S
    late = CallThread(placement, 1)
    while late.is_alive():
        head.wait([], 0.5)
        head.poll()
    assert "started twice on this host" in late.refusal()
    flooding.join()
    end_run([head, node])


def test_calls_of_another_job_do_not_delay_the_start(placement):
    head = CallThread(placement, 0)
    call = JoinRequest(job="other", node_rank=1, nnodes=2, node=NodeInfo(host="other"))
    connections = [stranger(placement) for _ in range(40)]
    for connection in connections:
        connection.sendall(messages.encode(call) + b"\n")
    end_run(start_others(head))
    for connection in connections:
        answer = heard_until_closed(connection)
        assert b"other belongs to job 'other', the head to another" in answer
        assert placement.job_id.encode() not in answer
        connection.close()


def test_oldest_stranger_leaves_first(placement, lone_head, monkeypatch):
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    first, second, third = (stranger(placement) for _ in range(3))
    lone_head.receive()
    assert first.recv(1) == b""
    second.sendall(line(placement))
    until(lone_head)
    for connection in (first, second, third):
        connection.close()


def test_stranger_that_says_nothing_leaves_after_its_time(placement, monkeypatch):
    monkeypatch.setattr(server, "MAX_WAIT_S", 0.2)
    head = CallThread(placement, 0)
    for data in (b"", b"{"):
        with stranger(placement) as connection:
            connection.sendall(data)
            assert connection.recv(1) == b""
    end_run(start_others(head))


def test_stranger_with_a_long_line_leaves_at_once(placement, lone_head, monkeypatch):
    monkeypatch.setattr(server, "MAX_WAIT_S", 60.0)
    with stranger(placement) as connection:
        connection.sendall(b"x" * (server.MAX_HANDSHAKE_BYTES + 1))
        end = time.monotonic() + 10
        while not lone_head.reports:
            assert time.monotonic() < end
            lone_head.receive(0.05)
        assert not lone_head.has_strangers


def test_missing_nodes_have_room_of_their_own(placement, lone_head, monkeypatch):
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    calling = [stranger(placement) for _ in range(5)]
    lone_head.receive(missing=4)
    for connection in calling:
        connection.sendall(line(placement))
        until(lone_head, missing=4)
        connection.close()


def test_head_without_descriptors_goes_on_and_does_not_spin(placement, lone_head, monkeypatch):
    monkeypatch.setattr(server, "PAUSE_S", 0.3)
    with kept_file_limit():
        node = stranger(placement)
        node.sendall(line(placement))
        free = os.dup(node.fileno())  # the next descriptor would be this one
        os.close(free)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        start_s = time.monotonic()
        assert lone_head.receive(10.0) == []
        assert 0.3 <= time.monotonic() - start_s < 5.0
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        until(lone_head)
        node.close()


@pytest.mark.parametrize("failure", [errno.ECONNABORTED, errno.EPROTO, errno.ENFILE, errno.ENOBUFS])
def test_failing_accept_costs_no_node_its_place(placement, monkeypatch, failure):
    failures = [failure] * 3
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise OSError(failures.pop(), "injected")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    end_run(meet(placement))
    assert failures == []


def test_node_calls_again_after_the_head_has_closed_its_connection(placement, secret):
    """The head closes the oldest callers when it runs out of descriptors or of room."""
    with squatting(placement) as listener:
        listener.settimeout(10)
        node = CallThread(placement, 1, secret=secret)
        for heard in (0, 1, 4096):
            connection, _ = listener.accept()
            connection.recv(heard)
            connection.close()
    end_run([CallThread(placement, 0, secret=secret).roll(), node.roll()])


def test_head_with_a_low_hard_limit_says_the_number_and_the_command():
    """The limit of a process that never was root; the text names the number and what to type."""
    placement = replace(head_placement(), nnodes=4096)

    def head(ready: Callable[[], None]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        with pytest.raises(NoPlan) as refused:
            gather.meet_nodes(placement, NodeInfo(host="head"), timeout_s=30, log=lambda _: None)
        error = refused.value
        needs = re.fullmatch(r"the head of 4096 nodes needs (\d+) open files; its limit is 1024", error.what)
        assert needs
        assert int(needs[1]) > 4096 + gather.AGENT_FILES
        assert error.where == "ulimit -Hn"
        typed = re.search(r"ulimit -n (\d+) ", error.hint)
        assert typed
        assert int(typed[1]) >= int(needs[1])
        ready()

    with attacker(head) as wait:
        wait()


def test_limit_is_raised_to_what_the_nodes_need():
    with kept_file_limit() as before:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        gather.raise_file_limit(hard - 600)
        assert hard - 600 + MAX_STRANGERS < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before


def test_node_of_a_run_that_sends_rubbish_is_lost(placement, secret):
    rolls = meet(replace(placement, nnodes=3), secret=secret)
    head = rolls[0]
    rolls[1]._connection.send_line(b"[" * 2048)
    assert hear([head, rolls[2]], lambda _: bool(head.lost)) == [[], []]
    assert head.lost == {1: "it sent something other than a message of imgkit's roll call"}
    close(rolls)


def test_node_that_repeats_itself_is_passed_on_once(placement):
    """A stranger may be a node of an open start; it fills neither the head's memory nor the others' links."""
    rolls = meet(replace(placement, nnodes=3))
    head = rolls[0]
    failure = RankFailure(rank=1, code=7, age_ms=0, after_peer=False, log="")
    for number in range(50):
        rolls[1].report(MeasureResult(stage=number))
        rolls[1].report(messages.StopOrder(reason="USR1"))
        rolls[1].report(AttemptEnded(code=7, failure=failure))
    once = [messages.StopOrder(node="node 2 of 3 (as07r3b13)", reason="USR1")]
    assert hear([head, rolls[2]], lambda _: head.measurements.get(1) == MeasureResult(stage=49)) == [
        once,
        once,
    ]
    assert hear([head, rolls[2]], lambda _: False, within_s=0.1) == [[], []]
    assert (len(head.measurements), len(head.failures)) == (1, 1)
    close(rolls)


@pytest.fixture
def lone_head(placement: Placement) -> Iterator[Server]:
    """The server of a head that does nothing else."""
    listener = ports.listen(job_port(placement.job_id))
    head = Server(listener, job_id=placement.job_id, log=lambda _: None)
    yield head
    head.close(0.0)


def line(placement: Placement) -> bytes:
    """The call of node 1."""
    request = JoinRequest(job=placement.job_id, node_rank=1, nnodes=2, node=NodeInfo(host="a"))
    return messages.encode(request) + b"\n"


def until(head: Server, missing: int = 0, within_s: float = 10.0) -> None:
    """Wait until one node has called."""
    end = time.monotonic() + within_s
    while not head.joining:
        assert time.monotonic() < end
        head.receive(0.05, missing=missing)
    head.joining.pop()[0].close()
