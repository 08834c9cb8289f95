"""The saved run: its values, the file that ``--save`` writes again after every size, and its checked reader.

Fields: docs/bench-report.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from imgkit_entrypoints import __version__, files, json_text
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1
TOOL = "dist-bench"

Timing = Literal["batched", "iteration"]
TIMINGS: tuple[Timing, ...] = ("batched", "iteration")


BAND = ("low_us", "median_us", "high_us")
"""Fields that the file has for programs, calculated from the times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks and the nodes they ran on."""

    ranks: int
    nodes: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    backend: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One collective at one size, with one kind of timing. GBps is 1e9 B/s."""

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
    """Elements that differ from the expected ones; None: values were not verified."""
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv: float | None = None
    times_us: tuple[float, ...] = ()
    """The slowest rank's time of each iteration; empty for batched timing."""
    batches_us: tuple[float, ...] = ()
    """The slowest rank's time of one operation in each batch; empty for timing per iteration."""

    variant: str = ""
    """What differs from the plain operation, in words: "avg, out of place"."""

    @property
    def spread_us(self) -> Spread:
        """The spread of the batches or iterations."""
        return spread(self.batches_us or self.times_us)

    @property
    def median_us(self) -> float:
        """The median of the batches or iterations."""
        return self.spread_us.median if self.batches_us else self.time_us

    @property
    def median_algbw_GBps(self) -> float:
        """The bandwidth that belongs to `median_us`."""
        return self.algbw_GBps * self.time_us / self.median_us

    @property
    def median_busbw_GBps(self) -> float:
        """The bus bandwidth that belongs to `median_us`."""
        return self.busbw_GBps * self.time_us / self.median_us

    def undecided(self, other: Result) -> bool:
        """True if the ratio of both may be chance: their spreads overlap."""
        return self.spread_us.overlaps(other.spread_us)

    @property
    def key(self) -> tuple[str, str, str, str, int, Timing]:
        """Identifies the result: two runs' results with equal keys can be compared."""
        return self.op, self.group, self.dtype, self.variant, self.size_bytes, self.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One saved run."""

    where: str
    """The file's path, for errors and labels."""
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
    transport: tuple[str, ...] = ()
    """The transports that NCCL's log names: ``network IB``, ``via NET/IB with GDRDMA``."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Bytes that left the nodes through each port during the batches of the largest sizes."""
    seen: bool = False
    """True if the ports counted all network traffic, so that `carried` is complete."""


@dataclass(kw_only=True)
class Record:
    """Everything that ``--save`` keeps of a run."""

    started: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    results: list[Result] = field(default_factory=list)
    verdict: dict[str, Any] = field(default_factory=lambda: {"sentences": []})
    complete: bool = False
    transport: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of the file; fields: docs/bench-report.md."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "tool": TOOL,
                "version": __version__,
                "complete": self.complete,
                "started": self.started,
                "command": list(self.command),
                "world": dataclasses.asdict(self.world),
                "fingerprint": dict(self.fingerprint),
                "line_rate_Gbps": self.line_rate_Gbps,
                "results": [_written_result(item) for item in self.results],
                "transport": list(self.transport),
                "verdict": self.verdict,
            },
            indent=1,
        )

    def save(self, path: Path) -> None:
        """Write the file whole, or leave the old one.

        Raises
        ------
        UsageError : it cannot be written.
        """
        hint = "name a writable file: --save FILE"
        with files.replacing(path, failed="cannot save", hint=hint) as file:
            file.write((self.to_json() + "\n").encode())


