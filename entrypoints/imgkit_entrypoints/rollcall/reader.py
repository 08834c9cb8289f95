"""The one place where the text of another node becomes a value (messages.py).

`from_node` and `from_head` check type, range and length of every field, and escape control characters in
every text, so that all code behind them may trust a message. Further fields are ignored: another image may
hold another version of imgkit.
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from imgkit_entrypoints import json_text
from imgkit_entrypoints.rollcall.messages import (
    KINDS,
    MODES,
    PHASES,
    STARTING,
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
    Offer,
    Probed,
    ProbeOrder,
    Refused,
    Span,
    Start,
    StopAsked,
    StopWanted,
)
from imgkit_entrypoints.terminal import shown

Value = TypeVar("Value")

NODES = 1 << 20
"""More nodes than any run has."""
NAME = 255
"""Characters of a host name, a version or a device model."""
PORTS_OFFERED = 8
FAILURES_REPORTED = 1024
ATTEMPTS = 1 << 20
"""More attempts than any run has."""
COUNTS = 1024
"""Most numbers of nodes that a program can name."""
FIGURES, REMARKS, REMARK = 32, 32, 1000
"""Figures and remarks of one stage of the preflight, and characters of a remark."""
LONGEST_STAGE_S = 600
_PLACE = 1 << 63
"""The hang watch counts in 64 bits."""
_INTERFACE = re.compile(r"[\w.:@-]{0,32}", re.ASCII)


@functools.lru_cache(maxsize=64)  # nodes in step beat alike, and a hit costs a tenth
def from_node(text: bytes) -> FromNode:
    """Return the message in a line that a node sent to the head.

    Raises
    ------
    ValueError : it is no such message.
    """
    said = _fields(json_text.parse(text))
    if "beat" in said:
        return Beat(span=_span(said["beat"]), phase=_one_of(said.get("phase", STARTING), PHASES))
    if "done" in said:
        return AttemptEnded(
            code=_code(said["done"]),
            attempt=_integer(said.get("attempt"), 1, ATTEMPTS),
            place=None if said.get("place") is None else _integer(said["place"], -1, _PLACE),
            counts=_tuple(said.get("counts"), COUNTS, lambda one: _integer(one, 1, NODES)),
        )
    if "stop" in said:
        return StopWanted(reason=_text(said["stop"]), requeue=_flag(said.get("requeue")))
    if "probed" in said:
        failures = _tuple(said["probed"], FAILURES_REPORTED, _failure)
        return Probed(failures=failures, crowded=_flag(said.get("crowded")))
    if "measured" in said:
        return _measured(_fields(said["measured"]))
    nnodes = _integer(said.get("nnodes"), 1, NODES)
    return Call(
        job=_text(said.get("job")),
        node_rank=_integer(said.get("node_rank"), 0, NODES),
        nnodes=nnodes,
        caller=_caller(_fields(said.get("caller"))),
        offer=None if said.get("probe") is None else _offer(_fields(said["probe"])),
    )


def from_head(text: bytes) -> FromHead:
    """Return the message in a line that the head sent to a node.

    Raises
    ------
    ValueError : it is no such message.
    """
    said = _fields(json_text.parse(text))
    if "beat" in said:
        return Beat(span=_span(said["beat"]))
    if "refused" in said:
        told = _fields(said["refused"])
        return Refused(
            what=_text(told.get("what")), where=_maybe(told.get("where")), hint=_maybe(told.get("hint"))
        )
    if "probe" in said:
        return ProbeOrder(targets=_tuple(said["probe"], PORTS_OFFERED, _target))
    if "go" in said:
        told = _fields(said["go"])
        nnodes = _integer(told.get("nnodes"), 1, NODES)
        return Go(
            port=_port(told.get("port")),
            warnings=_tuple(told.get("warnings"), NODES, _text),
            nnodes=nnodes,
            node_rank=_integer(told.get("node_rank"), 1, nnodes - 1),
            elastic=_flag(told.get("elastic")),
        )
    if "start" in said:
        return _start(_fields(said["start"]))
    if "end" in said:
        told = _fields(said["end"])
        return EndAttempt(attempt=_integer(told.get("attempt"), 1, ATTEMPTS), why=_text(told.get("why")))
    if "lost" in said:
        told = _fields(said["lost"])
        return Lost(node=_text(told.get("node")), why=_text(told.get("why")))
    if "failed" in said:
        told = _fields(said["failed"])
        head = _flag(said.get("head"))
        return Failed(node=_text(told.get("node")), code=_code(told.get("code")), head=head)
    if "stop" in said:
        told = _fields(said["stop"])
        requeue = _flag(said.get("requeue"))
        return StopAsked(node=_text(told.get("node")), reason=_text(told.get("reason")), requeue=requeue)
    if "closed" in said:
        return AllDone(codes=_tuple(_fields(said["closed"]).get("codes"), NODES, _code))
    if "measure" in said:
        return _measure(_fields(said["measure"]))
    if "judged" in said:
        return Judged(left_out=_tuple(said["judged"], NODES, _node))
    raise ValueError("it is no message of the head")


def _fields(said: object) -> Mapping[str, Any]:
    if not isinstance(said, dict):
        raise ValueError("an object is missing")
    return said


def _integer(said: object, low: int, high: int) -> int:
    if type(said) is not int or not low <= said <= high:  # a bool is an int to isinstance
        raise ValueError("an integer is missing or out of range")
    return said


def _code(said: object) -> int:
    return _integer(said, 0, 255)


def _port(said: object) -> int:
    return _integer(said, 1, 65535)


def _flag(said: object) -> bool:
    if not isinstance(said, bool):
        raise ValueError("true or false is missing")
    return said


def _text(said: object, longest: int | None = None) -> str:
    """Return a text as a terminal may show it; without `longest`, only the line's own limit bounds it."""
    if not isinstance(said, str) or (longest is not None and len(said) > longest):
        raise ValueError("a text is missing or too long")
    return shown(said)


