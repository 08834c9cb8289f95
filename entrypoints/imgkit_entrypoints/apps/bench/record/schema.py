"""The file that ``dist-bench --save`` writes: read, checked, turned into values. See docs/bench-report.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from imgkit_entrypoints.errors import UsageError

SCHEMA = 1
TOOL = "dist-bench"

Timing = Literal["batched", "iteration"]
TIMINGS: tuple[Timing, ...] = ("batched", "iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where the ranks ran."""

    ranks: int
    nodes: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    backend: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One op at one size, timed in one way. GBps is 1e9 B/s."""

    op: str
    size_bytes: int
    dtype: str
    group: str
    timing: Timing
    iterations: int
    time_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None
    """Elements that differ from the expected ones; None: values were not checked."""
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv: float | None = None
    times_us: tuple[float, ...] = ()
    """Of each iteration the slowest rank's time; empty for batched timing."""

    @property
    def key(self) -> tuple[str, str, str, int, Timing]:
        """What makes two results of two runs comparable."""
        return self.op, self.group, self.dtype, self.size_bytes, self.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One saved run."""

    where: str
    """The file, for errors and labels."""
    version: str
    complete: bool
    started: str
    command: tuple[str, ...]
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    results: tuple[Result, ...]
    sentences: tuple[str, ...]
    """The run's own verdict."""
    arm: str = ""
    """Of ``--compare``; else empty."""
    transport: tuple[str, ...] = ()
    """What NCCL's log says of the way: ``network IB``, ``via NET/IB with GDRDMA``."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Bytes that left the nodes by each port, while the batches of the largest sizes ran."""
    seen: bool = False
    """The ports counted what crossed the network: `carried` is all of it."""


def load(path: Path) -> Run:
    """Read a saved run.

    Raises
    ------
    UsageError : the file cannot be read, is not of dist-bench, or is of another schema.
    """
    hint = f"a file written by: {TOOL} --save FILE"
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}", where=str(path), hint=hint) from error
    return parse(data, str(path))


def parse(data: object, where: str) -> Run:
    """Check what JSON gave; `where` names it in errors. Unknown fields of later versions are ignored.

    Raises
    ------
    UsageError : with the place in the file.
    """
    top = _Fields(data, where)
    if top.data.get("tool") != TOOL:
        top.refuse(f"not a file of {TOOL}", hint=f"write one with: {TOOL} --save FILE")
    if top.value("schema") != SCHEMA or isinstance(top.data["schema"], bool):
        written = top.data.get("version", "unknown")
        top.refuse(
            f"schema {top.data.get('schema')!r}, and this imgkit reads schema {SCHEMA}",
            hint=f"read it with the imgkit that wrote it: version {written}",
        )
    world = _Fields(top.value("world"), f"{where}: world")
    results = tuple(
        _result(_Fields(entry, f"{where}: results[{index}]"))
        for index, entry in enumerate(top.array("results"))
    )
    seen: set[tuple[str, str, str, int, Timing]] = set()
    for index, result in enumerate(results):
        if result.key in seen:
            top.refuse(f"results[{index}] repeats {result.op}, {result.size_bytes} B, {result.timing}")
        seen.add(result.key)
    verdict = _Fields(top.data.get("verdict", {"sentences": []}), f"{where}: verdict")
    return Run(
        where=where,
        version=top.text("version"),
        complete=top.flag("complete"),
        started=top.text("started"),
        command=top.texts("command"),
        world=World(
            ranks=world.whole("ranks", 1),
            nodes=world.whole("nodes", 1),
            ranks_per_node=world.whole("ranks_per_node", 1),
            hosts=world.texts("hosts"),
            backend=world.text("backend"),
            device=world.text("device"),
        ),
        fingerprint=_Fields(top.value("fingerprint"), f"{where}: fingerprint").scalars(),
        line_rate_Gbps=top.number("line_rate_Gbps") if top.data.get("line_rate_Gbps") is not None else None,
        results=results,
        sentences=verdict.texts("sentences"),
        arm=top.text("arm") if "arm" in top.data else "",
        transport=top.texts("transport") if "transport" in top.data else (),
        carried=_carried(verdict),
        seen=any(entry.data.get("measured_Gbps") is not None for entry in verdict.objects("traffic")),
    )


