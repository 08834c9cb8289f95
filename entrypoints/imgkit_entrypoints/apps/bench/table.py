"""The table that is printed while a run goes on."""

from __future__ import annotations

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.dtypes import Dtype
from imgkit_entrypoints.apps.bench.record.values import Result, World

HEADER = (
    f"{'size':>32}  {'batches: median, slowest rank':^61}  {'each iteration, after a barrier':^39}",
    f"{'bytes':>12} {'x1024':>9} {'x1000':>9}  {'n':>5} {'us':>11} {'band %':>9} {'algbw GBps':>10} "
    f"{'busbw GBps':>10} {'Gbps':>9}  {'n':>5} {'p50 us':>11} {'p95':>9} {'p99':>9} {'cv %':>5} {'wrong':>7}",
)


def title(op: Collective, dtype: Dtype, world: World, group: str, ranks: int, variant: str) -> str:
    """The line above the table: the collective, its variant, the ranks and the unit."""
    number = "1 rank" if world.ranks == 1 else f"{world.ranks} ranks"
    kind = f"{op.name} {dtype.torch}{' sum' if op.sums and not op.variant else ''}, {number}, {world.backend}"
    if group != "world":
        kind += f", {world.ranks // ranks} groups of {ranks} at once ({group})"
    if variant:
        kind += f"; {variant}"
    return (
        f"{kind}, {world.nodes} nodes; 1 GBps = 1e9 B/s" if world.nodes > 1 else f"{kind}; 1 GBps = 1e9 B/s"
    )


def line(batched: Result, single: Result) -> str:
    """The row of one size, with both timings."""
    size, wrong = batched.size_bytes, single.wrong
    return (
        f"{size:12} {sizes.binary(size):>9} {sizes.decimal(size):>9}  {batched.iterations:5} "
        f"{batched.median_us:11.1f} {band(batched):>9} {batched.median_algbw_GBps:10.3f} "
        f"{batched.median_busbw_GBps:10.3f} {8 * batched.median_busbw_GBps:9.2f}  "
        f"{single.iterations:5} {single.p50_us or 0:11.1f} {single.p95_us or 0:9.1f} "
        f"{single.p99_us or 0:9.1f} {100 * (single.cv or 0):5.0f} "
        f"{'-' if wrong is None else wrong:>7}"
    )


def band(one: Result) -> str:
    """The spread of the batches around their median, in percent: ``-3 +12``."""
    found = one.spread_us
    low, high = (100 * (value / found.median - 1) for value in (found.low, found.high))
    return f"{low:.0f} {high:+.0f}".replace("-0 ", "0 ")
