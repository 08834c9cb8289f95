"""The content of a report, before it has a format: charts, tables of texts, sentences."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.record import TIMINGS, BenchRun, Result, Timing
from imgkit_entrypoints.apps.bench.report.chart import Level, Line, SizeChart, figure
from imgkit_entrypoints.apps.bench.report.reference import Table
from imgkit_entrypoints.errors import UsageError

DRAWN_WITH_REFERENCES = ("all_reduce", "world")
"""Op and group of every published table."""
NEAR = 1.25
"""Largest factor between a published payload and the measured size it is compared with: 4 GiB for 4 GB."""
TIMING_MEANS = {
    "batched": "batches of many launches with one synchronisation, slowest rank, median",
    "iteration": "each iteration after a barrier, slowest rank, median",
}


BAND_MEANS = (
    "The band is the range of the times without the fastest and the slowest tenth. A ratio whose bands "
    "overlap is undecided."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of texts; the first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: tuple[int, ...] = ()
    """Rows whose columns differ although they should agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One op over one group, from all runs that measured it."""

    title: str
    chart: SizeChart
    others: tuple[SizeChart, ...]
    """Latency, and the share of the line rate where that is known."""
    bandwidth: Grid
    spread: Grid | None
    beside: Grid | None
    """Published figures for the same number of nodes and ranks."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything that a report shows."""

    runs: Grid
    verdicts: tuple[tuple[str, tuple[str, ...]], ...]
    """Label and sentences of each run that has a verdict."""
    sections: tuple[Section, ...]
    published: Grid | None
    sources: tuple[tuple[str, str, str], ...]
    """Title, note and address of each table."""
    fingerprint: Grid


def build(runs: Sequence[BenchRun], tables: Sequence[Table]) -> BenchReport:
    """Build the report of `runs`, compared with the published `tables`.

    Raises
    ------
    UsageError : no run has a result, or a chart would mix batched and per-iteration times.
    """
    names = labels([run.where for run in runs])
    named = list(zip(names, runs, strict=True))
    found = dict.fromkeys((one.op, one.group) for run in runs for one in run.results)
    if not found:
        where = ", ".join(run.where for run in runs)
        raise UsageError("no run finished a size, so there is nothing to report", where=where)
    return BenchReport(
        runs=_runs(named),
        verdicts=tuple((name, run.sentences) for name, run in named if run.sentences),
        sections=tuple(_section(op, group, named, tables) for op, group in found),
        published=_published_grid(tables),
        sources=tuple((table.title, table.note, table.source) for table in tables),
        fingerprint=_fingerprint(named),
    )


def labels(files: Sequence[str]) -> list[str]:
    """A short, unique name for each file."""
    short = [Path(name).stem for name in files]
    return short if len(set(short)) == len(short) else list(files)


def _section(op: str, group: str, named: Sequence[tuple[str, BenchRun]], tables: Sequence[Table]) -> Section:
    timing = _common_timing(op, group, [run for _, run in named])
    curves = _curves(op, group, timing, named)
    spread = curves if timing == "iteration" else _curves(op, group, "iteration", named)
    referred = tables if (op, group) == DRAWN_WITH_REFERENCES else ()
    over = {"world": "all ranks", "node": "the ranks of a node"}.get(group, f"groups of a {group}")
    title = f"{op} over {over}"
    drawn = charts(title, curves, referred, single=spread, leaves_node=group != "node")
    return Section(
        title=title,
        chart=drawn.bandwidth,
        others=drawn.others,
        bandwidth=_bandwidth_grid(curves),
        spread=_spread(spread) if spread else None,
        beside=_beside(curves, referred),
        notes=(
            f"Times are {timing}: {TIMING_MEANS[timing]}. {BAND_MEANS}",
            *_level_notes(op, drawn.bandwidth.levels),
            *([drawn.left_out] if drawn.left_out else ()),
        ),
    )


