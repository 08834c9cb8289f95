"""The messages between a node and the head: dataclasses, written and read as one JSON object a line.

`encode`, `from_node` and `from_head` work by the fields of the dataclasses: a field's annotation says what a
value may be, and a missing field has its default. Code behind `from_node` and `from_head` may trust a
message: type, range and length of each field are checked, and control characters in texts are escaped.
Unknown fields are ignored, since another image may hold another version of imgkit.
"""

from __future__ import annotations

import functools
import json
import re
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.json_text import ValueRule
from imgkit_entrypoints.terminal import shown

# Stages of the preflight: each node alone, pairs, all nodes together.
KINDS = ("alone", "pair", "all")
# How long the preflight measures.
MODES = ("quick", "full")
# How far torchrun of a node is: not yet in its rendezvous, in it, past it, or all its ranks try to connect.
PHASES = STARTING, RENDEZVOUS, WORKERS, CONNECTING = ("", "rendezvous", "workers", "connecting")
# More nodes, and more attempts, than any run has.
MAX_NODES = 1 << 20
MAX_STAGE_S = 600
# Lines of a traceback, and characters of each.
LINES, LINE = 200, 1000
# The watchdog counts in 64 bits.
_MAX_COUNT = 1 << 63


def _between(low: int, high: int) -> ValueRule:
    """Return the rule for a number, or for the length of a text or list."""

    def check(value: Any) -> Any:
        if not low <= (value if isinstance(value, int | float) else len(value)) <= high:
            raise ValueError(f"a value is not between {low} and {high}")
        return value

    return ValueRule(check)


def _one_of(*allowed: str) -> ValueRule:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"a value is none of {', '.join(allowed)}")
        return value

    return ValueRule(check)


def _ip_address(value: str) -> str:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in value else socket.AF_INET, value)
    except (OSError, ValueError):
        raise ValueError("a value is not an IP address") from None
    return value


def _interface(value: str) -> str:
    if not re.fullmatch(r"[\w.:@-]{0,32}", value, re.ASCII):
        raise ValueError("a value is not an interface name")
    return value


