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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.terminal import shown

KINDS = ("alone", "pair", "all")
"""Stages of the preflight: each node alone, pairs, all nodes together."""
MODES = ("quick", "full")
"""How long the preflight measures."""
PHASES = STARTING, RENDEZVOUS, WORKERS, CONNECTING = ("", "rendezvous", "workers", "connecting")
"""How far torchrun of a node is: not yet in its rendezvous, in it, or past it."""
MAX_NODES = 1 << 20
"""More nodes, and more attempts, than any run has."""
MAX_STAGE_S = 600
LINES, LINE = 200, 1000
"""Lines of a traceback, and characters of each."""
_MAX_COUNT = 1 << 63
"""The watchdog counts in 64 bits."""


def _between(low: int, high: int) -> Callable[[Any], None]:
    """Return a check of a number, or of the length of a text or list."""

    def check(value: Any) -> None:
        if not low <= (value if isinstance(value, int | float) else len(value)) <= high:
            raise ValueError(f"a value is not between {low} and {high}")

    return check


def _one_of(*allowed: str) -> Callable[[str], None]:
    def check(value: str) -> None:
        if value not in allowed:
            raise ValueError(f"a value is none of {', '.join(allowed)}")

    return check


def _check_address(value: str) -> None:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in value else socket.AF_INET, value)
    except (OSError, ValueError):
        raise ValueError("a value is not an IP address") from None


def _check_interface(value: str) -> None:
    if not re.fullmatch(r"[\w.:@-]{0,32}", value, re.ASCII):
        raise ValueError("a value is not an interface name")


NodeRank = Annotated[int, _between(0, MAX_NODES)]
OtherRank = Annotated[int, _between(1, MAX_NODES)]
"""Node rank of any node but the head."""
NodeCount = Annotated[int, _between(1, MAX_NODES)]
Attempt = Annotated[int, _between(1, MAX_NODES)]
ExitCode = Annotated[int, _between(0, 255)]
Port = Annotated[int, _between(1, 65535)]
ByteCount = Annotated[int, _between(0, 1 << 31)]
Name = Annotated[str, _between(0, 255)]
Line = Annotated[str, _between(0, LINE)]
Remarks = Annotated[tuple[Line, ...], _between(0, 32)]
Rank = Annotated[int, _between(0, MAX_NODES << 8)]
Position = Annotated[int, _between(-_MAX_COUNT, _MAX_COUNT)]
Figure = Annotated[float, _between(-_MAX_COUNT, _MAX_COUNT)]
Positions = tuple[Position, Position]
"""Positions of the slowest and of the furthest worker, as the watchdog counts them."""


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

    address: Annotated[str, _check_address]
    interface: Annotated[str, _check_interface]
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

    job: str
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

    what: str
    where: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The head asks a node to test the network to `targets`: node ranks with their ports."""

    targets: Annotated[tuple[tuple[NodeRank, ProbePorts], ...], _between(0, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """All nodes have joined: start."""

    port: Port
    warnings: tuple[str, ...]
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
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone, and has not said why."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """A node has ended with a code that is neither 0 nor 85."""

    node: str
    code: ExitCode
    rank: Rank | None = None
    """The rank that failed first on this node, if it is known."""
    is_head: bool = False
    """The head itself has failed, and leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """A node was asked to stop, so all are."""

    reason: str
    requeue: bool = True
    """The run is to go on later; False: a person wants it to stay ended."""
    node: str = ""
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
    """Names and values."""
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


FromNode = JoinRequest | Heartbeat | ProbeReport | AttemptEnded | StopOrder | MeasureResult
FromHead = (
    Heartbeat
    | Refused
    | ProbeRequest
    | RunStart
    | AttemptStart
    | EndAttempt
    | NodeLost
    | NodeFailed
    | StopOrder
    | AllDone
    | MeasureRequest
    | PreflightEnd
)
Message = FromNode | FromHead

_FROM_NODE = {message.__name__: message for message in typing.get_args(FromNode)}
_FROM_HEAD = {message.__name__: message for message in typing.get_args(FromHead)}


def encode(message: Message) -> bytes:
    """Return `message` as one line of JSON, without the line feed."""
    return _ENCODER.encode({"type": type(message).__name__, **_values(message)}).encode()


def _values(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}  # asdict would copy each value


_ENCODER = json.JSONEncoder(default=_values)


@functools.lru_cache(maxsize=64)  # nodes in step send the same heartbeat, and a hit costs a tenth
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
    return _reader(types[name])(values)


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that turns parsed JSON into a value of the annotation `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _limited(_reader(args[0]), hint.__metadata__)
    if type(None) in args:
        read = _reader(args[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(args)
    return _object_reader(hint) if is_dataclass(hint) else _scalar_reader(hint)


def _limited(read: Callable[[Any], Any], checks: Sequence[Callable[[Any], None]]) -> Callable[[Any], Any]:
    def read_limited(value: Any) -> Any:
        result = read(value)
        for check in checks:
            check(value)
        return result

    return read_limited


def _scalar_reader(scalar: type) -> Callable[[Any], Any]:
    accepted = (int, float) if scalar is float else (scalar,)

    def read_scalar(value: Any) -> Any:
        if type(value) not in accepted:  # to isinstance, a bool is an int
            raise ValueError(f"a value is not of type {scalar.__name__}")
        return shown(value) if scalar is str else scalar(value)

    return read_scalar


def _tuple_reader(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_reader(hint) for hint in args if hint is not Ellipsis]
    has_any_length = Ellipsis in args

    def read_tuple(value: Any) -> Any:
        if not isinstance(value, list) or not (has_any_length or len(value) == len(readers)):
            raise ValueError("a value is not a list, or has another length")
        if has_any_length:
            return tuple(map(readers[0], value))
        return tuple(read(item) for read, item in zip(readers, value, strict=True))

    return read_tuple


def _object_reader(owner: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(owner, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(owner)}
    required = {field.name for field in fields(owner) if field.default is MISSING}

    def read_object(value: Any) -> Any:
        if not isinstance(value, dict) or not required <= value.keys():
            raise ValueError(f"a {owner.__name__} is not an object, or lacks a field")
        return owner(**{name: read(value[name]) for name, read in readers.items() if name in value})

    return read_object
