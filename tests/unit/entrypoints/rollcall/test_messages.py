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
from rollcall_nodes import placement

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, messages, ports, probe, session
from imgkit_entrypoints.rollcall.gather import _Gathering, _Joining
from imgkit_entrypoints.rollcall.head_roll import HeadRoll, Links, Strangers
from imgkit_entrypoints.rollcall.link import HeadProof, Link, NodeProof
from imgkit_entrypoints.rollcall.messages import (
    AllDone,
    AttemptEnded,
    Beat,
    Call,
    Caller,
    EndAttempt,
    Failed,
    Failure,
    FromHead,
    FromNode,
    Go,
    Identity,
    Judged,
    Lost,
    Measure,
    Measured,
    NodeStop,
    Offer,
    Probed,
    ProbeOrder,
    RankFailure,
    Refused,
    Start,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import Event, MemberRoll
from imgkit_entrypoints.terminal import shown

OFFER = Offer(address="10.0.0.1", interface="eth0", ports=(40001, 40002))
CALL = Call(
    job="4711",
    node_rank=1,
    nnodes=2,
    caller=Caller(host="as07r3b13", identity=Identity(image="a", torch="2.13", nccl="2.27"), gpu="H100"),
    offer=OFFER,
)
FAILURE = Failure(source=1, target=0, port=40001, size=2000, arrived=1400, packet=1500, why="no answer")
FROM_NODE: tuple[FromNode, ...] = (
    CALL,
    Beat(span=(-1, 2**62)),
    Beat(),
    Beat(phase="rendezvous"),
    AttemptEnded(code=85),
    AttemptEnded(code=1, attempt=3, place=2**62),
    AttemptEnded(code=129, place=-1),
    AttemptEnded(code=1, failure=RankFailure(rank=3, code=-11, age_ms=7, after_peer=False, log="/a/b.log")),
    AttemptEnded(
        code=1,
        failure=RankFailure(rank=None, code=None, age_ms=0, after_peer=True, log="", lines=("a", "  b: c")),
    ),
    NodeStop(reason="SIGUSR1", requeue=True),
    Probed(failures=(FAILURE,), crowded=True),
    Measured(stage=0, figures=(("matmul", 1.5), ("disk", 0.0)), failed=("gpus: 0",), notes=("old",)),
    Measured(stage=3, error="no answer", mute=True),
)
FROM_HEAD: tuple[FromHead, ...] = (
    Beat(span=(3, 5)),
    Go(port=15001, warnings=("the nodes differ in GPU",), nnodes=2, node_rank=1),
    Go(port=15001, warnings=(), nnodes=3, node_rank=2, elastic=True),
    Start(attempt=2, nnodes=16, node_rank=15, port=15002),
    Start(attempt=2, nnodes=1, node_rank=None, port=15002),
    EndAttempt(attempt=2, why="lost node 1 of 17"),
    Refused(what="no", where="a:1", hint="b"),
    ProbeOrder(targets=((1, OFFER), (2, OFFER))),
    Lost(node="node 1 of 2", why="it closed the connection"),
    Failed(node="node 1 of 2", code=7),
    Failed(node="node 1 of 2", code=7, rank=3),
    Failed(node="node 0 of 2", code=1, head=True),
    StopOrder(node="node 1 of 2", reason="SIGTERM", requeue=False),
    AllDone(codes=(0, 85)),
    Measure(stage=0, kind="alone", mode="quick", limit_s=22, group=(3,)),
    Measure(stage=2, kind="pair", mode="full", limit_s=6, group=(0, 3), store=40001),
    Judged(left_out=(2, 5)),
    Judged(left_out=()),
)
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 256, 65536, 2**63, 2**64, 10**300, float("inf"), float("nan"),
    "", "x", "²", "1", "x" * 5000, "\x1b[2J", "\u202e", "\ud800", "\x00",
    [], [1], [1, 2, 3], [[]], [{}], [None] * 300, [[[[[[[[]]]]]]]], {}, {"beat": 1}, {"node": 1},
)  # fmt: skip
RAW = (
    b"", b"[" * 2048, b"{" * 3000, b'{"a":' * 1000, b"\xff\xfe{", b"null", b"1" * 5000, b"\x00",
    b'{"done": 1e999}', b'"\\ud800"', b"\xef\xbb\xbf{}", b'{"beat": [1e5, 2]}', b"x" * 70_000,
    b"imgkit-call 1 " + b"0" * 32, b'{"done": 1, "done": "x"}', b'{"go": {}}',
)  # fmt: skip


def measured(figures: str, *, stage: int = 0, failed: str = "[]", mute: str = "false") -> bytes:
    """The line of a stage of the preflight, from pieces of JSON."""
    rest = f'"failed": {failed}, "notes": [], "error": "", "mute": {mute}'
    return f'{{"measured": {{"stage": {stage}, "figures": {figures}, {rest}}}}}'.encode()


