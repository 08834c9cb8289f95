"""Charts of bus bandwidth over size, as SVG on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, escaped

WIDTH = 1024
LEFT, RIGHT, TOP, BOTTOM = 124, 308, 50, 50
GBIT = 70
"""Distance from the plot to the right edge of the second column of units."""
PLOT_WIDTH = WIDTH - LEFT - RIGHT
LEAST_HEIGHT = 420
"""Height of the plot; more labels than fit make it higher."""
LABEL_STEP = 17
LABEL_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: a run, or a row or sweep of a published table."""

    label: str
    points: tuple[tuple[int, float], ...]
    """Size in bytes and busbw in GBps, sizes ascending, both above 0."""
    published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line: a bandwidth that does not depend on the size."""

    label: str
    GBps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthChart:
    """One chart."""

    title: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()


def document(charts: Sequence[BandwidthChart]) -> str:
    """One SVG file with the charts below each other."""
    drawings, top = [], 0
    for chart in charts:
        drawings.append(draw(chart, y=top))
        top += height(chart)
    return drawing.document("\n".join(drawings), WIDTH, top)


def height(chart: BandwidthChart) -> int:
    """Height of the whole drawing, in its own units."""
    labels = sum(bool(line.points) for line in chart.lines)
    return TOP + BOTTOM + max(LEAST_HEIGHT, LABEL_STEP * labels)


def draw(chart: BandwidthChart, *, y: int = 0) -> str:
    """An ``<svg>`` element for a page or file that holds ``drawing.STYLE``."""
    lines = [line for line in chart.lines if line.points]
    tall = height(chart)
    title = escaped(chart.title)
    body = _plot(lines, chart.levels, tall - TOP - BOTTOM) if lines else _nothing()
    return (
        f'<svg role="img" aria-label="{title}" y="{y}" width="{WIDTH}" height="{tall}" '
        f'viewBox="0 0 {WIDTH} {tall}"><rect class="paper" width="100%" height="100%"/>'
        f'<text class="head" x="{LEFT}" y="24">{title}</text>{body}</svg>'
    )


def figure(value: float) -> str:
    """Write with three digits, or with one decimal place if that is more; never in powers of ten."""
    return f"{value:.{max(1, 2 - math.floor(math.log10(value)))}f}" if value else "0"


def _nothing() -> str:
    where = f'x="{LEFT}" y="{TOP + 30}"'
    return f'<text class="quiet" {where}>Nothing to draw: bandwidth needs two ranks.</text>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """A logarithmic axis."""

    low: float
    high: float
    start: float
    length: float
    """Length in the drawing; negative: upwards."""

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * self.length


def _plot(lines: Sequence[Line], levels: Sequence[Level], tall: int) -> str:
    every = [point for line in lines for point in line.points]
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    speeds = [speed for _, speed in every] + [level.GBps for level in levels]
    across = _Scale(low=least / 1.6, high=most * 1.6, start=LEFT, length=PLOT_WIDTH)
    up = _Scale(low=min(speeds) / 1.6, high=max(speeds) * 1.8, start=TOP + tall, length=-tall)
    return "".join(
        (
            *_axes(across, up, tall),
            *(_level(level, up) for level in levels),
            *(part for number, line in _numbered(lines) for part in _line(line, number, across, up)),
            *_labels(lines, across, up, tall),
            *(_level_label(level, up) for level in levels),  # last: above the lines that cross it
        )
    )


def _numbered(lines: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Number the lines that take a colour; published lines take none, and come first."""
    number = 0
    for line in sorted(lines, key=lambda line: not line.published):
        yield number, line
        number += not line.published


def _axes(across: _Scale, up: _Scale, tall: int) -> Iterator[str]:
    bottom = TOP + tall
    for size in size_ticks(across.low, across.high):
        x = across.at(size)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{sizes.binary(size)}</text>'
    for speed in speed_ticks(up.low, up.high):
        y = up.at(speed)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{LEFT + PLOT_WIDTH}"/>'
        place = f'y="{y + 4:.1f}" text-anchor="end"'
        yield f'<text x="{LEFT - 8}" {place}>{_plain(speed)}</text>'
        yield f'<text class="quiet" x="{LEFT - GBIT}" {place}>{_plain(speed * 8)}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{tall}"/>'
    yield f'<text x="{LEFT - 8}" y="{TOP - 6}" text-anchor="end">GBps</text>'
    yield f'<text class="quiet" x="{LEFT - GBIT}" y="{TOP - 6}" text-anchor="end">Gbps</text>'
    middle = LEFT + PLOT_WIDTH / 2
    yield f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">size</text>'


def _plain(speed: float) -> str:
    return f"{speed:.9f}".rstrip("0").rstrip(".")