def _common_timing(op: str, group: str, runs: Sequence[BenchRun]) -> Timing:
    kinds = {
        run.where: {one.timing for one in run.results if (one.op, one.group) == (op, group)} for run in runs
    }
    measured = {where: found for where, found in kinds.items() if found}
    for timing in TIMINGS:
        if all(timing in found for found in measured.values()):
            return timing
    timings = "; ".join(f"{where}: {', '.join(sorted(found))}" for where, found in measured.items())
    raise UsageError(
        f"the runs timed {op} in different ways, which cannot share a chart",
        where=timings,
        hint="report the files one by one",
    )


def _curves(
    op: str, group: str, timing: Timing, named: Sequence[tuple[str, BenchRun]]
) -> list[BandwidthCurve]:
    chosen = [
        (name, run, one)
        for name, run in named
        for one in run.results
        if (one.op, one.group, one.timing) == (op, group, timing)
    ]
    types = {one.dtype for _, _, one in chosen}
    keys = dict.fromkeys((name, one.dtype, one.variant) for name, _, one in chosen)
    runs = {name: run for name, run, _ in chosen}
    return [
        BandwidthCurve(
            label=" ".join(filter(None, (name, dtype if len(types) > 1 else "", variant))),
            run=runs[name],
            results=tuple(
                sorted(
                    (
                        one
                        for other, _, one in chosen
                        if (other, one.dtype, one.variant) == (name, dtype, variant)
                    ),
                    key=lambda one: one.size_bytes,
                )
            ),
        )
        for name, dtype, variant in keys
    ]


def _level_notes(op: str, levels: Sequence[Level]) -> Iterator[str]:
    if levels:
        yield (
            "The line rate is the bandwidth of a node's network ports in one direction. Data within a node "
            "does not count towards it."
        )
    if levels and op == "all_reduce":
        yield (
            "The busbw of a flat ring cannot exceed it. That of a hierarchical all_reduce of n ranks on N "
            "nodes can reach (n-1)/n x N/(N-1) of it."
        )


def _beside(curves: Sequence[BandwidthCurve], tables: Sequence[Table]) -> Grid | None:
    """Compare runs on GPUs with published figures for equal nodes and ranks and nearly the same payload."""
    rows = []
    for curve in curves:
        world = curve.run.world
        for table in tables:
            largest = {
                row.arm: row
                for row in table.rows
                if row.size_bytes
                and (row.nodes, row.ranks, "cuda") == (world.nodes, world.ranks, world.device)
            }
            for arm, row in largest.items():
                nearest = min(curve.results, key=lambda one: _off(one.size_bytes, row.size_bytes))
                if _off(nearest.size_bytes, row.size_bytes) > NEAR:
                    continue
                published = table.GBps(row.busbw)
                rows.append(
                    (
                        curve.label,
                        sizes.both(nearest.size_bytes),
                        figure(nearest.median_busbw_GBps * 8),
                        figure(published * 8),
                        published_name(table, arm),
                        f"{nearest.median_busbw_GBps / published:.2f}",
                    )
                )
    head = ("run", "size", "busbw (Gbps)", "published (Gbps)", "by", "run / published")
    return Grid(head=head, rows=tuple(rows)) if rows else None


def _off(one: int, other: int | None) -> float:
    return max(one, other) / min(one, other) if other else float("inf")