@pytest.mark.parametrize("message", FROM_NODE, ids=str)
def test_message_of_a_node_arrives_as_it_was(message: FromNode) -> None:
    caller = dataclasses.replace(CALL.caller, address="", interface="")  # the offer has them
    expected = dataclasses.replace(CALL, caller=caller) if message is CALL else message
    assert messages.from_node(messages.line(message)) == expected


@pytest.mark.parametrize("message", FROM_HEAD, ids=str)
def test_message_of_the_head_arrives_as_it_was(message: FromHead) -> None:
    assert messages.from_head(messages.line(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        *RAW,
        b'{"beat": 1}',
        b'{"beat": [1]}',
        b'{"beat": [1, 2, 3]}',
        b'{"beat": [true, 2]}',
        b'{"done": "x"}',
        b'{"done": 256}',
        b'{"done": true}',
        b'{"done": 0}',
        b'{"done": 0, "attempt": 0}',
        b'{"done": 0, "attempt": 1, "place": -2}',
        b'{"stop": null}',
        b'{"stop": "x", "requeue": 1}',
        b'{"probed": {}}',
        b'{"measured": {}}',
        measured('[["a", NaN]]'),
        measured('[["a", "1"]]'),
        measured('[["a"]]'),
        measured("[]", failed="[1]"),
        measured("[]", stage=-1),
        measured("[]", mute="1"),
        b'{"probed": [{"target": "far"}]}',
        b'{"node_rank": Infinity}',
        b'{"job": "a", "node_rank": 1.0, "nnodes": 2, "caller": {"host": "a", "identity": {}}}',
        b'{"job": "a", "node_rank": 1, "nnodes": 2, "caller": {"host": "a"}}',
    ],
)
def test_other_line_of_a_node_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages.from_node(line)


@pytest.mark.parametrize("field", ["address", "interface"])
@pytest.mark.parametrize("value", ["$(id)", "eth0; id", "`id`", "a b", "\n"])
def test_offer_with_a_command_in_it_is_refused(field: str, value: str) -> None:
    said = json.loads(messages.line(CALL))
    said["probe"][field] = value
    with pytest.raises(ValueError, match=r"missing|not an interface name"):
        messages.from_node(json.dumps(said).encode())


def test_refusal_of_many_different_nodes_fits_into_a_line() -> None:
    place = dataclasses.replace(placement(), nnodes=4096)
    callers = {
        rank: Caller(host=f"host{rank}", identity=Identity(torch=f"{rank}" * 40)) for rank in range(4096)
    }
    with pytest.raises(NoPlan) as found:
        gather.compare_software(place, callers)
    assert "and 4088 more" in found.value.what
    assert len(messages.line(gather._refusal(found.value))) < 4096


def test_codes_of_4096_nodes_fit_into_a_line() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Link(one, messages.from_node), Link(other, messages.from_head)
        sender.send(AllDone(codes=(255,) * 4096))
        assert receiver.receive() == [AllDone(codes=(255,) * 4096)]


