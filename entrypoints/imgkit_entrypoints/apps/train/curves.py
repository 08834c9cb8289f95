"""Charts of a run as SVG: values over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, escaped

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 40, 50
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_POINTS = 2000
"""Points per line; more than its pixels would not be visible."""

Points = Sequence[tuple[int, float]]
"""Step and value, steps ascending."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: the points of each line by its label."""

    title: str
    lines: Mapping[str, Points]
    from_zero: bool = False
    """Whether the axis of values begins at 0. If not, it fits the values, and is logarithmic where they span
    two decades."""


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    length: float
    """Length in the drawing; negative: upwards."""
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in the drawing."""
        if self.is_logarithmic:
            return self.start + math.log(value / self.low) / math.log(self.high / self.low) * self.length
        return self.start + (value - self.low) / (self.high - self.low) * self.length

    def ticks(self) -> list[float]:
        """Return round numbers on the axis, at most six."""
        if self.is_logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers[:: math.ceil(len(powers) / 6)]]
        decade = 10.0 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(decade * digit for digit in (1, 2, 5, 10) if decade * digit >= (self.high - self.low) / 5)
        return [
            step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def document(charts: Sequence[Chart]) -> str:
    """Return one SVG file with the charts below each other."""
    drawings = [
        f'<svg role="img" aria-label="{escaped(chart.title)}" y="{number * HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(_draw(chart))}</svg>'
        for number, chart in enumerate(charts)
    ]
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return drawing.document("\n".join((paper, *drawings)), WIDTH, HEIGHT * len(charts))


def _draw(chart: Chart) -> Iterator[str]:
    lines = {label: points for label, points in chart.lines.items() if points}
    yield f'<text class="head" x="{LEFT}" y="24">{escaped(chart.title)}</text>'
    if not lines:
        yield f'<text class="quiet" x="{LEFT}" y="{TOP + 30}">No data.</text>'
        return
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    x_axis = _Axis(0, max(steps), LEFT, PLOT_WIDTH)
    y_axis = _values_axis(min(values), max(values), from_zero=chart.from_zero)
    for step, x in ((step, x_axis.at(step)) for step in x_axis.ticks()):
        yield f'<path class="grid" d="M{x:.1f} {TOP}v{PLOT_HEIGHT}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 32}" text-anchor="middle">{step:.10g}</text>'
    for value, y in ((value, y_axis.at(value)) for value in y_axis.ticks()):
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{PLOT_WIDTH}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>'
    for number, (label, points) in enumerate(lines.items()):
        colour = number % len(COLOURS)
        style = f'class="s{colour}" fill="none" stroke-width="2" stroke-dasharray="{DASHES[number]}"'
        sampled = points[:: -math.ceil(len(points) / MAX_POINTS)][::-1]  # always includes the last one
        corners = [f"{x_axis.at(step):.1f},{y_axis.at(value):.1f}" for step, value in sampled]
        end_x, end_y = corners[-1].split(",")
        yield f'<polyline {style} points="{" ".join(corners)}"/>'
        yield f'<circle class="f{colour}" cx="{end_x}" cy="{end_y}" r="3.5"/>'
        if label:
            label_x = WIDTH - RIGHT - 300 + 160 * number
            yield f'<path {style} d="M{label_x} 20h30"/>'
            yield f'<text x="{label_x + 38}" y="24">{escaped(label)}</text>'


def _values_axis(low: float, high: float, *, from_zero: bool) -> _Axis:
    bottom = TOP + PLOT_HEIGHT
    if from_zero or low == high:
        low = min(0.0, low)
        return _Axis(low, high if high > low else low + 1, bottom, -PLOT_HEIGHT)
    if low > 0 and high >= 100 * low:
        return _Axis(low / 1.2, high * 1.2, bottom, -PLOT_HEIGHT, is_logarithmic=True)
    margin = 0.05 * (high - low)
    return _Axis(low - margin, high + margin, bottom, -PLOT_HEIGHT)