NodeRank = Annotated[int, _between(0, MAX_NODES)]
OtherRank = Annotated[int, _between(1, MAX_NODES)]
"""Node rank of any node but the head."""
NodeCount = Annotated[int, _between(1, MAX_NODES)]
Attempt = Annotated[int, _between(1, MAX_NODES)]
Rank = Annotated[int, _between(0, MAX_NODES << 8)]
ExitCode = Annotated[int, _between(0, 255)]
Port = Annotated[int, _between(1, 65535)]
ByteCount = Annotated[int, _between(0, 1 << 31)]
Position = Annotated[int, _between(-_MAX_COUNT, _MAX_COUNT)]
Positions = tuple[Position, Position]
"""Positions of the slowest and of the furthest worker, as the watchdog counts them."""
Figure = Annotated[float, _between(-_MAX_COUNT, _MAX_COUNT)]
Text = Annotated[str, ValueRule(shown)]
Name = Annotated[str, _between(0, 255), ValueRule(shown)]
Line = Annotated[str, _between(0, LINE), ValueRule(shown)]
Remarks = Annotated[tuple[Line, ...], _between(0, 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The software that must be the same on every node; an empty string means "none"."""

    image: Name = ""
    torch: Name = ""
    nccl: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A node's own description."""

    host: Name
    software: Software = Software()
    nproc: Annotated[int, _between(0, MAX_NODES)] = 1
    """Like `gpu`, it may differ between nodes; a difference is reported, never refused."""
    gpu: Name = ""
    address: Name = ""
    """Address that carries the data between nodes; empty: the network to this node is not tested."""
    interface: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePorts:
    """The ports that a node has opened for the test of the network. Hints with commands name them."""

    address: Annotated[str, ValueRule(_ip_address)]
    interface: Annotated[str, ValueRule(_interface)]
    ports: Annotated[tuple[Port, ...], _between(0, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailure:
    """A connection or a burst of the network test that failed."""

    source: NodeRank
    target: NodeRank
    port: Port
    size: ByteCount
    """Bytes of the burst that did not arrive; 0: there was no connection."""
    arrived: ByteCount
    """Bytes of the largest burst that arrived."""
    packet: ByteCount
    """Bytes of the largest packet on the way, headers included."""
    reason: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The first message of a node."""

    job: Text
    node_rank: NodeRank
    nnodes: NodeCount
    node: NodeInfo
    probe: ProbePorts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life."""

    positions: Positions | None = None
    """Of the sender's workers; from the head, of all workers."""
    phase: Annotated[str, _one_of(*PHASES)] = STARTING
    """Of torchrun, from a node to the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a node found in the test of the network."""

    failures: Annotated[tuple[ProbeFailure, ...], _between(0, 1024)]
    is_crowded: bool = False
    """Strangers have connected to this node's ports: a failed test of them proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a worker has ended, as a node reports it to the head (launch/failures.py)."""

    rank: Rank | None
    """None: torchrun itself."""
    code: Annotated[int, _between(-64, 255)] | None
    """Exit code; negative: the signal that ended it; None: torchrun did not report it."""
    age_ms: Annotated[int, _between(0, _MAX_COUNT)]
    """Time since then."""
    after_peer: bool
    """It has ended because another rank had."""
    log: Line
    """The full log of its node."""
    lines: Annotated[tuple[Line, ...], _between(0, LINES)] = ()
    """Its traceback or message; empty: it left none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt is over on the sending node."""

    code: ExitCode
    attempt: Attempt = 1
    position: Annotated[int, _between(-1, _MAX_COUNT)] | None = None
    """Furthest position of a worker of this node (launch/watchdog.py); None: no worker notes its position."""
    failure: RankFailure | None = None
    """The worker of this node that failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The head refuses this node, or the whole run; the fields are those of an ImgkitError."""

    what: Text
    where: Text | None = None
    hint: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The head asks a node to test the network to `targets`: node ranks with their ports."""

    targets: Annotated[tuple[tuple[NodeRank, ProbePorts], ...], _between(0, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """All nodes have joined: start."""

    port: Port
    warnings: tuple[Text, ...]
    nnodes: NodeCount
    """Nodes that start."""
    node_rank: OtherRank
    """Node rank of the receiving node among them."""
    can_restart: bool = False
    """The head starts each attempt by `AttemptStart`; False: the one attempt, with all nodes, starts now."""

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError("node_rank is not below nnodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """The next attempt starts."""

    attempt: Attempt
    nnodes: NodeCount
    """Nodes that take part."""
    node_rank: OtherRank | None
    """The receiving node's rank among them, 0 on the head alone; None: it waits as a spare."""
    port: Port
    """Torchrun's port on the head."""

    def __post_init__(self) -> None:
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise ValueError("node_rank is not below nnodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """The attempt has failed: end its workers at once, they could save nothing together."""

    attempt: Attempt
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone, and has not said why."""

    node: Text
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """A node has ended with a code that is neither 0 nor 85."""

    node: Text
    code: ExitCode
    rank: Rank | None = None
    """The rank that failed first on this node, if it is known."""
    is_head: bool = False
    """The head itself has failed, and leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """A node was asked to stop, so all are."""

    reason: Text
    requeue: bool = True
    """The run is to go on later; False: a person wants it to stay ended."""
    node: Text = ""
    """The node that was asked; the head fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllDone:
    """All nodes are done."""

    codes: tuple[ExitCode, ...]
    """Exit codes by node rank; empty if the head has failed and left, since only the head knows them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """The head asks a node for one stage of the preflight."""

    stage: NodeRank
    """Number of the stage."""
    kind: Annotated[str, _one_of(*KINDS)]
    mode: Annotated[str, _one_of(*MODES)]
    limit_s: Annotated[int, _between(1, MAX_STAGE_S)]
    group: tuple[NodeRank, ...]
    """Node ranks that measure together, the receiver's among them."""
    store: Annotated[int, _between(0, 65535)] = 0
    """Port on the head where they meet; 0: the node measures alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureResult:
    """What a node has measured in one stage of the preflight."""

    stage: NodeRank
    figures: Annotated[tuple[tuple[Name, Figure], ...], _between(0, 32)] = ()
    """Names and values; a value is a float, as another node accepts no integer for it."""
    failed: Remarks = ()
    """Checks that failed."""
    notes: Remarks = ()
    error: Line = ""
    """Why there are no figures."""
    mute: bool = False
    """The measuring process did not answer at all; with a partner that hangs, it says so in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightEnd:
    """The preflight is over, and the run goes on."""

    left_out: tuple[NodeRank, ...]
    """Node ranks that take no part in it."""


Event = (
    AttemptStart
    | EndAttempt
    | NodeLost
    | NodeFailed
    | StopOrder
    | AllDone
    | MeasureRequest
    | PreflightEnd
    | Refused
)
"""Messages of the head that a node agent reacts to, or the same on the head itself."""
FromNode = JoinRequest | Heartbeat | ProbeReport | AttemptEnded | StopOrder | MeasureResult
FromHead = Event | Heartbeat | ProbeRequest | RunStart
Message = FromNode | FromHead

_FROM_NODE = {message.__name__: message for message in typing.get_args(FromNode)}
_FROM_HEAD = {message.__name__: message for message in typing.get_args(FromHead)}


def encode(message: Message) -> bytes:
    """Return `message` as one line of JSON, without the line feed."""
    return _ENCODER.encode({"type": type(message).__name__, **_values(message)}).encode()


def _values(message: Any) -> dict[str, Any]:
    # dataclasses.asdict would copy each value.
    return {name: getattr(message, name) for name in message.__slots__}


_ENCODER = json.JSONEncoder(default=_values)


# Nodes in step send the same heartbeat, and a hit costs a tenth.
@functools.lru_cache(maxsize=64)
def from_node(line: bytes) -> FromNode:
    """Return the message in a line that a node sent to the head.

    Raises
    ------
    ValueError : it is no such message.
    """
    message: FromNode = _decode(line, _FROM_NODE)
    return message


def from_head(line: bytes) -> FromHead:
    """Return the message in a line that the head sent to a node.

    Raises
    ------
    ValueError : it is no such message.
    """
    message: FromHead = _decode(line, _FROM_HEAD)
    return message


def _decode(line: bytes, types: Mapping[str, Any]) -> Any:
    values = json_text.parse(line)
    name = values.get("type") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in types:
        raise ValueError("it is no message")
    return json_text.read(types[name], values, name)