def mutated(chance: random.Random, valid: tuple[FromNode, ...] | tuple[FromHead, ...]) -> bytes:
    """A line that is nearly a message."""
    kind = chance.random()
    if kind < 0.1:
        return chance.choice(RAW)
    line = messages.line(chance.choice(valid))
    if kind < 0.35:
        changed = bytearray(line)
        for _ in range(chance.randint(1, 4)):
            position = chance.randrange(len(changed))
            changed[position : position + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
        return bytes(changed).replace(b"\n", b" ")
    said = json.loads(line)
    for _ in range(chance.randint(1, 2)):
        spots = list(places(said))
        holder, key = chance.choice(spots)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(chance.choice(NASTY))
        if not said:
            break
    return json.dumps(said).encode()


def places(said: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: the container and its key."""
    for key, value in said.items() if isinstance(said, dict) else enumerate(said):
        yield said, key
        if isinstance(value, dict | list):
            yield from places(value)


class Fuzzed:
    """A head, a node in the session, a node that waits for the start, and a head that gathers."""

    def __init__(self, stack: contextlib.ExitStack, *, secret: bytes | None) -> None:
        self.place, self.secret = placement(), secret
        self.stack = stack
        room = Strangers(socket.create_server(("127.0.0.1", 0)), run="", secret=None, say=self.say)
        self.head = HeadRoll(self.place, 1, (), links=Links(), hosts={0: "a", 1: "b"}, strangers=room)
        self.listener = ports.listen(0)
        self.gathering = self.new_gathering()
        opened = stack.enter_context(probe.offering("", ""))
        self.joining = _Joining(
            dataclasses.replace(self.place, node_rank=1), CALL.caller, opened, 60.0, self.say, str, secret
        )
        self.targets: tuple[tuple[Callable[[bytes], None], Any], ...] = (
            (self.to_head, FROM_NODE),
            (self.to_member, FROM_HEAD),
            (self.to_joining, FROM_HEAD),
            (self.to_gathering, FROM_NODE),
        )

    def new_gathering(self) -> _Gathering:
        """A head in its roll call, on the same listener."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ports, "listen", lambda *_, **__: self.listener.dup())
            closed = probe.OpenPorts(None, ())
            return _Gathering(self.place, CALL.caller, closed, 60.0, self.say, str, self.secret)

    def say(self, text: str) -> None:
        """Take a line of the log."""
        assert shown(text) == text

    def pair(self, read: Callable[[bytes], Any]) -> tuple[socket.socket, Link[Any], Callable[[bytes], bytes]]:
        """A stranger's socket, our link to it, and what signs a line for it."""
        one, other = socket.socketpair()
        link: Link[Any] = Link(other, read)
        if self.secret is None:
            return one, link, bytes
        own = NodeProof(self.secret, "job", 1)
        head = HeadProof(self.secret, "job", own.call)
        link.seal(incoming=head.from_node, outgoing=head.from_head)
        seals = own.seals(head.answer)
        assert seals
        return one, link, seals[1].sign

    def check(self, events: list[Event]) -> None:
        """Check that the texts of events print well."""
        for event in events:
            assert shown(repr(event)) == repr(event)
            for value in dataclasses.asdict(event).values():
                assert not isinstance(value, str) or shown(value) == value

    def to_head(self, line: bytes) -> None:
        """Send a line of a node to a head in the session."""
        peer, link, sign = self.pair(messages.from_node)
        self.head._links.add(1, link)
        self.head.reports.clear()
        with peer:
            peer.sendall(sign(line) + b"\n")
            self.check(self.head.tick())
        if 1 in self.head._links:
            self.head._links.drop(1)

    def to_member(self, line: bytes) -> None:
        """Send a line of the head to a node in the session."""
        peer, link, sign = self.pair(messages.from_head)
        roll = MemberRoll(self.joining.place, 1, (), link=link, unread=())
        with peer:
            peer.sendall(sign(line) + b"\n")
            self.check(roll.tick())
        link.close()

    def to_joining(self, line: bytes) -> None:
        """Send a line of the head to a node that waits for the start."""
        peer, link, sign = self.pair(messages.from_head)
        with peer:
            peer.sendall(sign(line) + b"\n")
            peer.shutdown(socket.SHUT_WR)
            try:
                self.joining._await_go(link)
            except NoPlan as refused:
                self.say(str(refused).replace("\n", ""))
        link.close()

    def to_gathering(self, line: bytes) -> None:
        """Send a line to a head in the roll call, as the first one or after a proof."""
        place, run = self.place, self.gathering
        with socket.create_connection(self.listener.getsockname()[:2], timeout=5) as peer:
            if self.secret is not None:
                own = NodeProof(self.secret, place.job_id, 1)
                peer.sendall(own.call + b"\n")
                run._hear()
                run._hear()
                seals = own.seals(peer.recv(4096).rstrip(b"\n"))
                assert seals
                line = seals[1].sign(line)
            with contextlib.suppress(ConnectionError):
                peer.sendall(line.replace(b'"4711"', json.dumps(place.job_id).encode()) + b"\n")
            try:
                run._hear()
                run._hear()
            except NoPlan as refused:
                self.say(str(refused).replace("\n", ""))
        if len(run.callers) > 1 or run.links.values():
            run.links.close(0.0)
            run.strangers.close()
            self.gathering = self.new_gathering()


def fuzz(lines: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send mutated lines everywhere; nothing raises."""
    monkeypatch.setattr(gather, "LOOK_S", 0.0)
    monkeypatch.setattr(gather, "RETRY_S", 0.0)
    monkeypatch.setattr(session, "BEAT_S", 60.0)
    monkeypatch.setattr(probe, "attempt", lambda *_: ())  # it would connect to the fuzzed addresses
    chance = random.Random(seed)  # noqa: S311
    for secret in (None, os.urandom(32)):
        with contextlib.ExitStack() as stack:
            fuzzed = Fuzzed(stack, secret=secret)
            for _ in range(lines // 2):
                ((send, valid),) = chance.choices(
                    fuzzed.targets, weights=(6, 6, 6, 1)
                )  # the last one is slow
                send(mutated(chance, valid))


def test_mutated_lines_end_in_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(10_000, 13, monkeypatch)


@pytest.mark.soak
def test_million_mutated_lines_end_in_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)  # noqa: S311
    print(f"seed {seed}")
    fuzz(1_000_000, seed, monkeypatch)
