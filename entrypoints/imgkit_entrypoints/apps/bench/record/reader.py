"""Read a file that ``dist-bench --save`` wrote, and check every field. See docs/bench-report.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from imgkit_entrypoints import json_text
from imgkit_entrypoints.apps.bench.record.values import (
    BAND,
    SCHEMA,
    TIMINGS,
    TOOL,
    BenchRun,
    Result,
    Timing,
    World,
)
from imgkit_entrypoints.errors import UsageError

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
        _result(_Fields(entry, f"{where}: results[{index}]"))
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