def _bandwidth_grid(curves: Sequence[BandwidthCurve]) -> Grid:
    by_size = [{one.size_bytes: one for one in curve.results} for curve in curves]
    alone, pair = len(curves) == 1, len(curves) == 2
    head = ["size"]
    for curve in curves:
        before = "" if alone else f"{curve.label}: "
        head += [
            f"{before}time (us)",
            f"{before}band (us)",
            f"{before}algbw (GBps)",
            f"{before}busbw (GBps)",
            f"{before}busbw (Gbps)",
        ]
    head += [f"{curves[1].label} / {curves[0].label}"] if pair else []
    rows = []
    for size in sorted(set().union(*by_size)):
        row = [sizes.both(size)]
        for results in by_size:
            one = results.get(size)
            row += (
                [
                    figure(one.median_us),
                    _band(one),
                    figure(one.median_algbw_GBps),
                    figure(one.median_busbw_GBps),
                    figure(one.median_busbw_GBps * 8),
                ]
                if one
                else ["-"] * 5
            )
        if pair:
            first, second = (results.get(size) for results in by_size)
            row.append(_ratio(first, second) if first and second and first.busbw_GBps else "-")
        rows.append(tuple(row))
    return Grid(head=tuple(head), rows=tuple(rows))


def _band(one: Result) -> str:
    """The band of the batches or iterations."""
    return f"{figure(one.spread_us.low)} to {figure(one.spread_us.high)}"


def _ratio(first: Result, second: Result) -> str:
    ratio = f"{second.median_busbw_GBps / first.median_busbw_GBps:.2f}"
    return f"{ratio} undecided" if first.undecided(second) else ratio


def _spread(curves: Sequence[BandwidthCurve]) -> Grid:
    return Grid(
        head=("run", "size", "iterations", "p50 (us)", "p95 (us)", "p99 (us)", "cv"),
        rows=tuple(
            (
                curve.label,
                sizes.both(one.size_bytes),
                str(one.iterations),
                *(figure(value or 0) for value in (one.p50_us, one.p95_us, one.p99_us)),
                f"{one.cv or 0:.0%}",
            )
            for curve in curves
            for one in curve.results
        ),
    )


def _runs(named: Sequence[tuple[str, BenchRun]]) -> Grid:
    return Grid(
        head=("run", "where", "started", "values", "state", "command"),
        rows=tuple(
            (
                name,
                f"{world(run)}, {run.world.backend} on {run.world.device}",
                run.started,
                _values(run),
                "complete" if run.complete else "INCOMPLETE",
                shlex.join(run.command),
            )
            for name, run in named
        ),
    )


def _values(run: BenchRun) -> str:
    # Verifying one of the two timings of a size is enough.
    checked = {one.key[:-1] for one in run.results if one.wrong is not None}
    if total := sum(one.wrong or 0 for one in run.results):
        return f"{total} WRONG elements"
    if not checked:
        return "not verified"
    every = {one.key[:-1] for one in run.results}
    return (
        "verified, all correct"
        if checked == every
        else f"{len(checked)} of {len(every)} verified, all correct"
    )


def _published_grid(tables: Sequence[Table]) -> Grid | None:
    if not tables:
        return None
    return Grid(
        head=("published", "nodes", "GPUs", "size", "algbw (Gbps)", "busbw (Gbps)", "busbw (GBps)"),
        rows=tuple(
            (
                published_name(table, row.arm),
                str(row.nodes),
                str(row.ranks),
                sizes.both(row.size_bytes) if row.size_bytes else "-",
                "-" if row.algbw is None else figure(table.GBps(row.algbw) * 8),
                figure(table.GBps(row.busbw) * 8),
                figure(table.GBps(row.busbw)),
            )
            for table in tables
            for row in table.rows
        ),
    )


def _fingerprint(named: Sequence[tuple[str, BenchRun]]) -> Grid:
    columns = []
    for _, run in named:
        world = {
            name: ", ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in asdict(run.world).items()
        }
        found = {"NCCL's log": ", ".join(run.transport)} if run.transport else {}
        columns.append({**world, **found, **run.fingerprint, "saved by imgkit": run.version})
    names = list(dict.fromkeys(name for one in columns for name in one))
    rows = [(name, *(one.get(name, "-") for one in columns)) for name in names]
    return Grid(
        head=("", *(name for name, _ in named)),
        rows=tuple(rows),
        marked=tuple(index for index, row in enumerate(rows) if len(set(row[1:])) > 1),
    )


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
