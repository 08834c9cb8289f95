"""The messages between a node and the head: values, written and read as one JSON object a line.

`from_node` and `from_head` are the one place where the text of another node becomes a value. They check
type, range and length of every field, and escape control characters in every text, so that all code
behind them may trust a message. Further fields are ignored: another image may hold another version of
imgkit.
"""

from __future__ import annotations

import functools
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from imgkit_entrypoints import json_text
from imgkit_entrypoints.terminal import shown

KINDS = ("alone", "pair", "all")
"""Stages of the preflight: each node alone, pairs, all nodes together."""
MODES = ("quick", "full")
"""How long the preflight measures."""
PHASES = STARTING, RENDEZVOUS, WORKERS = ("", "rendezvous", "workers")
"""How far torchrun of a node is: not yet in its rendezvous, in it, or past it."""
Span = tuple[int, int]
"""Places of the slowest and of the furthest worker, as the watchdog counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The software that must be the same on every node; an empty string means "none"."""

    image: str = ""
    torch: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A node's own description."""

    host: str
    identity: Identity = Identity()
    nproc: int = 1
    """Like `gpu`, it may differ between nodes; a difference is reported, never refused."""
    gpu: str = ""
    address: str = ""
    """Address that carries the data between nodes; empty: the network to this node is not tested."""
    interface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The ports that a node has opened for the test of the network."""

    address: str
    interface: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A connection or a burst of the network test that failed."""

    source: int
    target: int
    port: int
    size: int
    """Bytes of the burst that did not arrive; 0: there was no connection."""
    arrived: int
    """Bytes of the largest burst that arrived."""
    packet: int
    """Bytes of the largest packet on the way, headers included."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The first message of a node."""

    job: str
    node_rank: int
    nnodes: int
    caller: Caller
    offer: Offer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life, with the places of workers that the sender knows."""

    span: Span | None = None
    phase: str = STARTING
    """One of `PHASES`, from a node to the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a node found in the test of the network."""

    failures: tuple[Failure, ...]
    crowded: bool = False
    """Strangers have connected to this node's ports: a failed test of them proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a worker has ended, as a node reports it to the head (launch/failures.py)."""

    rank: int | None
    """None: torchrun itself."""
    code: int | None
    """Exit code; negative: the signal that ended it; None: torchrun did not report it."""
    age_ms: int
    """Time since then."""
    after_peer: bool
    """It has ended because another rank had."""
    log: str
    """The full log of its node."""
    lines: tuple[str, ...] = ()
    """Its traceback or message; empty: it left none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt is over on the sending node."""

    code: int
    attempt: int = 1
    place: int | None = None
    """Furthest place of a worker of this node (launch/watchdog.py); None: no worker notes its place."""
    failure: RankFailure | None = None
    """The worker of this node that failed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStop:
    """The sending node was asked to stop."""

    reason: str
    requeue: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The head refuses this node, or the whole run; the fields are those of an ImgkitError."""

    what: str
    where: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOrder:
    """The head asks a node to test the network to `targets`: node ranks with their offers."""

    targets: tuple[tuple[int, Offer], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """All nodes have called: start."""

    port: int
    warnings: tuple[str, ...]
    nnodes: int
    """Nodes that start."""
    node_rank: int
    """Number of the receiving node among them."""
    elastic: bool = False
    """The head starts each attempt by `Start`; False: there is one attempt, with all nodes, from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The next attempt starts."""

    attempt: int
    nnodes: int
    """Nodes that take part."""
    node_rank: int | None
    """The receiving node's rank among them; None: it waits as a spare."""
    port: int
    """Torchrun's port on the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """The attempt has failed: end its workers at once, they could save nothing together."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node is gone, and has not said why."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A node has ended with a code that is neither 0 nor 85."""

    node: str
    code: int
    rank: int | None = None
    """The rank that failed first on this node, if it is known."""
    head: bool = False
    """The head itself has failed, and leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """A node was asked to stop, so all are."""

    node: str
    reason: str
    requeue: bool = True
    """The run is to go on later; False: a person wants it to stay ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllDone:
    """All nodes are done."""

    codes: tuple[int, ...]
    """Exit codes by node rank; empty if the head has failed and left, since only the head knows them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The head asks a node for one stage of the preflight."""

    stage: int
    """Number of the stage."""
    kind: str
    """One of `KINDS`."""
    mode: str
    """One of `MODES`."""
    limit_s: int
    group: tuple[int, ...]
    """Node ranks that measure together, the receiver's among them."""
    store: int = 0
    """Port on the head where they meet; 0: the node measures alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a node has measured in one stage of the preflight."""

    stage: int
    figures: tuple[tuple[str, float], ...] = ()
    """Names and values."""
    failed: tuple[str, ...] = ()
    """Checks that failed."""
    notes: tuple[str, ...] = ()
    error: str = ""
    """Why there are no figures."""
    mute: bool = False
    """The measuring process did not answer at all; with a partner that hangs, it says so in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The preflight is over, and the run goes on."""

    left_out: tuple[int, ...]
    """Node ranks that take no part in it."""


FromNode = Call | Beat | Probed | AttemptEnded | NodeStop | Measured
FromHead = (
    Beat
    | Refused
    | ProbeOrder
    | Go
    | Start
    | EndAttempt
    | Lost
    | Failed
    | StopOrder
    | AllDone
    | Measure
    | Judged
)
Message = FromNode | FromHead


def line(message: Message) -> bytes:
    """Return `message` as one line of JSON, without the line feed."""
    return json.dumps(_object(message)).encode()


def _object(message: Message) -> dict[str, Any]:
    match message:
        case Beat(span=span, phase=phase):
            return {"beat": span, **({"phase": phase} if phase else {})}
        case Call(job=job, node_rank=rank, nnodes=nnodes, caller=caller, offer=offer):
            data = {"job": job, "node_rank": rank, "nnodes": nnodes, "caller": asdict(caller)}
            return {**data, "probe": _flat(offer) if offer else None}
        case Probed(failures=failures, crowded=crowded):
            return {"probed": [_flat(one) for one in failures], "crowded": crowded}
        case AttemptEnded(code=code, attempt=attempt, place=place, failure=failure):
            data = {"done": code, "attempt": attempt, "place": place}
            return {**data, **({"failure": _flat(failure)} if failure else {})}
        case NodeStop(reason=reason, requeue=requeue):
            return {"stop": reason, "requeue": requeue}
        case Refused():
            return {"refused": _flat(message)}
        case ProbeOrder(targets=targets):
            return {"probe": [{"target": rank, **_flat(offer)} for rank, offer in targets]}
        case Go():
            return {"go": _flat(message)}
        case Start():
            return {"start": _flat(message)}
        case EndAttempt():
            return {"end": _flat(message)}
        case Lost():
            return {"lost": _flat(message)}
        case Failed(node=node, code=code, rank=rank, head=head):
            return {"failed": {"node": node, "code": code, "rank": rank}, "head": head}
        case StopOrder(node=node, reason=reason, requeue=requeue):
            return {"stop": {"node": node, "reason": reason}, "requeue": requeue}
        case AllDone(codes=codes):
            return {"closed": {"codes": codes}}
        case Measure():
            return {"measure": _flat(message)}
        case Measured():
            return {"measured": _flat(message)}
        case Judged(left_out=left_out):
            return {"judged": left_out}


def _flat(message: Message | Offer | Failure | RankFailure) -> dict[str, Any]:
    """Return the fields of a value; asdict copies each of them and is a sixth of a roll call."""
    return {name: getattr(message, name) for name in message.__slots__}


Value = TypeVar("Value")

NODES = 1 << 20
"""More nodes than any run has."""
NAME = 255
"""Characters of a host name, a version or a device model."""
PORTS_OFFERED = 8
FAILURES_REPORTED = 1024
ATTEMPTS = 1 << 20
"""More attempts than any run has."""
LINES, LINE = 200, 1000
"""Lines of a traceback, and characters of each."""
FIGURES, REMARKS, REMARK = 32, 32, 1000
"""Figures and remarks of one stage of the preflight, and characters of a remark."""
LONGEST_STAGE_S = 600
_PLACE = 1 << 63
"""The watchdog counts in 64 bits."""
_INTERFACE = re.compile(r"[\w.:@-]{0,32}", re.ASCII)


@functools.lru_cache(maxsize=64)  # nodes in step beat alike, and a hit costs a tenth
def from_node(text: bytes) -> FromNode:
    """Return the message in a line that a node sent to the head.

    Raises
    ------
    ValueError : it is no such message.
    """
    data = _fields(json_text.parse(text))
    if "beat" in data:
        return Beat(span=_span(data["beat"]), phase=_one_of(data.get("phase", STARTING), PHASES))
    if "done" in data:
        return AttemptEnded(
            code=_code(data["done"]),
            attempt=_integer(data.get("attempt"), 1, ATTEMPTS),
            place=None if data.get("place") is None else _integer(data["place"], -1, _PLACE),
            failure=None if data.get("failure") is None else _rank_failure(_fields(data["failure"])),
        )
    if "stop" in data:
        return NodeStop(reason=_text(data["stop"]), requeue=_flag(data.get("requeue")))
    if "probed" in data:
        failures = _tuple(data["probed"], FAILURES_REPORTED, _failure)
        return Probed(failures=failures, crowded=_flag(data.get("crowded")))
    if "measured" in data:
        return _measured(_fields(data["measured"]))
    nnodes = _integer(data.get("nnodes"), 1, NODES)
    return Call(
        job=_text(data.get("job")),
        node_rank=_integer(data.get("node_rank"), 0, NODES),
        nnodes=nnodes,
        caller=_caller(_fields(data.get("caller"))),
        offer=None if data.get("probe") is None else _offer(_fields(data["probe"])),
    )


def from_head(text: bytes) -> FromHead:
    """Return the message in a line that the head sent to a node.

    Raises
    ------
    ValueError : it is no such message.
    """
    data = _fields(json_text.parse(text))
    if "beat" in data:
        return Beat(span=_span(data["beat"]))
    if "refused" in data:
        fields = _fields(data["refused"])
        return Refused(
            what=_text(fields.get("what")), where=_maybe(fields.get("where")), hint=_maybe(fields.get("hint"))
        )
    if "probe" in data:
        return ProbeOrder(targets=_tuple(data["probe"], PORTS_OFFERED, _target))
    if "go" in data:
        fields = _fields(data["go"])
        nnodes = _integer(fields.get("nnodes"), 1, NODES)
        return Go(
            port=_port(fields.get("port")),
            warnings=_tuple(fields.get("warnings"), NODES, _text),
            nnodes=nnodes,
            node_rank=_integer(fields.get("node_rank"), 1, nnodes - 1),
            elastic=_flag(fields.get("elastic")),
        )
    if "start" in data:
        return _start(_fields(data["start"]))
    if "end" in data:
        fields = _fields(data["end"])
        return EndAttempt(attempt=_integer(fields.get("attempt"), 1, ATTEMPTS), why=_text(fields.get("why")))
    if "lost" in data:
        fields = _fields(data["lost"])
        return Lost(node=_text(fields.get("node")), why=_text(fields.get("why")))
    if "failed" in data:
        fields = _fields(data["failed"])
        head = _flag(data.get("head"))
        rank = None if fields.get("rank") is None else _rank(fields["rank"])
        return Failed(node=_text(fields.get("node")), code=_code(fields.get("code")), rank=rank, head=head)
    if "stop" in data:
        fields = _fields(data["stop"])
        requeue = _flag(data.get("requeue"))
        return StopOrder(node=_text(fields.get("node")), reason=_text(fields.get("reason")), requeue=requeue)
    if "closed" in data:
        return AllDone(codes=_tuple(_fields(data["closed"]).get("codes"), NODES, _code))
    if "measure" in data:
        return _measure(_fields(data["measure"]))
    if "judged" in data:
        return Judged(left_out=_tuple(data["judged"], NODES, _node))
    raise ValueError("it is not a message from the head")


def _fields(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("an object is missing")
    return data


def _integer(data: object, low: int, high: int) -> int:
    if type(data) is not int or not low <= data <= high:  # a bool is an int to isinstance
        raise ValueError("an integer is missing or out of range")
    return data


def _code(data: object) -> int:
    return _integer(data, 0, 255)


def _rank(data: object) -> int:
    return _integer(data, 0, NODES << 8)


def _port(data: object) -> int:
    return _integer(data, 1, 65535)


def _flag(data: object) -> bool:
    if not isinstance(data, bool):
        raise ValueError("true or false is missing")
    return data


def _text(data: object, longest: int | None = None) -> str:
    """Return a text as a terminal may show it; without `longest`, only the line's own limit bounds it."""
    if not isinstance(data, str) or (longest is not None and len(data) > longest):
        raise ValueError("a text is missing or too long")
    return shown(data)


def _name(data: object) -> str:
    return _text(data, NAME)


def _maybe(data: object) -> str | None:
    return None if data is None else _text(data)


def _tuple(data: object, most: int, each: Callable[[Any], Value]) -> tuple[Value, ...]:
    if not isinstance(data, list) or len(data) > most:
        raise ValueError("a list is missing or too long")
    return tuple(each(one) for one in data)


def _span(data: object) -> Span | None:
    if data is None:
        return None
    low, high = _tuple(data, 2, lambda one: _integer(one, -_PLACE, _PLACE))
    return (low, high)


def _caller(data: Mapping[str, Any]) -> Caller:
    own = _fields(data.get("identity"))
    return Caller(
        host=_name(data.get("host")),
        identity=Identity(
            image=_name(own.get("image", "")),
            torch=_name(own.get("torch", "")),
            nccl=_name(own.get("nccl", "")),
        ),
        nproc=_integer(data.get("nproc", 1), 0, NODES),
        gpu=_name(data.get("gpu", "")),
    )


def _offer(data: Mapping[str, Any]) -> Offer:
    """Return an offer. Its address and interface must be names: they appear in commands that users paste."""
    address, interface = _name(data.get("address")), _name(data.get("interface"))
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError:
        raise ValueError("an address is missing") from None
    if not _INTERFACE.fullmatch(interface):
        raise ValueError("not an interface name")
    ports = _tuple(data.get("ports"), PORTS_OFFERED, _port)
    return Offer(address=address, interface=interface, ports=ports)


def _start(fields: Mapping[str, Any]) -> Start:
    nnodes, node_rank = _integer(fields.get("nnodes"), 1, NODES), fields.get("node_rank")
    return Start(
        attempt=_integer(fields.get("attempt"), 1, ATTEMPTS),
        nnodes=nnodes,
        # The head itself is node 0 of every attempt.
        node_rank=None if node_rank is None else _integer(node_rank, 1, nnodes - 1),
        port=_port(fields.get("port")),
    )


def _rank_failure(fields: Mapping[str, Any]) -> RankFailure:
    return RankFailure(
        rank=None if fields.get("rank") is None else _rank(fields["rank"]),
        code=None if fields.get("code") is None else _integer(fields["code"], -64, 255),
        age_ms=_integer(fields.get("age_ms"), 0, _PLACE),
        after_peer=_flag(fields.get("after_peer")),
        log=_text(fields.get("log"), LINE),
        lines=_tuple(fields.get("lines"), LINES, lambda one: _text(one, LINE)),
    )


def _target(data: object) -> tuple[int, Offer]:
    fields = _fields(data)
    return _integer(fields.get("target"), 0, NODES), _offer(fields)


def _failure(data: object) -> Failure:
    fields = _fields(data)

    def bytes_of(name: str) -> int:
        return _integer(fields.get(name), 0, 1 << 31)

    return Failure(
        source=_integer(fields.get("source"), 0, NODES),
        target=_integer(fields.get("target"), 0, NODES),
        port=_port(fields.get("port")),
        size=bytes_of("size"),
        arrived=bytes_of("arrived"),
        packet=bytes_of("packet"),
        why=_name(fields.get("why")),
    )


def _node(data: object) -> int:
    return _integer(data, 0, NODES)


def _one_of(data: object, allowed: tuple[str, ...]) -> str:
    if data not in allowed:
        raise ValueError("an unknown word")
    return str(data)


def _measure(fields: Mapping[str, Any]) -> Measure:
    return Measure(
        stage=_integer(fields.get("stage"), 0, NODES),
        kind=_one_of(fields.get("kind"), KINDS),
        mode=_one_of(fields.get("mode"), MODES),
        limit_s=_integer(fields.get("limit_s"), 1, LONGEST_STAGE_S),
        group=_tuple(fields.get("group"), NODES, _node),
        store=_integer(fields.get("store"), 0, 65535),
    )


def _measured(fields: Mapping[str, Any]) -> Measured:
    return Measured(
        stage=_integer(fields.get("stage"), 0, NODES),
        figures=_tuple(fields.get("figures"), FIGURES, _figure),
        failed=_tuple(fields.get("failed"), REMARKS, _remark),
        notes=_tuple(fields.get("notes"), REMARKS, _remark),
        error=_remark(fields.get("error")),
        mute=_flag(fields.get("mute")),
    )


def _figure(data: object) -> tuple[str, float]:
    if not isinstance(data, list) or len(data) != 2:
        raise ValueError("a figure is missing")
    name, value = data
    if type(value) not in (int, float) or abs(value) > _PLACE:  # JSON here has no NaN (json_text.py)
        raise ValueError("a number is missing or out of range")
    return _name(name), float(value)


def _remark(data: object) -> str:
    return _text(data, REMARK)
