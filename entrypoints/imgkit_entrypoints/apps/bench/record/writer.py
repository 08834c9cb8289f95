"""One run as it grows: its results, and the file of --save, written anew after every size."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, fabric, facts, files
from imgkit_entrypoints.apps.bench.record.schema import SCHEMA, TOOL, Result, World
from imgkit_entrypoints.errors import ImgkitError, UsageError


@dataclass(kw_only=True)
class Record:
    """Everything of a run that --save keeps."""

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
    """Of ``--compare``; else empty."""

    def to_json(self) -> str:
        """The file's text; fields: docs/bench-report.md."""
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
        """Write the file, whole or not at all.

        Raises
        ------
        UsageError : it cannot be written.
        """
        hint = "name a writable file: --save FILE"
        with files.replacing(path, failed="cannot save", hint=hint) as file:
            file.write((self.to_json() + "\n").encode())


def writable(path: Path) -> None:
    """Check that a file can be made there.

    Raises
    ------
    UsageError : it cannot.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = "is a folder" if path.is_dir() else "cannot be written"
        raise UsageError(what, where=str(path), hint="name a file in a writable folder: --save FILE")


def _result(item: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(item)
    if item.timing == "batched":
        for name in ("p50_us", "p95_us", "p99_us", "cv", "times_us"):
            del fields[name]
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a node's files say of it, as far as a benchmark needs it."""

    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    fabric: str
    cpus: int


def machine(env: Mapping[str, str], nodes: int, ranks_per_node: int, software: Mapping[str, str]) -> Machine:
    """This node's fingerprint: named facts only, never the environment, which holds secrets."""
    try:
        host, system = facts.gather(env=env), facts.system_facts(env=env)
        network = fabric.choose(host, system, env, nnodes=nodes, head=env.get("MASTER_ADDR", ""))
    except ImgkitError:
        return Machine(
            fingerprint={"imgkit": __version__, **software},
            line_rate_Gbps=None,
            fabric="",
            cpus=ranks_per_node,
        )
    gpus = sorted({gpu.model for gpu in host.gpu_devices})
    found = {
        "imgkit": __version__,
        **software,
        "driver": host.driver,
        "gpu": ", ".join(gpus),
        "image": system.title or system.scheduler if system else "",
        "fabric": network.kind,
        "fabric_devices": ",".join(network.devices),
        "arch": host.arch,
        "python": platform.python_version(),
        "cpus_per_rank": str(max(1, host.cpus // ranks_per_node)),
        "omp_num_threads": env.get("OMP_NUM_THREADS", ""),
    }
    return Machine(
        fingerprint={name: text for name, text in found.items() if text},
        line_rate_Gbps=network.line_rate_Gbps,
        fabric=network.kind,
        cpus=host.cpus,
    )


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
) -> Result:
    """A result from `seconds` of one operation; with `times` (seconds) that of every iteration."""
    from imgkit_entrypoints.apps.bench.judge.spread import percentile, variation

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
