"""Read what was measured in a run, from the files in its run folder.

These are the numbers in ``metrics.jsonl``, the bandwidths that dist-bench measured, and the use of the GPUs.
dist-train writes ``metrics.jsonl``, and any other program may write it too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.launch import gpu_use, stop_protocol
from imgkit_entrypoints.rollcall.messages import GpuUse

# The file in a run folder with one JSON object per line, such as ``{"step": 10, "loss": 2.5}``.
METRICS = "metrics.jsonl"
# The file in a run folder with the results of dist-bench (docs/guides/bench.md).
BENCH = "bench.json"
# Only the last 64 KiB of ``metrics.jsonl`` are read, because ``imgkit runs`` reads the files of many runs.
_TAIL_BYTES = 64 << 10
# A line of more than 64 KiB is not a line of metrics, and is skipped.
_MAX_LINE_BYTES = 64 << 10
# A larger number in the field "step" cannot be a number of steps. Such a line is skipped.
_MAX_STEP = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LastNumbers:
    """The last step and the last loss that a run has written. Each is None if the run has not written it."""

    step: int | None = None
    loss: float | None = None


def last_numbers(folder: Path) -> LastNumbers:
    """Return the last step and the last loss of the run in `folder`.

    The two values may be from different lines, because a program need not write the loss in each line. The
    step of the last line is used even if an earlier line has a higher one: a run that was killed repeats
    steps when it is resumed.
    """
    last_step = None
    for numbers in reversed(last_metrics(folder)):
        step = numbers.get("step")
        if type(step) is not int or not 0 <= step < _MAX_STEP:
            continue
        # A line that contains only the step has no results, and does not count.
        has_results = len(numbers) > 1
        if last_step is None and has_results:
            last_step = step
        if "loss" in numbers:
            return LastNumbers(step=last_step, loss=float(numbers["loss"]))
    return LastNumbers(step=last_step)


def last_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the numbers in the last lines of ``metrics.jsonl``, the oldest line first.

    Fields that are not numbers are left out: ``{"step": 1, "name": "a"}`` -> ``{"step": 1}``. Only the last
    64 KiB of the file are read.
    """
    metrics = []
    for fields in _parse_json_lines(_last_lines(folder / METRICS)):
        # The exact type is compared instead of isinstance, because JSON's true is a bool, which is an int in
        # Python.
        metrics.append({name: value for name, value in fields.items() if type(value) in (int, float)})
    return metrics


def _parse_json_lines(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in `lines`. All other lines are skipped."""
    for line in lines:
        try:
            value = json_text.parse(line, most_bytes=_MAX_LINE_BYTES)
        except ValueError:
            # The line is incomplete: a run was killed while it wrote the line, or the part of the file that
            # is read begins within it.
            continue
        if isinstance(value, dict):
            yield value


def _last_lines(file: Path) -> list[bytes]:
    """Return the lines in the last 64 KiB of `file`, or an empty list if it cannot be read.

    The first line may be only the end of a longer line.
    """
    try:
        with files.open_regular(file) as stream:
            size_bytes = stream.seek(0, io.SEEK_END)
            stream.seek(max(0, size_bytes - _TAIL_BYTES))
            return stream.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The bandwidths of a collective, such as ``all_reduce``, at the largest size that dist-bench measured.

    1 GBps is 1e9 bytes per second.
    """

    collective: str
    size_bytes: int
    busbw_GBps: float
    algbw_GBps: float


def read_gpu_use(folder: Path) -> GpuUse | None:
    """Return how much the run in `folder` used its GPUs.

    The result is None if the node agents have not written the file with this information, as in a run on
    CPUs.
    """
    try:
        text = files.read_text(folder / stop_protocol.GPU_USE)
    except (OSError, UnicodeDecodeError):
        return None
    return gpu_use.parse(text)


def read_bandwidths(folder: Path) -> tuple[Bandwidth, ...]:
    """Return the bandwidths of each collective that a run of dist-bench has measured.

    Only dist-bench writes the file ``bench.json``, which contains them. Without this file, or if it cannot be
    read, the result is empty.
    """
    try:
        verdict = json_text.load(folder / BENCH)["verdict"]
        return tuple(json_text.build_value(tuple[Bandwidth, ...], verdict["busbw"], "busbw"))
    except (OSError, ValueError, TypeError, KeyError):
        return ()