def _carried(verdict: _Fields) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for entry in verdict.objects("ports"):
        name = entry.text("port")
        found[name] = found.get(name, 0) + entry.whole("sent_bytes", 0)
    return found


def _result(entry: _Fields) -> Result:
    timing = entry.text("timing")
    if timing not in TIMINGS:
        entry.refuse(f"timing {timing!r}", hint=f"one of: {', '.join(TIMINGS)}")
    spread = timing == "iteration"
    times = tuple(entry.number_of("times_us", value) for value in entry.array("times_us")) if spread else ()
    made = Result(
        op=entry.text("op"),
        size_bytes=entry.whole("size_bytes", 1),
        dtype=entry.text("dtype"),
        group=entry.text("group"),
        timing=timing,
        iterations=entry.whole("iterations", 1),
        time_us=entry.number("time_us"),
        algbw_GBps=entry.number("algbw_GBps"),
        busbw_GBps=entry.number("busbw_GBps"),
        wrong=entry.whole("wrong", 0) if entry.data.get("wrong") is not None else None,
        p50_us=entry.number("p50_us") if spread else None,
        p95_us=entry.number("p95_us") if spread else None,
        p99_us=entry.number("p99_us") if spread else None,
        cv=entry.number("cv") if spread else None,
        times_us=times,
    )
    if spread and (not times or not all(times)):
        entry.refuse("times_us needs at least one time, all above 0")
    if made.time_us == 0:
        entry.refuse("time_us is 0")
    # Catches figures in another unit before they share an axis; the margin is for rounded figures.
    expected = made.size_bytes / made.time_us / 1e3
    if not math.isclose(made.algbw_GBps, expected, rel_tol=0.01, abs_tol=0.001):
        entry.refuse(
            f"{made.size_bytes} B in {made.time_us:g} us are {expected:.4g} GBps, not {made.algbw_GBps:g}",
            hint="1 GBps = 1e9 B/s; a file is not edited by hand",
        )
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Fields:
    """An object of the file whose members are checked as they are taken."""

    def __init__(self, data: object, where: str) -> None:
        self.where = where
        if not isinstance(data, dict):
            self.refuse("an object is expected here")
        self.data: Mapping[str, object] = data

    def refuse(self, what: str, hint: str | None = None) -> NoReturn:
        raise UsageError(what, where=self.where, hint=hint or "fields of the file: docs/bench-report.md")

    def value(self, name: str) -> object:
        if name not in self.data:
            self.refuse(f"{name} is missing")
        return self.data[name]

    def text(self, name: str) -> str:
        return self._text(name, self.value(name))

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            self.refuse(f"{name} is {value!r}, not true or false")
        return value

    def whole(self, name: str, least: int) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
            self.refuse(f"{name} is no whole number from {least}")
        return value

    def number(self, name: str) -> float:
        return self.number_of(name, self.value(name))

    def number_of(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"{name} is {value!r}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0:
            self.refuse(f"{name} is {number!r}, not a number from 0")
        return number

    def array(self, name: str) -> list[object]:
        value = self.value(name)
        if not isinstance(value, list):
            self.refuse(f"{name} is no array")
        return value

    def objects(self, name: str) -> tuple[_Fields, ...]:
        """Members of an array; none where it is not there."""
        entries = self.array(name) if name in self.data else ()
        return tuple(_Fields(entry, f"{self.where}: {name}[{index}]") for index, entry in enumerate(entries))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._text(name, value) for value in self.array(name))

    def scalars(self) -> Mapping[str, str]:
        """All members as texts; null ones are left out."""
        return {
            self._text("a name", name): self._text(
                name, value if isinstance(value, str) else json.dumps(value)
            )
            for name, value in self.data.items()
            if value is not None
        }

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            self.refuse(f"{name} holds {value!r}, not a text")
        # JSON can hold half of a surrogate pair, and then no page with it could be written.
        return value.encode("utf-8", "replace").decode("utf-8")
