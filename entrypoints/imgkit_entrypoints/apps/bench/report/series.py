"""The lines of a report's charts: the measured ones with their bands, and the published ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.record.values import BenchRun, Result
from imgkit_entrypoints.apps.bench.report.chart import Level, Line, SizeChart, figure
from imgkit_entrypoints.apps.bench.report.reference import Table

MOST_PUBLISHED = 5
"""Published lines in a chart; more would hide the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCurve:
    """One run's results of one op, type, group and timing, by size."""

    label: str
    run: BenchRun
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSet:
    """The charts of one section."""

    bandwidth: SizeChart
    others: tuple[SizeChart, ...]
    left_out: str
    """A sentence about published lines that are not drawn; empty: all are."""


def charts(
    title: str,
    curves: Sequence[BandwidthCurve],
    tables: Sequence[Table],
    *,
    single: Sequence[BandwidthCurve],
    leaves_node: bool,
) -> ChartSet:
    """Bus bandwidth, latency, and the share of the line rate where it is known.

    The latency is that of `single`, the same runs timed per iteration, if all of them have such times.
    """
    timing = f"{curves[0].results[0].timing} times"
    published = sorted(_published(tables), key=lambda one: _distance(one[0], curves))
    drawn = [line for _, line in published[:MOST_PUBLISHED]]
    more = len(published) - len(drawn)
    levels = _levels(curves) if leaves_node else ()
    bandwidth = SizeChart(
        over=title,
        what=f"bus bandwidth, {timing}",
        lines=(*drawn, *(_bandwidth(curve) for curve in curves)),
        levels=levels,
    )
    alone = len(single) == len(curves)
    latency = SizeChart(
        over=title,
        what="latency of iterations, p50 to p95" if alone else f"latency, {timing}",
        unit="us",
        lines=tuple(_latency(curve) for curve in (single if alone else curves)),
    )
    share = SizeChart(
        over=title,
        what="busbw in percent of the line rate",
        unit="%",
        lines=tuple(_share(curve) for curve in curves if curve.run.line_rate_Gbps),
        levels=(Level(label="line rate of a node", value=100.0),),
    )
    left_out = (
        f"The chart has the {MOST_PUBLISHED} published lines whose number of ranks is nearest to the runs; "
        f"{more} more are in the table of published figures."
    )
    return ChartSet(
        bandwidth=bandwidth,
        others=(latency, share) if levels else (latency,),
        left_out=left_out if more > 0 else "",
    )


def _distance(ranks: int, curves: Sequence[BandwidthCurve]) -> float:
    return min(abs(math.log(ranks / curve.run.world.ranks)) for curve in curves)


def _bandwidth(curve: BandwidthCurve) -> Line:
    return _measured(curve, 1.0)


def _share(curve: BandwidthCurve) -> Line:
    return _measured(curve, 800 / (curve.run.line_rate_Gbps or math.inf))


def _measured(curve: BandwidthCurve, scale: float) -> Line:
    """The bandwidth in GBps times `scale`, with its band."""
    results = [one for one in curve.results if one.busbw_GBps > 0]
    moved = {one.size_bytes: one.busbw_GBps * one.time_us * scale for one in results}  # value x time
    return Line(
        label=f"{curve.label}: {world(curve.run)}",
        points=tuple((one.size_bytes, one.median_busbw_GBps * scale) for one in results),
        band=tuple(
            (one.size_bytes, moved[one.size_bytes] / high, moved[one.size_bytes] / low)
            for one, low, high in _spreads(results)
        ),
    )


def _latency(curve: BandwidthCurve) -> Line:
    """The time in us: p50 with the band up to p95 per iteration, else the median with its band."""
    slow = tuple(
        (one.size_bytes, one.p50_us, one.p95_us) for one in curve.results if one.p50_us and one.p95_us
    )
    return Line(
        label=f"{curve.label}: {world(curve.run)}",
        points=tuple((one.size_bytes, one.p50_us or one.median_us) for one in curve.results),
        band=slow or tuple((one.size_bytes, low, high) for one, low, high in _spreads(curve.results)),
    )


def _spreads(results: Sequence[Result]) -> Iterator[tuple[Result, float, float]]:
    for one in results:
        yield one, one.spread_us.low, one.spread_us.high


def world(run: BenchRun) -> str:
    """The ranks and nodes of a run, in words."""
    return f"{count(run.world.ranks, 'rank')}, {count(run.world.nodes, 'node')}"


def count(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _levels(curves: Sequence[BandwidthCurve]) -> tuple[Level, ...]:
    rates = sorted({curve.run.line_rate_Gbps for curve in curves if curve.run.line_rate_Gbps})
    return tuple(
        Level(label=f"line rate of a node: {rate:g} Gbps = {rate / 8:g} GBps", value=rate / 8)
        for rate in rates
    )


def _published(tables: Sequence[Table]) -> Iterator[tuple[int, Line]]:
    """Yield each published line with its number of ranks."""
    for table in tables:
        rows = [row for row in table.rows if row.size_bytes]
        for arm, nodes, ranks in dict.fromkeys((row.arm, row.nodes, row.ranks) for row in rows):
            points = tuple(
                (row.size_bytes, table.GBps(row.busbw))
                for row in rows
                if (row.arm, row.nodes, row.ranks) == (arm, nodes, ranks) and row.size_bytes
            )
            label = f"{published_name(table, arm)}, {count(nodes, 'node')}, {count(ranks, 'GPU')}"
            value = f": {figure(points[0][1])} GBps" if len(points) == 1 else ""
            yield ranks, Line(label=f"{label}{value}", points=points, published=True)


def published_name(table: Table, arm: str) -> str:
    """The label of one variant of a table."""
    return f"{table.name} {arm}".strip()
