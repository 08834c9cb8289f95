"""The messages between a node and the head: values here, one JSON object a line on the wire (reader.py)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("alone", "pair", "all")
"""Stages of the preflight: each node alone, pairs, all nodes together."""
MODES = ("quick", "full")
"""How long the preflight measures."""
PHASES = STARTING, RENDEZVOUS, WORKERS = ("", "rendezvous", "workers")
"""How far torchrun of a node is: not yet in its rendezvous, in it, or past it."""
Span = tuple[int, int]
"""Places of the slowest and of the furthest worker, as the hang watch counts them."""


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
class AttemptEnded:
    """An attempt is over on the sending node."""

    code: int
    attempt: int = 1
    place: int | None = None
    """Furthest place of a worker of this node (launch/watchdog.py); None: no worker notes its place."""
    counts: tuple[int, ...] = ()
    """Numbers of nodes that the program can go on with; empty: it has not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWanted:
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
    head: bool = False
    """The head itself has failed, and leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
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


FromNode = Call | Beat | Probed | AttemptEnded | StopWanted | Measured
FromHead = (
    Beat
    | Refused
    | ProbeOrder
    | Go
    | Start
    | EndAttempt
    | Lost
    | Failed
    | StopAsked
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
            said = {"job": job, "node_rank": rank, "nnodes": nnodes, "caller": asdict(caller)}
            return {**said, "probe": _flat(offer) if offer else None}
        case Probed(failures=failures, crowded=crowded):
            return {"probed": [_flat(one) for one in failures], "crowded": crowded}
        case AttemptEnded(code=code, attempt=attempt, place=place, counts=counts):
            return {"done": code, "attempt": attempt, "place": place, "counts": counts}
        case StopWanted(reason=reason, requeue=requeue):
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
        case Failed(node=node, code=code, head=head):
            return {"failed": {"node": node, "code": code}, "head": head}
        case StopAsked(node=node, reason=reason, requeue=requeue):
            return {"stop": {"node": node, "reason": reason}, "requeue": requeue}
        case AllDone(codes=codes):
            return {"closed": {"codes": codes}}
        case Measure():
            return {"measure": _flat(message)}
        case Measured():
            return {"measured": _flat(message)}
        case Judged(left_out=left_out):
            return {"judged": left_out}


def _flat(message: Message | Offer | Failure) -> dict[str, Any]:
    """Return the fields of a value; asdict copies each of them and is a sixth of a roll call."""
    return {name: getattr(message, name) for name in message.__slots__}
