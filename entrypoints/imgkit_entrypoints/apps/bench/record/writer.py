"""The record of one run while it grows; ``--save`` writes it again after every size."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, files
from imgkit_entrypoints.apps.bench.judge.percentiles import percentile, variation
from imgkit_entrypoints.apps.bench.record.values import BAND, SCHEMA, TOOL, Result, World
from imgkit_entrypoints.errors import UsageError


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
    arm: str = ""
    """Arm of ``--compare``; empty otherwise."""

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
                "results": [_result(item) for item in self.results],
                "transport": list(self.transport),
                "verdict": self.verdict,
                **({"arm": self.arm} if self.arm else {}),
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


def _result(item: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(item)
    unused = ("p50_us", "p95_us", "p99_us", "cv", "times_us") if item.timing == "batched" else ("batches_us",)
    for name in unused:
        del fields[name]
    found = item.spread_us
    return fields | dict(zip(BAND, (found.low, found.median, found.high), strict=True))


def result(
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