def _name(said: object) -> str:
    return _text(said, NAME)


def _maybe(said: object) -> str | None:
    return None if said is None else _text(said)


def _tuple(said: object, most: int, each: Callable[[Any], Value]) -> tuple[Value, ...]:
    if not isinstance(said, list) or len(said) > most:
        raise ValueError("a list is missing or too long")
    return tuple(each(one) for one in said)


def _span(said: object) -> Span | None:
    if said is None:
        return None
    low, high = _tuple(said, 2, lambda one: _integer(one, -_PLACE, _PLACE))
    return (low, high)


def _caller(said: Mapping[str, Any]) -> Caller:
    own = _fields(said.get("identity"))
    return Caller(
        host=_name(said.get("host")),
        identity=Identity(
            image=_name(own.get("image", "")),
            torch=_name(own.get("torch", "")),
            nccl=_name(own.get("nccl", "")),
        ),
        nproc=_integer(said.get("nproc", 1), 0, NODES),
        gpu=_name(said.get("gpu", "")),
    )


def _offer(said: Mapping[str, Any]) -> Offer:
    """Return an offer. Its address and interface must be names: they appear in commands that users paste."""
    address, interface = _name(said.get("address")), _name(said.get("interface"))
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    except OSError:
        raise ValueError("an address is missing") from None
    if not _INTERFACE.fullmatch(interface):
        raise ValueError("no name of an interface")
    ports = _tuple(said.get("ports"), PORTS_OFFERED, _port)
    return Offer(address=address, interface=interface, ports=ports)


def _start(told: Mapping[str, Any]) -> Start:
    nnodes, node_rank = _integer(told.get("nnodes"), 1, NODES), told.get("node_rank")
    return Start(
        attempt=_integer(told.get("attempt"), 1, ATTEMPTS),
        nnodes=nnodes,
        # The head itself is node 0 of every attempt.
        node_rank=None if node_rank is None else _integer(node_rank, 1, nnodes - 1),
        port=_port(told.get("port")),
    )


def _target(said: object) -> tuple[int, Offer]:
    told = _fields(said)
    return _integer(told.get("target"), 0, NODES), _offer(told)


def _failure(said: object) -> Failure:
    told = _fields(said)

    def bytes_of(name: str) -> int:
        return _integer(told.get(name), 0, 1 << 31)

    return Failure(
        source=_integer(told.get("source"), 0, NODES),
        target=_integer(told.get("target"), 0, NODES),
        port=_port(told.get("port")),
        size=bytes_of("size"),
        arrived=bytes_of("arrived"),
        packet=bytes_of("packet"),
        why=_name(told.get("why")),
    )


def _node(said: object) -> int:
    return _integer(said, 0, NODES)


def _one_of(said: object, allowed: tuple[str, ...]) -> str:
    if said not in allowed:
        raise ValueError("an unknown word")
    return str(said)


def _measure(told: Mapping[str, Any]) -> Measure:
    return Measure(
        stage=_integer(told.get("stage"), 0, NODES),
        kind=_one_of(told.get("kind"), KINDS),
        mode=_one_of(told.get("mode"), MODES),
        limit_s=_integer(told.get("limit_s"), 1, LONGEST_STAGE_S),
        group=_tuple(told.get("group"), NODES, _node),
        store=_integer(told.get("store"), 0, 65535),
    )


def _measured(told: Mapping[str, Any]) -> Measured:
    return Measured(
        stage=_integer(told.get("stage"), 0, NODES),
        figures=_tuple(told.get("figures"), FIGURES, _figure),
        failed=_tuple(told.get("failed"), REMARKS, _remark),
        notes=_tuple(told.get("notes"), REMARKS, _remark),
        error=_remark(told.get("error")),
        mute=_flag(told.get("mute")),
    )


def _figure(said: object) -> tuple[str, float]:
    if not isinstance(said, list) or len(said) != 2:
        raise ValueError("a figure is missing")
    name, value = said
    if type(value) not in (int, float) or abs(value) > _PLACE:  # JSON here has no NaN (json_text.py)
        raise ValueError("a number is missing or out of range")
    return _name(name), float(value)


def _remark(said: object) -> str:
    return _text(said, REMARK)