def size_ticks(low: float, high: float) -> list[int]:
    """Evenly spaced powers of two, at most ten."""
    first, last = math.ceil(math.log2(max(low, 1))), math.floor(math.log2(high))
    step = next(step for step in (1, 2, 5, 10, 20) if (last - first) / step <= 10)
    return [1 << power for power in range(-(-first // step) * step, last + 1, step)]


def speed_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, or only the decades if there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if math.log10(high / low) <= 3.5 else (1,)
    every = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits]
    return [speed for speed in every if low <= speed <= high]


def _level(level: Level, up: _Scale) -> str:
    way = f"M{LEFT} {up.at(level.GBps):.1f}H{LEFT + PLOT_WIDTH}"
    return f'<path class="level" stroke-width="1.5" stroke-dasharray="9 5" d="{way}"/>'


def _level_label(level: Level, up: _Scale) -> str:
    place = f'x="{LEFT + 8}" y="{up.at(level.GBps) - 6:.1f}"'
    return f'<text class="rate" {place}>{escaped(level.label)}</text>'


def _line(line: Line, number: int, across: _Scale, up: _Scale) -> Iterator[str]:
    places = [(across.at(size), up.at(speed)) for size, speed in line.points]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    turn, colour = divmod(number, len(COLOURS))
    if line.published:
        yield f'<polyline class="published way" stroke-dasharray="1 4" stroke-width="1.5" points="{way}"/>'
    else:
        dash = DASHES[turn % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<polyline class="s{colour}" fill="none" stroke-width="2"{dashed} points="{way}"/>'
    for (size, speed), (x, y) in zip(line.points, places, strict=True):
        kind = "published" if line.published else f"f{colour}"
        hint = f"{line.label}: {figure(speed)} GBps ({figure(speed * 8)} Gbps) at {sizes.both(size)}"
        shape = _shape(-1 if line.published else number, x, y)
        yield f'<g class="{kind}">{shape}<title>{escaped(hint)}</title></g>'


def _shape(number: int, x: float, y: float) -> str:
    if number < 0:
        return f'<path d="M{x:.1f} {y - 5:.1f}l5 5 -5 5 -5 -5z"/>'
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
        f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"/>',
        f'<path d="M{x:.1f} {y - 4.5:.1f}l4.2 7.5h-8.4z"/>',
        f'<path d="M{x:.1f} {y + 4.5:.1f}l4.2 -7.5h-8.4z"/>',
        f'<path d="M{x - 1.4:.1f} {y - 4.2:.1f}h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z"/>',
    )[number % 5]


def _labels(lines: Sequence[Line], across: _Scale, up: _Scale, tall: int) -> Iterator[str]:
    """Draw the labels beside the plot, each with a thin line to the end of its own line."""
    column = LEFT + PLOT_WIDTH + 30
    ends = sorted(
        (
            (up.at(line.points[-1][1]), across.at(line.points[-1][0]), number, line)
            for number, line in _numbered(lines)
        ),
        key=lambda end: end[0],
    )
    heights = spaced([end[0] for end in ends], LABEL_STEP, TOP + 4, TOP + tall)
    for (y, x, number, line), label_y in zip(ends, heights, strict=True):
        kind = "published way" if line.published else f"s{number % len(COLOURS)}"
        thread = f"M{x + 7:.1f} {y:.1f}L{column - 24} {label_y:.1f}H{column - 14}"
        yield f'<path class="{kind}" fill="none" stroke-width="1" stroke-opacity="0.55" d="{thread}"/>'
        mark = "published" if line.published else f"f{number % len(COLOURS)}"
        shape = _shape(-1 if line.published else number, column - 6, label_y)
        yield f'<g class="{mark}">{shape}</g>'
        short = line.label
        if len(short) > LABEL_CHARACTERS:
            short = f"{short[: LABEL_CHARACTERS - 1]}\u2026"
        quiet = ' class="quiet"' if line.published else ""
        place = f'x="{column + 4}" y="{label_y + 4:.1f}"'
        yield f"<text{quiet} {place}>{escaped(short)}<title>{escaped(line.label)}</title></text>"


def spaced(wanted: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Positions from `low` to `high`, at least `step` apart, nearest to the ascending `wanted` ones."""
    blocks: list[tuple[float, int]] = []  # middle and number of labels that touch each other
    for place in wanted:
        middle, count = place, 1
        while blocks and middle - blocks[-1][0] < step * (count + blocks[-1][1]) / 2:
            before, more = blocks.pop()
            middle, count = (middle * count + before * more) / (count + more), count + more
        blocks.append((middle, count))
    places = [middle + step * (index - (count - 1) / 2) for middle, count in blocks for index in range(count)]
    last = len(places) - 1
    return [
        min(max(place, low + step * index), high - step * (last - index))
        for index, place in enumerate(places)
    ]
