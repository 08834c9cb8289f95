"""Draw charts of a run as SVG, such as the loss over the steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, Axis, escaped

WIDTH, HEIGHT = 860, 300
# Margins of the plot in px, with room for the numbers of the axes, the title and the labels.
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 40, 50
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
# Most points of a line. More points than pixels would not be visible.
MAX_POINTS = 2000

# Pairs of a step and a value, in ascending order of the steps.
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """The title of a chart, and the points of each line by the line's label."""

    title: str
    lines: Mapping[str, Points]
    from_zero: bool = False
    """True if the axis of values begins at 0.

    Otherwise, the axis fits the values, and is logarithmic if they span two decades or more.
    """


def _choose_ticks(axis: Axis) -> list[float]:
    """Return the numbers to show on an axis: at most six round numbers, such as 0, 20, 40, 60 up to 75."""
    if axis.is_logarithmic:
        first_power = math.ceil(math.log10(axis.low))
        last_power = math.floor(math.log10(axis.high))
        powers = range(first_power, last_power + 1)
        stride = math.ceil(len(powers) / 6)
        return [10.0**power for power in powers[::stride]]
    step = _round_up((axis.high - axis.low) / 5)
    first_multiple = math.ceil(axis.low / step)
    last_multiple = math.floor(axis.high / step)
    return [step * multiple for multiple in range(first_multiple, last_multiple + 1)]


def _round_up(value: float) -> float:
    """Round a value up to 1, 2 or 5 times a power of ten: 0.03 -> 0.05."""
    decade = 10.0 ** math.floor(math.log10(value))
    for digit in (1, 2, 5):
        if decade * digit >= value:
            return decade * digit
    return decade * 10


def draw_charts(charts: Sequence[Chart]) -> str:
    """Return the text of an SVG file that contains the charts, one below the other."""
    drawings = ['<rect class="paper" width="100%" height="100%"/>']
    for index, chart in enumerate(charts):
        drawings.append(
            f'<svg role="img" aria-label="{escaped(chart.title)}" y="{index * HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(_draw_chart(chart))}</svg>'
        )
    return drawing.document("\n".join(drawings), WIDTH, HEIGHT * len(charts))


def _draw_chart(chart: Chart) -> Iterator[str]:
    """Yield the SVG elements of a chart: the title, the grid with its numbers, and the lines."""
    lines = {label: points for label, points in chart.lines.items() if points}
    yield f'<text class="head" x="{LEFT}" y="24">{escaped(chart.title)}</text>'
    if not lines:
        yield f'<text class="quiet" x="{LEFT}" y="{TOP + 30}">No data.</text>'
        return
    steps, values = zip(*itertools.chain(*lines.values()), strict=True)
    x_axis = Axis(0, max(steps), LEFT, PLOT_WIDTH)
    y_axis = _choose_values_axis(min(values), max(values), from_zero=chart.from_zero)
    yield from _draw_grid(x_axis, y_axis)
    for index, (label, points) in enumerate(lines.items()):
        yield from _draw_line(index, label, points, x_axis, y_axis)


def _draw_grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the SVG elements of the grid with its numbers, the frame and the name of the horizontal axis."""
    for step in _choose_ticks(x_axis):
        x = x_axis.position(step)
        yield f'<path class="grid" d="M{x:.1f} {TOP}v{PLOT_HEIGHT}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - 32}" text-anchor="middle">{step:.10g}</text>'
    for value in _choose_ticks(y_axis):
        y = y_axis.position(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{PLOT_WIDTH}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>'


def _draw_line(number: int, label: str, points: Points, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the SVG elements of a line: the line through its points, a dot at its end, and its label."""
    colour = number % len(COLOURS)
    style = f'class="s{colour}" fill="none" stroke-width="2" stroke-dasharray="{DASHES[number]}"'
    # Select every n-th point, counted from the end, so that the last point is always drawn.
    stride = math.ceil(len(points) / MAX_POINTS)
    sampled = points[::-stride][::-1]
    corners = [f"{x_axis.position(step):.1f},{y_axis.position(value):.1f}" for step, value in sampled]
    end_x, end_y = corners[-1].split(",")
    yield f'<polyline {style} points="{" ".join(corners)}"/>'
    yield f'<circle class="f{colour}" cx="{end_x}" cy="{end_y}" r="3.5"/>'
    if label:
        label_x = WIDTH - RIGHT - 300 + 160 * number  # room for two labels of 160 px
        yield f'<path {style} d="M{label_x} 20h30"/>'
        yield f'<text x="{label_x + 38}" y="24">{escaped(label)}</text>'


def _choose_values_axis(low: float, high: float, *, from_zero: bool) -> Axis:
    """Return an axis for values from `low` to `high`.

    If `from_zero` is set or all values are equal, the axis begins at 0. Otherwise, it has a margin on both
    sides. It is logarithmic if `high` is at least 100 times `low`.
    """
    bottom = TOP + PLOT_HEIGHT
    if from_zero or low == high:
        start = min(0.0, low)
        end = high
        if high <= start:  # an axis needs a length
            end = start + 1
        return Axis(start, end, bottom, -PLOT_HEIGHT)
    if low > 0 and high >= 100 * low:
        return Axis(low / 1.2, high * 1.2, bottom, -PLOT_HEIGHT, is_logarithmic=True)
    margin = 0.05 * (high - low)
    return Axis(low - margin, high + margin, bottom, -PLOT_HEIGHT)
