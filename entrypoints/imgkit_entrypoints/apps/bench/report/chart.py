"""Charts over size as SVG: bandwidth and latency on logarithmic axes, percent on a linear one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, escaped

TOP, BOTTOM = 50, 50
GBIT = 70
"""Distance from the plot to the right edge of the second column of units."""
NARROW_HEIGHT = 260
LEAST_HEIGHT = 420
"""Height of the plot; more labels than fit make it higher."""
LABEL_STEP = 17
LABEL_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The measures of a drawing; text has 12 px at its full width."""

    width: int
    left: int
    right: int
    sizes: int
    """Labels on the axis of sizes, at most."""
    beside: bool
    """Whether the labels of the lines stand beside the plot, or below it."""

    @property
    def plot(self) -> int:
        """Width of the plot."""
        return self.width - self.left - self.right


WIDE = Layout(width=1024, left=124, right=308, sizes=10, beside=True)
NARROW = Layout(width=350, left=64, right=8, sizes=6, beside=False)
"""The layout of a phone: its width fits without scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: a run, or a row or sweep of a published table."""

    label: str
    points: tuple[tuple[int, float], ...]
    """Size in bytes and value, sizes ascending, both above 0."""
    published: bool = False
    band: tuple[tuple[int, float, float], ...] = ()
    """Size, low and high value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line: a value that does not depend on the size."""

    label: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChart:
    """One chart."""

    over: str
    """The operation and its group."""
    what: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    unit: Literal["GBps", "us", "%"] = "GBps"

    @property
    def title(self) -> str:
        """The title where no heading names the operation."""
        return f"{self.over}: {self.what}"


def document(charts: Sequence[SizeChart]) -> str:
    """One SVG file with the charts below each other."""
    drawings, top = [], 0
    for chart in charts:
        drawings.append(draw(chart, y=top))
        top += height(chart, WIDE)
    return drawing.document("\n".join(drawings), WIDE.width, top)


def height(chart: SizeChart, layout: Layout) -> int:
    """Height of the whole drawing, in its own units."""
    labels = LABEL_STEP * sum(bool(line.points) for line in chart.lines)
    return TOP + BOTTOM + (max(LEAST_HEIGHT, labels) if layout.beside else NARROW_HEIGHT + labels)


def draw(chart: SizeChart, layout: Layout = WIDE, *, y: int = 0) -> str:
    """An ``<svg>`` element for a page or file that holds ``drawing.STYLE``."""
    lines = [line for line in chart.lines if line.points]
    tall = height(chart, layout)
    title = escaped(chart.title)
    plot = tall - TOP - BOTTOM if layout.beside else NARROW_HEIGHT
    body = _plot(chart, lines, plot, layout) if lines else _nothing(layout)
    head = title if layout.beside else escaped(chart.what)
    start = layout.left if layout.beside else 8
    return (
        f'<svg role="img" aria-label="{title}" y="{y}" width="{layout.width}" height="{tall}" '
        f'viewBox="0 0 {layout.width} {tall}"><rect class="paper" width="100%" height="100%"/>'
        f'<text class="head" x="{start}" y="24">{head}</text>{body}</svg>'
    )


def figure(value: float) -> str:
    """Write with three digits, or with one decimal place if that is more; never in powers of ten."""
    return f"{value:.{max(1, 2 - math.floor(math.log10(value)))}f}" if value else "0"


def _nothing(layout: Layout) -> str:
    where = f'x="{8 if not layout.beside else layout.left}" y="{TOP + 30}"'
    return f'<text class="quiet" {where}>Nothing to draw: bandwidth needs two ranks.</text>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """An axis, logarithmic unless it is linear."""

    low: float
    high: float
    start: float
    length: float
    """Length in the drawing; negative: upwards."""
    linear: bool = False

    def at(self, value: float) -> float:
        if self.linear:
            return self.start + (value - self.low) / (self.high - self.low) * self.length
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * self.length


def _plot(chart: SizeChart, lines: Sequence[Line], tall: int, layout: Layout) -> str:
    every = [size for line in lines for size, _ in line.points]
    values = [value for line in lines for _, value in line.points] + [level.value for level in chart.levels]
    values += [value for line in lines for _, *ends in line.band for value in ends]
    across = _Scale(low=min(every) / 1.6, high=max(every) * 1.6, start=layout.left, length=layout.plot)
    linear = chart.unit == "%"
    low, high = (0.0, max(values) * 1.08) if linear else (min(values) / 1.6, max(values) * 1.8)
    up = _Scale(low=low, high=high, start=TOP + tall, length=-tall, linear=linear)
    labels = _labels(lines, across, up, tall, layout) if layout.beside else _labels_below(lines, tall)
    return "".join(
        (
            *_axes(across, up, tall, layout, chart.unit),
            *(_level(level, up, layout) for level in chart.levels),
            *(_band(line, number, across, up) for number, line in _numbered(lines) if line.band),
            *(
                part
                for number, line in _numbered(lines)
                for part in _line(line, number, across, up, chart.unit)
            ),
            *labels,
            *(_level_label(level, up, layout) for level in chart.levels),  # above the lines that cross it
        )
    )


