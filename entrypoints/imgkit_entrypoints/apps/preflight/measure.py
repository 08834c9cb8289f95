"""The stages of a preflight on this node: dist-doctor's checks, then dist-bench's measurements."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from imgkit_entrypoints import facts
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import compute, exchange, measurement, options, setup
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.doctor.node import clock_remark, examine
from imgkit_entrypoints.facts import storage
from imgkit_entrypoints.rollcall.messages import MeasureRequest, MeasureResult
from imgkit_entrypoints.run.ranks import Ranks

SECONDS: Mapping[str, float] = {"quick": 0.3, "full": 1.0}
"""Time of one measurement, by the preflight's mode."""
SUMS: Mapping[str, int] = {"quick": 5, "full": 20}
"""Sums over all nodes in a batch; at least 20 more are verified."""
SMALL_TURNS = 3
"""The exchange of a few bytes takes milliseconds, so one busy moment would spoil it; the best turn counts."""
PROBE_BYTES = 8
"""So small that no link, however slow, makes a difference; only the processes do."""
EXCHANGED_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Small enough that a link of 20 Mbit/s still gives a figure within the limit of its stage."""


MOST_TEXTS, MOST_CHARACTERS = 16, 500
"""Checks and notes of one stage, and characters of each."""


def stage(order: MeasureRequest) -> MeasureResult:
    """Measure one stage; a collective call of the nodes in ``order.group``.

    Raises
    ------
    Exception : of any type: what torch's backends raise, and what a device cannot do.
    """
    return {"alone": _alone, "pair": _pair, "all": _all}[order.kind](order)


def _alone(order: MeasureRequest) -> MeasureResult:
    """Check this node and measure its devices and its disk; the slowest device counts."""
    cuda = os.environ.get("IMGKIT_DEVICE") == "cuda"
    host = facts.gather()
    reader = facts.Reader(root=facts.root_of(os.environ))
    checks = examine(host, facts.system_facts(), os.environ, reader=reader, nnodes=2 if cuda else 1)
    torch.set_num_threads(max(1, host.cpus))
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if cuda else []
    speeds = []
    with _joined(order, dist.HashStore(), torch.device("cpu")) as here:
        for device in devices or [here.device]:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # its events belong to the current device
            speeds.append(compute.measure_device(replace(here, device=device), SECONDS[order.mode]))
    figures = {
        "matmul": min(speed.matmul_TFLOPs for speed in speeds),
        "memory": min(speed.memory_GBps for speed in speeds),
    }
    notes = [f"{check.verdict} {check.name}: {check.evidence}" for check in checks if check.verdict == "warn"]
    try:
        figures["disk"] = storage.write_MBps(Path(tempfile.gettempdir()))
    except OSError as error:
        notes.append(f"{tempfile.gettempdir()} cannot be written: {error.strerror}")
    return MeasureResult(
        stage=order.stage,
        figures=tuple(figures.items()),
        failed=_few([f"{check.name}: {check.evidence}" for check in checks if check.verdict == "fail"]),
        notes=_few(notes),
    )


def _few(texts: Sequence[str]) -> tuple[str, ...]:
    """Return what fits into a message."""
    return tuple(text[:MOST_CHARACTERS] for text in texts[:MOST_TEXTS])


def _pair(order: MeasureRequest) -> MeasureResult:
    """Exchange a few bytes and many with the partner."""
    with _met(order) as here:
        measurer = setup.set_up(
            _options(order, "--seconds", str(SECONDS[order.mode]), "--no-verify"), here
        ).measurer

        def rate_GBps(size_bytes: int) -> float:
            return exchange.measure_exchange_GBps(measurer, size_bytes)

        small = [rate_GBps(PROBE_BYTES) for _ in range(SMALL_TURNS - 1)]
        bandwidth = rate_GBps(EXCHANGED_BYTES[here.device.type])
        small.append(rate_GBps(PROBE_BYTES))
    latency_us = PROBE_BYTES / max(small) / 1e3
    return MeasureResult(stage=order.stage, figures=(("latency", latency_us), ("bandwidth", bandwidth)))


def _all(order: MeasureRequest) -> MeasureResult:
    """Sum up over all nodes, with verified values, and compare the clocks."""
    with _met(order) as here:
        whole = setup.set_up(_options(order, "--iters", str(SUMS[order.mode])), here)
        op = named("all_reduce")
        found = whole.measurer.measure(op, EXCHANGED_BYTES[here.device.type])
        measurement.meet(here)
        now_s = time.time()
        note = clock_remark(now_s, here.gather(now_s, float))
    once_s = statistics.median(found.batches) / found.counts.launches
    rate = op.busbw_GBps(found.size_bytes, once_s, here.world_size)
    wrong = (f"{found.wrong} wrong elements in all_reduce",) if found.wrong else ()
    return MeasureResult(
        stage=order.stage,
        figures=(("all_reduce", rate),),
        failed=wrong,
        notes=(note,) if note else (),
    )


def _options(order: MeasureRequest, *words: str) -> options.BenchOptions:
    return options.read(["--timeout", str(order.limit_s), *words])


def _met(order: MeasureRequest) -> contextlib.AbstractContextManager[Ranks]:
    """Join the nodes of the order in the store of the head."""
    limit = datetime.timedelta(seconds=order.limit_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], order.store, is_master=False, timeout=limit)
    name = f"{order.stage}/{order.group[0]}"
    cuda = os.environ.get("IMGKIT_DEVICE") == "cuda"
    return _joined(
        order, dist.PrefixStore(name, store), torch.device("cuda", 0) if cuda else torch.device("cpu")
    )


@contextlib.contextmanager
def _joined(order: MeasureRequest, store: dist.Store, device: torch.device) -> Iterator[Ranks]:
    rank = order.group.index(int(os.environ["GROUP_RANK"]))
    with ranks.opened(
        order.limit_s, device=device, store=store, rank=rank, world_size=len(order.group)
    ) as here:
        yield here
