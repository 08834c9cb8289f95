"""The messages between a node and the head, which are dataclasses that are sent as one line of JSON each.

The head is the node with rank 0. `encode` and `decode` work with the fields of the dataclasses: the
annotation of a field says which values are allowed, and a missing field gets its default. Code that gets a
message from `decode` can trust it. The type, range and length of each field have been checked, and control
characters in texts are escaped. Unknown fields are ignored, because another image may contain another version
of imgkit.
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

# The phases of torchrun on a node: before its rendezvous, in the rendezvous, and past it, with running
# workers. In the last phase, all workers are opening their process group.
STARTING = ""
RENDEZVOUS = "rendezvous"
WORKERS = "workers"
CONNECTING = "connecting"
PHASES = (STARTING, RENDEZVOUS, WORKERS, CONNECTING)
# A limit for the numbers of nodes and of attempts that no run reaches.
MAX_NODES = 1 << 20
MAX_STAGE_S = 600
# Largest number of lines of a traceback, and of characters in each line.
MAX_LINES = 200
LINE_CHARACTERS = 1000
# Limit for numbers from the watchdog, which are 64-bit integers with a sign.
_MAX_COUNT = 1 << 63


def _in_range(low: int, high: int) -> Rule:
    """Return a rule that limits a number, or the length of a text or list, to a range."""

    def check(value: Any) -> Iterator[Fault]:
        size = value if isinstance(value, int | float) else len(value)
        if not low <= size <= high:
            yield f"it is not between {low} and {high}", ""

    return Rule(check)


_ESCAPED = Rule(lambda _: iter(()), convert=escape_controls)
"""The rule for texts that are printed. It replaces each control character by an escape."""

NodeRank = Annotated[int, _in_range(0, MAX_NODES)]
OtherRank = Annotated[int, _in_range(1, MAX_NODES)]
"""Node rank of any node except the head."""
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
    """The software that must be the same on every node. An empty string means that it is not there."""

    image: Name = ""
    torch: Name = ""
    nccl: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node reports about itself when it joins."""

    host: Name
    software: Software = Software()
    nproc: Annotated[int, _in_range(0, MAX_NODES)] = 1
    """Number of workers. Like `gpu`, it may differ between nodes, which only leads to a warning."""
    gpu: Name = ""
    address: Name = ""
    """Address that carries the data between nodes. Empty if the network to this node is not tested."""
    interface: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePort:
    """The port that a node has opened for the network test.

    Address and interface become part of commands in hints, so their characters are limited.
    """

    address: Annotated[str, pattern_rule(r"[0-9A-Fa-f:.]{1,45}", "is not an address", "")]
    interface: Annotated[str, pattern_rule(r"[\w.:@-]{0,32}", "is not an interface", "")]
    port: Port


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailure:
    """A failed connection, or a burst of data that did not arrive, in the network test."""

    target: NodeRank
    size: ByteCount
    """Size in bytes of the burst that did not arrive. 0 means that the connection failed."""
    arrived: ByteCount
    """Size in bytes of the largest burst that arrived."""
    packet: ByteCount
    """Size in bytes of the largest packet that was sent, including headers."""
    reason: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A node asks the head to let it join the run. It is the first message of each node."""

    job: Text
    node_rank: NodeRank
    nnodes: NodeCount
    node: NodeInfo
    probe: ProbePort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life, which also carries the state of the workers."""

    positions: Positions | None = None
    """Positions of the sender's workers. In a heartbeat of the head, they are of all workers of the run."""
    phase: Annotated[str, pattern_rule("|".join(PHASES), "is not a phase", "")] = STARTING
    """Phase of torchrun on the sending node. A heartbeat of the head does not set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The results of the network test on one node."""

    failures: Annotated[tuple[ProbeFailure, ...], _in_range(0, 1024)]
    is_crowded: bool = False
    """True if other programs have connected to this node's port. A failed test of it then proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a worker has ended, as a node reports it to the head (launch/failures.py)."""

    rank: Rank | None
    """The worker's rank. None means torchrun itself, or a command."""
    code: Annotated[int, _in_range(-64, 255)]
    """Exit code, or the negative number of the signal that ended the process."""
    age_ms: Annotated[int, _in_range(0, _MAX_COUNT)]
    """Milliseconds since the worker ended."""
    after_peer: bool
    """True if the worker has only ended because another rank was gone."""
    log: Line
    """Path of the full log on the worker's node."""
    lines: Annotated[tuple[Line, ...], _in_range(0, MAX_LINES)] = ()
    """Traceback or message of the worker. Empty if it left none."""
    is_command: bool = False
    """True for the command of dist-run --per-node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt, which is one start of the command on all nodes, is over on the sending node."""

    code: ExitCode
    attempt: Attempt = 1
    position: Annotated[int, _in_range(-1, _MAX_COUNT)] | None = None
    """Furthest position of a worker of this node (launch/watchdog.py), or None if it is unknown."""
    failure: RankFailure | None = None
    """The worker of this node that failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """How much GPUs have been used so far, from all readings of all GPUs."""

    readings: Annotated[int, _in_range(1, _MAX_COUNT)]
    gpu_percent: Annotated[float, _in_range(0, 100)]
    """Mean of the percentages of time in which the GPUs were busy."""
    memory_MiB: Annotated[float, _in_range(0, _MAX_COUNT)]
    """Largest amount of memory that was in use on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The head refuses this node or the whole run. The fields are those of an ImgkitError."""

    what: Text
    where: Text | None = None
    hint: Text | None = None

    @classmethod
    def from_error(cls, error: ImgkitError) -> Refused:
        """Return the message that carries `error` to other nodes, so that they can raise it as well."""
        return cls(what=error.what, where=error.where, hint=error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The head asks a node to test the network to other nodes. `targets` contains their ranks and ports."""

    targets: Annotated[tuple[tuple[NodeRank, ProbePort], ...], _in_range(0, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """All nodes have joined, and the run starts. The head starts each attempt with `AttemptStart`."""

    nnodes: NodeCount
    """Number of nodes that have joined."""
    node_rank: OtherRank
    """Rank of the receiving node among the nodes that have joined."""
    host_index: NodeRank = 0
    """Index of the receiving node among the nodes on its host. It is 0 if there is only one."""

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError("node_rank is not below nnodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """The head orders the start of the next attempt, in which each node starts its command."""

    attempt: Attempt
    nnodes: NodeCount
    """Number of nodes that take part."""
    node_rank: OtherRank | None
    """Rank of the receiving node in the attempt, or None if the node waits as a spare.

    Only the head has rank 0, and it does not receive this message over a connection.
    """
    port: Port
    """torchrun's port on the head."""
    second_port: Port = 1
    """Another free port on the head, for a command of dist-run --per-node."""
    head: Name = ""
    """Address of the head, to which such a command connects."""
    token: Annotated[str, pattern_rule(r"[0-9a-f]{0,8}", "is not a token", "")] = ""
    """Random name of the run, which is the same on all nodes."""
    world_size: Annotated[int, _in_range(0, MAX_NODES << 8)] = 0
    """Number of processes on all nodes that take part."""

    def __post_init__(self) -> None:
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise ValueError("node_rank is not below nnodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """The attempt has failed. Each node ends its workers at once.

    The workers could not save a state, because that needs all of them.
    """

    attempt: Attempt
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """One node was asked to stop, so all nodes must save and end."""

    reason: Text
    requeue: bool = True
    """True if the run should continue later. False if a person wants it to end for good."""
    node: Text = ""
    """Name of the node that was asked to stop. The head fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The head ends the run."""

    code: ExitCode
    """Exit code of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """The head asks a node to measure in one stage of the preflight, the test before the first attempt."""

    stage: NodeRank
    """Number of the stage."""
    limit_s: Annotated[int, _in_range(1, MAX_STAGE_S)]
    group: tuple[NodeRank, ...]
    """Ranks of the nodes that measure together: only the receiver, or a pair of nodes."""
    store: Annotated[int, _in_range(0, 65535)] = 0
    """Port on the head of the store in which a pair of nodes meets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureResult:
    """The results of a node in one stage of the preflight, the test before the first attempt."""

    stage: NodeRank
    figures: Annotated[tuple[tuple[Name, Figure], ...], _in_range(0, 32)] = ()
    """Names and values. Each value must be a float, because the receiver accepts no integer."""
    failed: Remarks = ()
    """Names of the checks that failed."""
    notes: Remarks = ()
    error: Line = ""
    """Why there are no figures. Empty if the measurement has succeeded."""
    mute: bool = False
    """True if the measuring process did not answer at all.

    If only its partner hangs, the process reports an error in time, and this is False.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightEnd:
    """The preflight (the test before the first attempt) is over, and the run goes on."""

    left_out: tuple[NodeRank, ...]
    """Ranks of the nodes that take no part in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost:
    """The connection to the head is lost. The node's own session creates this event, it is never sent."""

    node: str
    reason: str


Order = AttemptStart | EndAttempt | StopOrder | EndRun | MeasureRequest | PreflightEnd | Refused
"""Messages from the head to which a node agent reacts. The head's own agent gets the same messages."""
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


# Nodes at the same step send equal heartbeats. Looking up a line in the cache takes a tenth of the time of
# decoding it. Equal lines share one message, which nobody can change, since the dataclasses are frozen.
@functools.lru_cache(maxsize=64)
def decode(line: bytes) -> Message:
    """Return the message in a line, such as ``{"type": "EndRun", "code": 0}``.

    Raises
    ------
    ValueError : the line is not a message.
    """
    json_values = json_text.parse(line)
    name = json_values.get("type") if isinstance(json_values, dict) else None
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError("it is no message")
    # `build_value` checks each field. The last argument is the name in its error.
    message: Message = json_text.build_value(_TYPES[name], json_values, name)
    return message