def _band(line: Line, number: int, across: _Scale, up: _Scale) -> str:
    upper = [(across.at(size), up.at(high)) for size, _, high in line.band]
    lower = [(across.at(size), up.at(low)) for size, low, _ in reversed(line.band)]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *lower))
    return f'<polygon class="f{number % len(COLOURS)}" fill-opacity="0.16" points="{way}"/>'


def _numbered(lines: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Number the lines that take a colour; published lines take none, and come first."""
    number = 0
    for line in sorted(lines, key=lambda line: not line.published):
        yield number, line
        number += not line.published


def _axes(across: _Scale, up: _Scale, tall: int, layout: Layout, unit: str) -> Iterator[str]:
    left, bottom, both = layout.left, TOP + tall, unit == "GBps" and layout.beside
    for size in size_ticks(across.low, across.high, layout.sizes):
        x = across.at(size)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{sizes.binary(size)}</text>'
    for value in percents(up.high) if up.linear else value_ticks(up.low, up.high):
        y = up.at(value)
        yield f'<path class="grid" d="M{left} {y:.1f}H{left + layout.plot}"/>'
        place = f'y="{y + 4:.1f}" text-anchor="end"'
        yield f'<text x="{left - 8}" {place}>{_plain(value)}</text>'
        if both:
            yield f'<text class="quiet" x="{left - GBIT}" {place}>{_plain(value * 8)}</text>'
    yield f'<rect class="frame" x="{left}" y="{TOP}" width="{layout.plot}" height="{tall}"/>'
    yield f'<text x="{left - 8}" y="{TOP - 6}" text-anchor="end">{unit}</text>'
    if both:
        yield f'<text class="quiet" x="{left - GBIT}" y="{TOP - 6}" text-anchor="end">Gbps</text>'
    middle = left + layout.plot / 2
    yield f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">size</text>'


def _plain(speed: float) -> str:
    return f"{speed:.9f}".rstrip("0").rstrip(".")


def size_ticks(low: float, high: float, most: int = 10) -> list[int]:
    """Evenly spaced powers of two, about `most` at most."""
    first, last = math.ceil(math.log2(max(low, 1))), math.floor(math.log2(high))
    step = next(step for step in (1, 2, 5, 10, 20) if (last - first) / step <= most)
    return [1 << power for power in range(-(-first // step) * step, last + 1, step)]


def value_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, or only the decades if there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if math.log10(high / low) <= 3.5 else (1,)
    every = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in digits]
    return [speed for speed in every if low <= speed <= high]


_MOST_PERCENT = 1e300
"""A file may state any figure; larger ones get no marks."""


def percents(high: float) -> list[float]:
    """Round numbers of percent from 0 to `high`."""
    high = min(high, _MOST_PERCENT)
    step = next(step for power in range(300) for step in (20 * 10**power, 50 * 10**power) if high / step <= 8)
    return [float(value) for value in range(0, math.floor(high) + 1, step)]


def _level(level: Level, up: _Scale, layout: Layout) -> str:
    way = f"M{layout.left} {up.at(level.value):.1f}H{layout.left + layout.plot}"
    return f'<path class="level" stroke-width="1.5" stroke-dasharray="9 5" d="{way}"/>'


def _level_label(level: Level, up: _Scale, layout: Layout) -> str:
    place = f'x="{layout.left + 8}" y="{up.at(level.value) - 6:.1f}"'
    return f'<text class="rate" {place}>{escaped(level.label)}</text>'


def _line(line: Line, number: int, across: _Scale, up: _Scale, unit: str) -> Iterator[str]:
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
        also = f" ({figure(speed * 8)} Gbps)" if unit == "GBps" else ""
        hint = f"{line.label}: {figure(speed)} {unit}{also} at {sizes.both(size)}"
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


def _labels_below(lines: Sequence[Line], tall: int) -> Iterator[str]:
    for row, (number, line) in enumerate(_numbered(lines)):
        yield from _label(line, number, 14, TOP + tall + BOTTOM + 4 + LABEL_STEP * row)


def _label(line: Line, number: int, x: float, y: float) -> Iterator[str]:
    """A line's mark and name."""
    mark = "published" if line.published else f"f{number % len(COLOURS)}"
    yield f'<g class="{mark}">{_shape(-1 if line.published else number, x, y)}</g>'
    short = line.label
    if len(short) > LABEL_CHARACTERS:
        short = f"{short[: LABEL_CHARACTERS - 1]}\u2026"
    quiet = ' class="quiet"' if line.published else ""
    place = f'x="{x + 10}" y="{y + 4:.1f}"'
    yield f"<text{quiet} {place}>{escaped(short)}<title>{escaped(line.label)}</title></text>"


def _labels(lines: Sequence[Line], across: _Scale, up: _Scale, tall: int, layout: Layout) -> Iterator[str]:
    """Draw the labels beside the plot, each with a thin line to the end of its own line."""
    column = layout.left + layout.plot + 30
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
        yield from _label(line, number, column - 6, label_y)


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
