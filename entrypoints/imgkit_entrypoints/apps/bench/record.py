"""The results of a run, and the files that hold them: JSON and CSV, written again after every size."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, files
from imgkit_entrypoints.apps.bench.collectives import ROOT, Collective, find_collective
from imgkit_entrypoints.apps.bench.verify import Dtype, dtype_named
from imgkit_entrypoints.errors import UsageError

# Version of the JSON of nccl-tests (``-J``, src/util.cu of v2.17 and later) whose fields ours has.
FILE_VERSION = 1


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
    """One collective at one size. GBps is 1e9 B/s."""

    collective: str
    dtype: str
    size_bytes: int
    count: int
    """Elements of the whole size."""
    iterations: int
    """Timed iterations, in all batches together."""
    time_us: float
    """Time of one operation on the slowest rank: the median of the batches."""
    low_us: float
    """Like `high_us`, the range of the batches without their fastest and slowest tenth."""
    high_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None
    """Elements that differ from the expected ones. None means that values were not verified."""

    @property
    def type(self) -> str:
        """The element type, by nccl-tests' name."""
        return dtype_named(self.dtype).nccl

    @property
    def redop(self) -> str:
        """The reduction, as nccl-tests prints it."""
        return "sum" if find_collective(self.collective).sums else "none"

    @property
    def root(self) -> int:
        """The root's rank, or -1, as nccl-tests prints it."""
        return ROOT if find_collective(self.collective).has_root else -1

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of nccl-tests' JSON.

        nccl-tests runs each operation out of place (with two buffers) and in place (with one). torch offers
        one of the two, so the entry of the other is None.
        """
        figures = {
            "time": self.time_us,
            "alg_bw": self.algbw_GBps,
            "bus_bw": self.busbw_GBps,
            "nwrong": self.wrong,
            "low": self.low_us,
            "high": self.high_us,
        }
        out_of_place = None
        in_place: dict[str, Any] | None = figures
        if find_collective(self.collective).separate:
            out_of_place, in_place = figures, None
        return {
            "experiment_name": self.collective,
            "size": self.size_bytes,
            "count": self.count,
            "type": self.type,
            "redop": self.redop,
            "root": self.root,
            "out_of_place": out_of_place,
            "in_place": in_place,
            "actual_iterations": self.iterations,
        }


def mean_busbw_GBps(results: Sequence[Result]) -> float:
    """Return nccl-tests' "Avg bus bandwidth". It is 0 without a result."""
    if not results:
        return 0.0
    return statistics.fmean(result.busbw_GBps for result in results)


def new_result(
    collective: Collective,
    dtype: Dtype,
    *,
    size_bytes: int,
    iterations: int,
    seconds: Sequence[float],
    ranks: int,
    wrong: int | None,
) -> Result:
    """Return the result of one size. Its time is the median of the batches.

    Parameters
    ----------
    seconds : seconds of one operation in each batch.
    wrong : number of wrong elements; None if they were not verified.
    """
    ordered = sorted(seconds)
    # The fastest and the slowest tenth do not count for the range.
    cut = len(ordered) // 10
    median = statistics.median(ordered)
    return Result(
        collective=collective.name,
        dtype=dtype.name,
        size_bytes=size_bytes,
        count=size_bytes // dtype.item_bytes,
        iterations=iterations,
        time_us=median * 1e6,
        low_us=ordered[cut] * 1e6,
        high_us=ordered[-1 - cut] * 1e6,
        algbw_GBps=size_bytes / median / 1e9,
        busbw_GBps=collective.busbw_GBps(size_bytes, median, ranks),
        wrong=wrong,
    )


@dataclass(kw_only=True)
class RunRecord:
    """Everything that the files keep of a run."""

    started: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    results: list[Result] = field(default_factory=list)
    transport: tuple[str, ...] = ()
    """The transports that NCCL's log names: ``network IB``, ``via NET/IB with GDRDMA``."""
    complete: bool = False

    @property
    def wrong(self) -> int:
        """Wrong elements of all results."""
        return sum(result.wrong or 0 for result in self.results)

    def to_json(self, verdict: Mapping[str, Any]) -> str:
        """Return the text of the JSON file; docs/guides/bench.md lists the fields."""
        data = {
            "version": FILE_VERSION,
            "start_time": self.started,
            "args": list(self.command),
            "results": [result.to_dict() for result in self.results],
            # nccl-tests writes these truth values as texts.
            "out_of_bounds": {"count": self.wrong, "okay": "false" if self.wrong else "true"},
            "average_bus_bandwidth": {"bandwidth": mean_busbw_GBps(self.results), "okay": "unchecked"},
            "imgkit": __version__,
            "complete": self.complete,
            "world": dataclasses.asdict(self.world),
            "fingerprint": dict(self.fingerprint),
            "line_rate_Gbps": self.line_rate_Gbps,
            "transport": list(self.transport),
            "verdict": dict(verdict),
        }
        return json.dumps(data, indent=1) + "\n"

    def to_csv(self) -> str:
        """Return the text of the CSV file: one row per result."""
        text = io.StringIO()
        names = [column.name for column in dataclasses.fields(Result)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(result) for result in self.results)
        return text.getvalue()


def save(path: Path, text: str, usage: str) -> None:
    """Write a file as a whole, or leave the old one.

    Parameters
    ----------
    usage : what chooses the file: ``--save FILE``.

    Raises
    ------
    UsageError : it cannot be written.
    """
    with files.replace_named_file(path, failed="cannot save", hint=f"name a writable file: {usage}") as file:
        file.write(text.encode())


def refuse_unwritable(path: Path, usage: str) -> None:
    """Refuse a path at which no file can be written.

    Parameters
    ----------
    usage : what chooses the file: ``--save FILE``.

    Raises
    ------
    UsageError : it is a folder, or its folder is not writable.
    """
    hint = f"name a file in a writable folder: {usage}"
    if path.is_dir():
        raise UsageError("is a folder", where=str(path), hint=hint)
    if not os.access(path.parent, os.W_OK):
        raise UsageError("cannot be written", where=str(path), hint=hint)