def writable(path: Path) -> None:
    """Check that a file can be written at `path`.

    Raises
    ------
    UsageError : it is a folder, or its folder is not writable.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = "is a folder" if path.is_dir() else "cannot be written"
        raise UsageError(what, where=str(path), hint="name a file in a writable folder: --save FILE")


def _written_result(item: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(item)
    unused = ("p50_us", "p95_us", "p99_us", "cv", "times_us") if item.timing == "batched" else ("batches_us",)
    for name in unused:
        del fields[name]
    found = item.spread_us
    return fields | dict(zip(BAND, (found.low, found.median, found.high), strict=True))


def new_result(
    op: str,
    factor: float,
    seconds: float,
    *,
    size_bytes: int,
    dtype: str,
    group: str,
    iterations: int,
    wrong: int | None,
    times: Sequence[float] | None = None,
    batches: Sequence[float] = (),
    variant: str = "",
) -> Result:
    """Make a result from the `seconds` of one operation.

    `times` are the seconds of each iteration, `batches` those of one operation in each batch.
    """
    algbw = size_bytes / seconds / 1e9
    made = Result(
        op=op,
        size_bytes=size_bytes,
        dtype=dtype,
        group=group,
        timing="iteration" if times else "batched",
        iterations=iterations,
        time_us=seconds * 1e6,
        algbw_GBps=algbw,
        busbw_GBps=algbw * factor,
        wrong=wrong,
        variant=variant,
        batches_us=tuple(value * 1e6 for value in batches),
    )
    if not times:
        return made
    ordered = sorted(times)
    return dataclasses.replace(
        made,
        p50_us=percentile(ordered, 0.50) * 1e6,
        p95_us=percentile(ordered, 0.95) * 1e6,
        p99_us=percentile(ordered, 0.99) * 1e6,
        cv=variation(ordered),
        times_us=tuple(value * 1e6 for value in times),
    )


_MOST_BYTES = 64 << 20
"""A record with the times of all iterations is large."""


def load(path: Path) -> BenchRun:
    """Read a saved run.

    Raises
    ------
    UsageError : the file cannot be read, dist-bench did not write it, or it has another schema.
    """
    hint = f"name a file written by: {TOOL} --save FILE"
    try:
        data = json_text.load(path, most_bytes=_MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=str(path), hint=hint) from error
    except ValueError as error:
        raise UsageError(f"not valid JSON: {error}", where=str(path), hint=hint) from error
    return parse(data, str(path))


def parse(data: object, where: str) -> BenchRun:
    """Check the parsed JSON; `where` names it in errors. Unknown fields of later versions are ignored.

    Raises
    ------
    UsageError : a field is wrong; names its place in the file.
    """
    top = _Fields(data, where)
    if top.data.get("tool") != TOOL:
        top.refuse(f"not a file written by {TOOL}", hint=f"write one with: {TOOL} --save FILE")
    if top.value("schema") != SCHEMA or isinstance(top.data["schema"], bool):
        written = top.data.get("version", "unknown")
        top.refuse(
            f"schema {top.data.get('schema')!r}; this imgkit reads schema {SCHEMA}",
            hint=f"read it with imgkit {written}, which wrote it",
        )
    world = _Fields(top.value("world"), f"{where}: world")
    results = tuple(
        _parsed_result(_Fields(entry, f"{where}: results[{index}]"))
        for index, entry in enumerate(top.array("results"))
    )
    seen: set[tuple[str, str, str, str, int, Timing]] = set()
    for index, result in enumerate(results):
        if result.key in seen:
            top.refuse(f"results[{index}] repeats {result.op}, {result.size_bytes} B, {result.timing}")
        seen.add(result.key)
    verdict = _Fields(top.data.get("verdict", {"sentences": []}), f"{where}: verdict")
    return BenchRun(
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


def _parsed_result(entry: _Fields) -> Result:
    timing = entry.text("timing")
    if timing not in TIMINGS:
        entry.refuse(f"unknown timing {timing!r}", hint=f"one of: {', '.join(TIMINGS)}")
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
        variant=entry.text("variant"),
        batches_us=_batches(entry) if not spread else (),
    )
    if spread and (not times or not all(times)):
        entry.refuse("times_us must hold at least one time, and only times above 0")
    for name in ("time_us", *BAND):  # the band is calculated again, and checked like all other fields
        if not entry.number(name):
            entry.refuse(f"{name} is 0")
    # This catches figures in another unit before they share an axis. The margin allows rounded figures.
    expected = made.size_bytes / made.time_us / 1e3
    if not math.isclose(made.algbw_GBps, expected, rel_tol=0.01, abs_tol=0.001):
        entry.refuse(
            f"{made.size_bytes} B in {made.time_us:g} us are {expected:.4g} GBps, not {made.algbw_GBps:g}",
            hint="1 GBps = 1e9 B/s; do not edit saved files by hand",
        )
    return made


def _batches(entry: _Fields) -> tuple[float, ...]:
    found = tuple(entry.number_of("batches_us", value) for value in entry.array("batches_us"))
    if not found or not all(found):
        entry.refuse("batches_us must hold at least one time, and only times above 0")
    return found


class _Fields:
    """A JSON object of the file; each member is checked when it is read."""

    def __init__(self, data: object, where: str) -> None:
        self.where = where
        if not isinstance(data, dict):
            self.refuse("expected a JSON object")
        self.data: Mapping[str, object] = data

    def refuse(self, what: str, hint: str | None = None) -> NoReturn:
        raise UsageError(what, where=self.where, hint=hint or "docs/bench-report.md lists the fields")

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
            self.refuse(f"{name} must be a whole number of at least {least}")
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
            self.refuse(f"{name} is {number!r}, not a finite number of at least 0")
        return number

    def array(self, name: str) -> list[object]:
        value = self.value(name)
        if not isinstance(value, list):
            self.refuse(f"{name} is not an array")
        return value

    def objects(self, name: str) -> tuple[_Fields, ...]:
        """The objects of an array; empty if the array is missing."""
        entries = self.array(name) if name in self.data else ()
        return tuple(_Fields(entry, f"{self.where}: {name}[{index}]") for index, entry in enumerate(entries))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._text(name, value) for value in self.array(name))

    def scalars(self) -> Mapping[str, str]:
        """All members as texts, without those that are null."""
        return {
            self._text("a name", name): self._text(
                name, value if isinstance(value, str) else json.dumps(value)
            )
            for name, value in self.data.items()
            if value is not None
        }

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            self.refuse(f"{name} holds {value!r}, not a string")
        # JSON can hold half of a surrogate pair, which no page could be written with.
        return value.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The range of a set of times, without the fastest and the slowest tenth."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """True if a difference from `other` may be chance."""
        return self.low <= other.high and other.low <= self.high


def spread(times: Sequence[float]) -> Spread:
    """The spread of at least one time; with fewer than ten, none is left out."""
    ordered = sorted(times)
    cut = len(ordered) // 10
    return Spread(low=ordered[cut], median=statistics.median(ordered), high=ordered[-1 - cut])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted `ordered`: always a measured value, never an interpolated one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def variation(values: Sequence[float]) -> float:
    """Standard deviation divided by the mean; 0 for one value."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
