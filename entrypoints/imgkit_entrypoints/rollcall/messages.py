"""The messages between a node and the head: dataclasses, written and read as one JSON object a line.

`encode` and `decode` work by the fields of the dataclasses: a field's annotation says what a value may be,
and a missing field has its default. Code behind `decode` may trust a message: type, range and length of each
field are checked, and control characters in texts are escaped. Unknown fields are ignored, since another
image may hold another version of imgkit.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.rules import Fault, Rule, pattern_rule
from imgkit_entrypoints.terminal import escape_controls

# How far torchrun of a node is: before its rendezvous, in it, past it, or past it with all its workers at the
# start of their process group.
STARTING = ""
RENDEZVOUS = "rendezvous"
WORKERS = "workers"
CONNECTING = "connecting"
PHASES = (STARTING, RENDEZVOUS, WORKERS, CONNECTING)
# More nodes, and more attempts, than any run has.
MAX_NODES = 1 << 20
MAX_STAGE_S = 600
# Most lines of a traceback, and most characters of each.
MAX_LINES = 200
LINE_CHARACTERS = 1000
# The watchdog counts in 64 bits with a sign.
_MAX_COUNT = 1 << 63


def _in_range(low: int, high: int) -> Rule:
    """Return the rule for a number, or for the length of a text or list."""

    def check(value: Any) -> Iterator[Fault]:
        size = value if isinstance(value, int | float) else len(value)
        if not low <= size <= high:
            yield f"it is not between {low} and {high}", ""

    return Rule(check)


_ESCAPED = Rule(lambda _: iter(()), convert=escape_controls)
"""The rule of a text that is printed: it has an escape for each control character."""

NodeRank = Annotated[int, _in_range(0, MAX_NODES)]
OtherRank = Annotated[int, _in_range(1, MAX_NODES)]
"""Node rank of any node but the head."""
NodeCount = Annotated[int, _in_range(1, MAX_NODES)]
Attempt = NodeCount
Rank = Annotated[int, _in_range(0, MAX_NODES << 8)]
ExitCode = Annotated[int, _in_range(0, 255)]
Port = Annotated[int, _in_range(1, 65535)]
ByteCount = Annotated[int, _in_range(0, 1 << 31)]
Position = Annotated[int, _in_range(-_MAX_COUNT, _MAX_COUNT)]
Positions = tuple[Position, Position]
"""Positions of the slowest and of the furthest worker, as the watchdog counts them."""
Figure = Annotated[float, _in_range(-_MAX_COUNT, _MAX_COUNT)]
Text = Annotated[str, _ESCAPED]
Name = Annotated[str, _in_range(0, 255), _ESCAPED]
Line = Annotated[str, _in_range(0, LINE_CHARACTERS), _ESCAPED]
Remarks = Annotated[tuple[Line, ...], _in_range(0, 32)]


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
    nproc: Annotated[int, _in_range(0, MAX_NODES)] = 1
    """Like `gpu`, it may differ between nodes; a difference is reported, never refused."""
    gpu: Name = ""
    address: Name = ""
    """Address that carries the data between nodes, or empty if the network to this node is not tested."""
    interface: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePort:
    """The port that a node has opened for the test of the network. Hints with commands name it."""

    address: Annotated[str, pattern_rule(r"[0-9A-Fa-f:.]{1,45}", "is not an address", "")]
    interface: Annotated[str, pattern_rule(r"[\w.:@-]{0,32}", "is not an interface", "")]
    port: Port


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailure:
    """A connection or a burst of the network test that failed."""

    target: NodeRank
    size: ByteCount
    """Bytes of the burst that did not arrive. 0 means that there was no connection."""
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
    probe: ProbePort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life."""

    positions: Positions | None = None
    """Positions of the sender's workers. A heartbeat of the head has those of all workers."""
    phase: Annotated[str, pattern_rule("|".join(PHASES), "is not a phase", "")] = STARTING
    """Phase of torchrun on the sending node. A heartbeat of the head has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a node found in the test of the network."""

    failures: Annotated[tuple[ProbeFailure, ...], _in_range(0, 1024)]
    is_crowded: bool = False
    """Strangers have connected to this node's port: a failed test of it proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a worker has ended, as a node reports it to the head (launch/failures.py)."""

    rank: Rank | None
    """The worker's rank. None means torchrun itself, or a command."""
    code: Annotated[int, _in_range(-64, 255)]
    """Exit code. A negative one is the signal that ended it."""
    age_ms: Annotated[int, _in_range(0, _MAX_COUNT)]
    """Time since the worker ended."""
    after_peer: bool
    """True if the worker has ended because another rank had."""
    log: Line
    """Path of the full log of its node."""
    lines: Annotated[tuple[Line, ...], _in_range(0, MAX_LINES)] = ()
    """Its traceback or message, or nothing if it left none."""
    is_command: bool = False
    """True for the command of dist-run --per-node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt is over on the sending node."""

    code: ExitCode
    attempt: Attempt = 1
    position: Annotated[int, _in_range(-1, _MAX_COUNT)] | None = None
    """Furthest position of a worker of this node (launch/watchdog.py), or None if no worker notes it."""
    failure: RankFailure | None = None
    """The worker of this node that failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """How much GPUs were used until now, from all readings of all GPUs."""

    readings: Annotated[int, _in_range(1, _MAX_COUNT)]
    gpu_percent: Annotated[float, _in_range(0, 100)]
    """Mean of the share of time in which a GPU was busy."""
    memory_MiB: Annotated[float, _in_range(0, _MAX_COUNT)]
    """Most memory that was in use on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The head refuses this node, or the whole run. The fields are those of an ImgkitError."""

    what: Text
    where: Text | None = None
    hint: Text | None = None

    @classmethod
    def from_error(cls, error: ImgkitError) -> Refused:
        """Return the message with which other nodes can raise `error`, too."""
        return cls(what=error.what, where=error.where, hint=error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The head asks a node to test the network to `targets`: node ranks with their ports."""

    targets: Annotated[tuple[tuple[NodeRank, ProbePort], ...], _in_range(0, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """All nodes have joined; the head starts each attempt by `AttemptStart`."""

    nnodes: NodeCount
    """Nodes that have joined."""
    node_rank: OtherRank
    """Node rank of the receiving node among them."""
    host_index: NodeRank = 0
    """Number of the receiving node among those on its host, which is usually the only one."""

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
    """The receiving node's rank among them, 0 on the head alone. None means that it waits as a spare."""
    port: Port
    """Torchrun's port on the head."""
    second_port: Port = 1
    """Another free port on the head, for a command of dist-run --per-node."""
    head: Name = ""
    """Address of the head by which such a command connects."""
    token: Annotated[str, pattern_rule(r"[0-9a-f]{0,8}", "is not a token", "")] = ""
    """Names the run on all nodes."""
    world_size: Annotated[int, _in_range(0, MAX_NODES << 8)] = 0
    """Processes of all nodes that take part."""

    def __post_init__(self) -> None:
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise ValueError("node_rank is not below nnodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """The attempt has failed: end its workers at once, they could save nothing together."""

    attempt: Attempt
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """A node was asked to stop, so all are."""

    reason: Text
    requeue: bool = True
    """The run is to go on later. False means that a person wants it to stay ended."""
    node: Text = ""
    """The node that was asked; the head fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run is over."""

    code: ExitCode
    """Exit code of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """The head asks a node for one stage of the preflight."""

    stage: NodeRank
    """Number of the stage."""
    limit_s: Annotated[int, _in_range(1, MAX_STAGE_S)]
    group: tuple[NodeRank, ...]
    """The receiver's node rank alone, or those of two nodes that measure together."""
    store: Annotated[int, _in_range(0, 65535)] = 0
    """Port on the head where two nodes meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureResult:
    """What a node has measured in one stage of the preflight."""

    stage: NodeRank
    figures: Annotated[tuple[tuple[Name, Figure], ...], _in_range(0, 32)] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost:
    """The connection to the head is over; no message of it says so."""

    node: str
    reason: str


Order = AttemptStart | EndAttempt | StopOrder | EndRun | MeasureRequest | PreflightEnd | Refused
"""Messages of the head that a node agent reacts to; the head's own agent gets the same."""
Event = Order | HeadLost
Message = (
    Order
    | Heartbeat
    | ProbeRequest
    | RunStart
    | JoinRequest
    | ProbeReport
    | AttemptEnded
    | MeasureResult
    | GpuUse
)

_TYPES = {message.__name__: message for message in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Return `message` as one line of JSON, without the line feed."""
    return _ENCODER.encode({"type": type(message).__name__, **_values(message)}).encode()


def _values(message: Any) -> dict[str, Any]:
    # dataclasses.asdict would copy each value.
    return {name: getattr(message, name) for name in message.__slots__}


_ENCODER = json.JSONEncoder(default=_values)


# Nodes at the same step send equal heartbeats. To look one up takes a tenth of the time to decode it.
@functools.lru_cache(maxsize=64)
def decode(line: bytes) -> Message:
    """Return the message in a line, such as ``{"type": "EndRun", "code": 0}``.

    Raises
    ------
    ValueError : the line is no message.
    """
    values = json_text.parse(line)
    name = values.get("type") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError("it is no message")
    message: Message = json_text.build_value(_TYPES[name], values, name)
    return message
