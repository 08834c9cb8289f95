"""The results of a run, and the JSON and CSV files with them, which are rewritten after every size."""

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

# Version of nccl-tests' JSON format (``-J``, src/util.cu of v2.17 and later). Our file has all of its fields.
FILE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run, and the nodes and devices on which they ran."""

    ranks: int
    nodes: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    backend: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one collective at one size. 1 GBps is 1e9 B/s."""

    collective: str
    dtype: str
    size_bytes: int
    count: int
    """Number of elements that correspond to `size_bytes`."""
    iterations: int
    """Number of timed iterations in all batches together."""
    time_us: float
    """Time of one operation on the slowest rank, which is the median over the batches."""
    low_us: float
    """`low_us` and `high_us` are the range of the batches without the fastest and the slowest tenth."""
    high_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None
    """Number of elements with a wrong value. None means that values were not verified."""

    @property
    def type(self) -> str:
        """The element type under the name that nccl-tests uses."""
        return dtype_named(self.dtype).nccl

    @property
    def redop(self) -> str:
        """The reduction, as nccl-tests prints it."""
        return "sum" if find_collective(self.collective).adds_values else "none"

    @property
    def root(self) -> int:
        """The rank of the root, or -1 if the collective has no root, as in nccl-tests."""
        return ROOT if find_collective(self.collective).has_root else -1

    def to_dict(self) -> dict[str, Any]:
        """Return the result as an entry in the format of nccl-tests' JSON.

        nccl-tests runs each operation out of place (with two buffers) and in place (with one buffer). torch
        supports only one of the two, so the entry for the other one is None.
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
        if find_collective(self.collective).has_separate_output:
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
    """Return the mean bus bandwidth (nccl-tests' "Avg bus bandwidth"), or 0 if there is no result."""
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
    """Return the result of one collective at one size. Its time is the median over the batches.

    Parameters
    ----------
    seconds : mean duration of one operation in each batch, in seconds.
    wrong : number of wrong elements, or None if values were not verified.
    """
    ordered = sorted(seconds)
    # The range leaves out the fastest and the slowest tenth of the batches, which may be outliers.
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
    """All values of a run that are saved in files."""

    started: str
    """Time of the start in UTC, in the format of ISO 8601."""
    command: tuple[str, ...]
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    results: list[Result] = field(default_factory=list)
    transport: tuple[str, ...] = ()
    """The transports in NCCL's log, such as ``network IB`` and ``via NET/IB with GDRDMA``."""
    complete: bool = False

    @property
    def wrong(self) -> int:
        """Number of wrong elements in all results together."""
        return sum(result.wrong or 0 for result in self.results)

    def to_json(self, verdict: Mapping[str, Any]) -> str:
        """Return the content of the JSON file. Its fields are explained in docs/guides/bench.md."""
        data = {
            "version": FILE_VERSION,
            "start_time": self.started,
            "args": list(self.command),
            "results": [result.to_dict() for result in self.results],
            # nccl-tests writes these booleans as strings.
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
        """Return the content of the CSV file, which has one row per result."""
        text = io.StringIO()
        names = [column.name for column in dataclasses.fields(Result)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(result) for result in self.results)
        return text.getvalue()


def save(path: Path, text: str, usage: str) -> None:
    """Write a file atomically: if writing fails, the old file is kept.

    Parameters
    ----------
    usage : option or variable that selects the file, for messages: ``--save FILE``.

    Raises
    ------
    UsageError : the file cannot be written.
    """
    with files.replace_named_file(path, failed="cannot save", hint=f"name a writable file: {usage}") as file:
        file.write(text.encode())


def refuse_unwritable(path: Path, usage: str) -> None:
    """Raise an error if no file can be written at `path`.

    Parameters
    ----------
    usage : option or variable that selects the file, for messages: ``--save FILE``.

    Raises
    ------
    UsageError : `path` is a folder, or its parent folder is not writable.
    """
    hint = f"name a file in a writable folder: {usage}"
    if path.is_dir():
        raise UsageError("is a folder", where=str(path), hint=hint)
    if not os.access(path.parent, os.W_OK):
        raise UsageError("cannot be written", where=str(path), hint=hint)
