"""The numbers of a run: the lines of its ``metrics.jsonl``, which dist-train or another program writes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.apps.train.stragglers import Straggler

METRICS = "metrics.jsonl"
_TAIL_BYTES = 64 << 10
_LONGEST_LINE = 64 << 10
SlowNow: TypeAlias = tuple[Straggler, ...] | None
"""Ranks that are slow; None: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers of a run over its steps."""

    points: Mapping[str, tuple[tuple[int, float], ...]]
    """Name of a number to its steps and values, steps ascending."""

    def last(self, name: str) -> float | None:
        """The value at the last step that has one."""
        return self.points[name][-1][1] if self.points.get(name) else None

    @property
    def step(self) -> int | None:
        """The last step."""
        return max((points[-1][0] for points in self.points.values()), default=None)


def tail(folder: Path) -> Measured:
    """The last numbers of the run; none where there is no file."""
    return _collected(last_lines(folder / METRICS).splitlines())


def last_lines(file: Path) -> bytes:
    """The last 64 KiB of a file; nothing if it cannot be read."""
    try:
        with files.open_regular(file) as stream:
            stream.seek(0, io.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read(_TAIL_BYTES)
    except OSError:
        return b""


def slow_ranks(lines: bytes) -> SlowNow:
    """The ranks that were slow at the last of `lines` that says so; None if no line knows."""
    for line in reversed(lines.splitlines()):
        try:
            values = json_text.parse(line, most_bytes=_LONGEST_LINE)
            ranks = tuple(json_text.read(list[Straggler], values["slow"], "slow"))
            if all(one.node.isprintable() for one in ranks):
                return ranks
        except (ValueError, KeyError, TypeError):
            continue  # held-out data, half a line, or another program's
    return None


def _collected(lines: Iterable[bytes]) -> Measured:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        try:
            values = json_text.parse(line, most_bytes=_LONGEST_LINE)
            step = values.pop("step")
        except (ValueError, AttributeError, KeyError, TypeError):
            continue  # half a line of a run that was killed, or another program's
        if type(step) is not int or not 0 <= step < 1 << 62:
            continue
        for name, value in values.items():
            if type(value) not in (int, float) or abs(value) > 1e300 or not name.isprintable():
                continue
            points = found.setdefault(name, [])
            while points and points[-1][0] >= step:  # a run that was killed repeats steps
                points.pop()
            points.append((step, float(value)))
    return Measured(points={name: tuple(points) for name, points in found.items()})
