"""Every line of another node becomes a checked message, or an error that closes the connection."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollcall_nodes import head_placement

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, join, messages, ports, probe, session
from imgkit_entrypoints.rollcall.connection import Connection, Handshake
from imgkit_entrypoints.rollcall.messages import (
    AttemptEnded,
    AttemptStart,
    EndAttempt,
    EndRun,
    Event,
    GpuUse,
    Heartbeat,
    JoinRequest,
    MeasureRequest,
    MeasureResult,
    Message,
    NodeInfo,
    PreflightEnd,
    ProbeFailure,
    ProbePort,
    ProbeReport,
    ProbeRequest,
    RankFailure,
    Refused,
    RunStart,
    Software,
    StopOrder,
)
from imgkit_entrypoints.rollcall.server import HeadConnection, Server
from imgkit_entrypoints.rollcall.session import HeadSession, MemberSession
from imgkit_entrypoints.terminal import escape_controls

OFFER = ProbePort(address="10.0.0.1", interface="eth0", port=40001)
REQUEST = JoinRequest(
    job="4711",
    node_rank=1,
    nnodes=2,
    node=NodeInfo(host="as07r3b13", software=Software(image="a", torch="2.13", nccl="2.27"), gpu="H100"),
    probe=OFFER,
)
FAILURE = ProbeFailure(target=0, size=2000, arrived=1400, packet=1500, reason="late")
FROM_NODE: tuple[Message, ...] = (
    REQUEST,
    Heartbeat(positions=(-1, 2**62)),
    Heartbeat(),
    Heartbeat(phase="rendezvous"),
    AttemptEnded(code=85),
    AttemptEnded(code=1, attempt=3, position=2**62),
    AttemptEnded(code=129, position=-1),
    AttemptEnded(code=1, failure=RankFailure(rank=3, code=-11, age_ms=7, after_peer=False, log="/a/b.log")),
    AttemptEnded(
        code=1,
        failure=RankFailure(rank=None, code=1, age_ms=0, after_peer=True, log="", lines=("a", "  b: c")),
    ),
    StopOrder(reason="SIGUSR1", requeue=True),
    ProbeReport(failures=(FAILURE,), is_crowded=True),
    MeasureResult(stage=0, figures=(("matmul", 1.5), ("disk", 0.0)), failed=("gpus: 0",), notes=("old",)),
    MeasureResult(stage=3, error="no answer", mute=True),
)
START = RunStart(nnodes=2, node_rank=1)
FROM_HEAD: tuple[Message, ...] = (
    Heartbeat(positions=(3, 5)),
    START,
    AttemptStart(attempt=2, nnodes=16, node_rank=15, port=15002),
    AttemptStart(attempt=2, nnodes=1, node_rank=None, port=15002),
    EndAttempt(attempt=2, reason="lost node 1 of 17"),
    Refused(what="no", where="a:1", hint="b"),
    ProbeRequest(targets=((1, OFFER), (2, OFFER))),
    StopOrder(node="node 1 of 2", reason="SIGTERM", requeue=False),
    EndRun(code=85),
    MeasureRequest(stage=0, limit_s=22, group=(3,)),
    MeasureRequest(stage=2, limit_s=6, group=(0, 3), store=40001),
    PreflightEnd(left_out=(2, 5)),
    PreflightEnd(left_out=()),
)
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 256, 65536, 2**63, 2**64, 10**300, float("inf"), float("nan"),
    "", "x", "²", "1", "x" * 5000, "\x1b[2J", "\u202e", "\ud800", "\x00", "EndRun", "Heartbeat",
    [], [1], [1, 2, 3], [[]], [{}], [None] * 300, [[[[[[[[]]]]]]]], {}, {"type": "Heartbeat"}, {"node": 1},
)  # fmt: skip
RAW = (
    b"", b"[" * 2048, b"{" * 3000, b'{"a":' * 1000, b"\xff\xfe{", b"null", b"1" * 5000, b"\x00", b"{}", b"[]",
    b'{"type": "AttemptEnded", "code": 1e999}', b'"\\ud800"', b"\xef\xbb\xbf{}", b"x" * 70_000,
    b'{"type": "Heartbeat", "positions": [1e5, 2]}', b"imgkit-join 1 " + b"0" * 32,
    b'{"type": "AttemptEnded", "code": 1, "code": 2}', b'{"type": "RunStart"}', b'{"type": ["EndRun"]}',
    b'{"type": {"a": 1}}', b'{"type": "Message"}',
)  # fmt: skip


def changed(message: Message, **values: object) -> bytes:
    """Return the line of a message in which some fields have other values; `...` leaves a field out."""
    fields = {**json.loads(messages.encode(message)), **values}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


@pytest.mark.parametrize("message", [*FROM_NODE, *FROM_HEAD], ids=str)
def test_message_arrives_as_it_was(message):
    assert messages.decode(messages.encode(message)) == message


def test_unknown_field_and_left_out_default_are_no_fault():
    assert messages.decode(changed(REQUEST, probe=..., later="x")) == dataclasses.replace(REQUEST, probe=None)


MEASUREMENT = MeasureResult(stage=0)
FAILED = RankFailure(rank=0, code=1, age_ms=0, after_peer=False, log="", lines=("a",))
ORDER = AttemptStart(attempt=2, nnodes=16, node_rank=15, port=15002)
MEASURE = MeasureRequest(stage=2, limit_s=6, group=(0, 3), store=40001)


@pytest.mark.parametrize(
    "line",
    [
        *RAW,
        *(changed(Heartbeat(), positions=value) for value in (1, [1], [1, 2, 3], [True, 2], [1, 2**64], "x")),
        changed(Heartbeat(), phase="asleep"),
        *(changed(AttemptEnded(code=0), code=value) for value in ("x", 256, -1, True, None, ..., 1.0)),
        *(changed(AttemptEnded(code=0), attempt=value) for value in (0, None, 1 << 21)),
        changed(AttemptEnded(code=0), position=-2),
        changed(AttemptEnded(code=0), failure={}),
        changed(StopOrder(reason="x"), reason=None),
        changed(StopOrder(reason="x"), requeue=1),
        changed(ProbeReport(failures=()), failures={}),
        changed(ProbeReport(failures=()), failures=[{"target": "far"}]),
        *(
            changed(MEASUREMENT, figures=value)
            for value in ([["a", None]], [["a", "1"]], [["a"]], [["a", 1e99]])
        ),
        changed(MEASUREMENT, failed=[1]),
        changed(MEASUREMENT, notes=["x"] * 33),
        changed(MEASUREMENT, error="x" * 1001),
        changed(MEASUREMENT, stage=-1),
        changed(MEASUREMENT, mute="1"),
        *(changed(REQUEST, node_rank=value) for value in (1.0, -1, 1 << 21, None, ...)),
        changed(REQUEST, nnodes=0),
        changed(REQUEST, node={"host": "a", "software": 1}),
        changed(REQUEST, node={"host": "a" * 256}),
        *(changed(START, node_rank=value) for value in (0, 2, None)),
        *(changed(ORDER, node_rank=value) for value in (0, 16, "1")),
        changed(ORDER, port=65536),
        changed(EndRun(code=0), code=256),
        changed(MEASURE, limit_s=601),
    ],
)
def test_other_line_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        messages.decode(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", -1), ("code", 256), ("code", None), ("age_ms", -1), ("after_peer", 0), ("lines", ["x"] * 201),
     ("log", None)],
)  # fmt: skip
def test_failure_out_of_range_is_refused(field, value):
    line = changed(AttemptEnded(code=1), failure={**dataclasses.asdict(FAILED), field: value})
    with pytest.raises(ValueError, match=rf"^AttemptEnded\.failure\.{field}\b"):
        messages.decode(line)


@pytest.mark.parametrize(
    ("message", "field", "low", "high"),
    [
        (REQUEST, "node_rank", 0, 1 << 20),
        (REQUEST, "nnodes", 1, 1 << 20),
        (AttemptEnded(code=0), "code", 0, 255),
        (AttemptEnded(code=0), "attempt", 1, 1 << 20),
        (AttemptEnded(code=0), "position", -1, 1 << 63),
        (GpuUse(readings=1, gpu_percent=0.0, memory_MiB=0.0), "readings", 1, 1 << 63),
        (EndRun(code=0), "code", 0, 255),
        (ORDER, "node_rank", 1, 15),
        (ORDER, "port", 1, 65535),
        (ORDER, "second_port", 1, 65535),
        (ORDER, "world_size", 0, 1 << 28),
        (RunStart(nnodes=9, node_rank=1), "node_rank", 1, 8),
        (START, "host_index", 0, 1 << 20),
        (MEASURE, "stage", 0, 1 << 20),
        (MEASURE, "limit_s", 1, 600),
        (MEASURE, "store", 0, 65535),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_numbers_are_accepted_up_to_their_limits(message, field, low, high):
    for value in (low, high):
        assert getattr(messages.decode(changed(message, **{field: value})), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=field):
            messages.decode(changed(message, **{field: value}))


@pytest.mark.parametrize(
    ("message", "field", "item", "most"),
    [
        (ProbeReport(failures=()), "failures", dataclasses.asdict(FAILURE), 1024),
        (ProbeRequest(targets=()), "targets", [1, dataclasses.asdict(OFFER)], 8),
        (MEASUREMENT, "figures", ["matmul", 1.5], 32),
        (MEASUREMENT, "failed", "x" * 1000, 32),
    ],
    ids=["failures", "targets", "figures", "failed"],
)
def test_lists_are_accepted_up_to_their_limits(message, field, item, most):
    assert len(getattr(messages.decode(changed(message, **{field: [item] * most})), field)) == most
    with pytest.raises(ValueError, match=field):
        messages.decode(changed(message, **{field: [item] * (most + 1)}))


def test_left_out_fields_have_these_values():
    """Another version of imgkit relies on them."""
    assert dataclasses.asdict(NodeInfo(host="a")) == {
        "host": "a",
        "software": {"image": "", "torch": "", "nccl": ""},
        "nproc": 1,
        "gpu": "",
        "address": "",
        "interface": "",
    }
    assert (START.host_index, ORDER.second_port, ORDER.head, ORDER.token, ORDER.world_size) == (
        0,
        1,
        "",
        "",
        0,
    )
    assert (Heartbeat().phase, AttemptEnded(code=0).attempt, StopOrder(reason="").requeue) == ("", 1, True)
    flags = (FAILED.is_command, ProbeReport(failures=()).is_crowded, MEASUREMENT.mute)
    assert flags == (False, False, False)
    assert MeasureRequest(stage=0, limit_s=1, group=()).store == 0


def test_line_of_another_node_cannot_steer_a_terminal():
    bad, escaped = (
        AttemptEnded(code=1, failure=dataclasses.replace(FAILED, lines=(line,)))
        for line in ("\x1b[2J\u202e", "\\x1b[2J\\u202e")
    )
    assert messages.decode(messages.encode(bad)) == escaped


def test_message_of_the_other_side_is_ignored():
    """A node cannot command the head, and the head reports nothing to a node."""
    placement = head_placement()
    for message in FROM_HEAD:
        head = HeadSession(placement, 1)
        head._handle(1, message)
        if not isinstance(message, StopOrder | Heartbeat):
            assert head.poll() == []
    peer, sock = socket.socketpair()
    member = MemberSession(dataclasses.replace(placement, node_rank=1), Connection(sock))
    with peer, contextlib.closing(member):
        for message in FROM_NODE:
            if not isinstance(message, StopOrder):
                peer.sendall(messages.encode(message) + b"\n")
        assert member.poll() == []


@pytest.mark.parametrize("field", ["address", "interface"])
@pytest.mark.parametrize("value", ["$(id)", "eth0; id", "`id`", "a b", "\n"])
def test_offer_with_a_command_in_it_is_refused(field, value):
    offer = {**json.loads(messages.encode(REQUEST))["probe"], field: value}
    with pytest.raises(ValueError, match=rf"JoinRequest\.probe\.{field}: .* is not an "):
        messages.decode(changed(REQUEST, probe=offer))


def test_refusal_of_many_different_nodes_fits_into_a_line():
    placement = dataclasses.replace(head_placement(), nnodes=4096)
    nodes = {
        rank: NodeInfo(host=f"host{rank}", software=Software(torch=f"{rank}" * 40)) for rank in range(4096)
    }
    with pytest.raises(NoPlan) as caught:
        gather.compare_software(placement, nodes)
    assert "and 4088 more" in caught.value.what
    assert len(messages.encode(messages.Refused.from_error(caught.value))) < 4096


def mutated(chance: random.Random, valid: tuple[Message, ...]) -> bytes:
    """A line that is nearly a message."""
    kind = chance.random()
    if kind < 0.1:
        return chance.choice(RAW)
    line = messages.encode(chance.choice(valid))
    if kind < 0.35:
        changed = bytearray(line)
        for _ in range(chance.randint(1, 4)):
            position = chance.randrange(len(changed))
            changed[position : position + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
        return bytes(changed).replace(b"\n", b" ")
    document = json.loads(line)
    for _ in range(chance.randint(1, 2)):
        items = list(walk_items(document))
        holder, key = chance.choice(items)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(chance.choice(NASTY))
        if not document:
            break
    return json.dumps(document).encode()


def walk_items(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value inside a JSON value."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        yield container, key
        if isinstance(value, dict | list):
            yield from walk_items(value)


class Fuzzed:
    """A head, a node in the session, a node that waits for the start, and a head that gathers."""

    def __init__(self, stack: contextlib.ExitStack, *, secret: bytes | None) -> None:
        self.placement, self.secret = head_placement(), secret
        self.server = Server()
        self.head = HeadSession(
            self.placement, 1, server=self.server, nodes={0: NodeInfo(host="a"), 1: NodeInfo(host="b")}
        )
        self.listener = ports.listen(0)
        self.open_port = stack.enter_context(probe.open_port("", ""))
        self.member_placement = dataclasses.replace(self.placement, node_rank=1)
        self.gathering = self.new_gathering()
        self.targets: tuple[tuple[Callable[[bytes], None], Any], ...] = (
            (self.to_head, FROM_NODE),
            (self.to_member, FROM_HEAD),
            (self.to_joining, FROM_HEAD),
            (self.to_gathering, FROM_NODE),
        )

    def meeting(self, placement: Any) -> join.RollCall:
        """What one node knows of the roll call."""
        return join.RollCall(placement, REQUEST.node, self.open_port, 60.0, self.log, str, self.secret)

    def new_gathering(self) -> gather._RollCallHead:
        """A head in its roll call, on the same listener."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ports, "listen", lambda *_, **__: self.listener.dup())
            return gather._RollCallHead(self.meeting(self.placement))

    def log(self, text: str) -> None:
        """Take a line of the log."""
        assert escape_controls(text) == text

    def check(self, events: list[Event]) -> None:
        """Check that the texts of events print well."""
        for event in events:
            for value in (repr(event), *dataclasses.asdict(event).values()):
                assert not isinstance(value, str) or escape_controls(value) == value

    def to_head(self, line: bytes) -> None:
        """Send a line of a node to a head in the session."""
        peer, sock = socket.socketpair()
        self.server.add_node(1, HeadConnection(sock, ""))
        self.head.reports.clear()
        with peer:
            peer.sendall(line + b"\n")
            self.check(self.head.poll())
        self.head.poll()
        assert 1 not in self.server

    def to_member(self, line: bytes) -> None:
        """Send a line of the head to a node in the session."""
        peer, sock = socket.socketpair()
        connection = Connection(sock)
        with peer:
            peer.sendall(line + b"\n")
            self.check(MemberSession(self.member_placement, connection).poll())
        connection.close()

    def to_joining(self, line: bytes) -> None:
        """Send a line of the head to a node that waits for the start."""
        peer, sock = socket.socketpair()
        connection = Connection(sock)
        with peer:
            peer.sendall(line + b"\n")
            peer.shutdown(socket.SHUT_WR)
            try:
                join._wait_for_start(self.meeting(self.member_placement), connection, 1e12)
            except NoPlan as refused:
                self.log(str(refused).replace("\n", ""))
        connection.close()

    def to_gathering(self, line: bytes) -> None:
        """Send a line to a head in the roll call, as the first one or after a proof."""
        placement, head = self.placement, self.gathering
        line = line.replace(b'"4711"', json.dumps(placement.job_id).encode())
        with socket.create_connection(self.listener.getsockname()[:2], timeout=5) as peer:
            if self.secret is not None:
                handshake = Handshake(secret=self.secret, job_id=placement.job_id, node_rank=1)
                peer.sendall(handshake.opening + b"\n")
                head._receive_requests()
                head._receive_requests()
                confirmed = handshake.confirm(peer.recv(4096).rstrip(b"\n"))
                line = confirmed.sign(line)
            with contextlib.suppress(ConnectionError):
                peer.sendall(line + b"\n")
            try:
                head._receive_requests()
                head._receive_requests()
            except NoPlan as refused:
                self.log(str(refused).replace("\n", ""))
        if len(head.nodes) > 1 or -1 in head.server or 1 in head.server:
            head.server.close(0.0)
            self.gathering = self.new_gathering()


def fuzz(lines: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send mutated lines everywhere; nothing raises."""
    monkeypatch.setattr(gather, "CHECK_S", 0.0)
    monkeypatch.setattr(join, "RETRY_S", 0.0)
    monkeypatch.setattr(session, "BEAT_S", 60.0)
    monkeypatch.setattr(session, "LINGER_S", 0.0)
    monkeypatch.setattr(probe, "probe_targets", lambda *_: [])  # it would connect to the fuzzed addresses
    chance = random.Random(seed)  # noqa: S311
    for secret in (None, os.urandom(32)):
        with contextlib.ExitStack() as stack:
            fuzzed = Fuzzed(stack, secret=secret)
            for _ in range(lines // 2):
                ((send, valid),) = chance.choices(
                    fuzzed.targets, weights=(6, 6, 6, 1)
                )  # the last one is slow
                send(mutated(chance, valid))


def test_mutated_lines_end_in_no_exception(monkeypatch):
    fuzz(10_000, 13, monkeypatch)


@pytest.mark.soak
def test_million_mutated_lines_end_in_no_exception(monkeypatch):
    seed = random.randrange(1 << 32)  # noqa: S311
    print(f"seed {seed}")
    fuzz(1_000_000, seed, monkeypatch)
