"""The numbers of a run: the lines of its ``metrics.jsonl``, which dist-train or another program writes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text

METRICS = "metrics.jsonl"
_TAIL_BYTES = 64 << 10
_LONGEST_LINE = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LastNumbers:
    """The last numbers that a run has written; None: it has written none."""

    step: int | None = None
    loss: float | None = None


def tail(folder: Path) -> LastNumbers:
    """Return the last numbers of the run in `folder`."""
    step = None
    # A killed run repeats steps when it goes on: the last line counts, not the highest step.
    for numbers in reversed(rows(folder)):
        line_step = numbers.pop("step", None)
        if type(line_step) is not int or not 0 <= line_step < 1 << 62:
            continue
        step = line_step if step is None and numbers else step
        if "loss" in numbers:
            return LastNumbers(step=step, loss=float(numbers["loss"]))
    return LastNumbers(step=step)


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the numbers in the last lines of the metrics of the run in `folder`, the oldest line first."""
    # JSON's true is an int in Python.
    return [
        {key: value for key, value in line.items() if type(value) in (int, float)}
        for line in _objects(_last_lines(folder / METRICS))
    ]


def _objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among `lines`."""
    for line in lines:
        try:
            values = json_text.parse(line, most_bytes=_LONGEST_LINE)
        except ValueError:
            continue  # half a line of a run that was killed, or of the file's part that was read
        if isinstance(values, dict):
            yield values


def _last_lines(file: Path) -> list[bytes]:
    """Return the lines in the last 64 KiB of `file`; none if it cannot be read."""
    # Of a long run, reading all lines would take longer than the verb itself.
    try:
        with files.open_regular(file) as stream:
            stream.seek(0, io.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
