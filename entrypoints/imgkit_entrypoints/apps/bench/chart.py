"""Draw the chart of the bus bandwidth (busbw) over the size as SVG. Both axes are logarithmic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.record import Result
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, Axis, escaped

WIDTH, HEIGHT = 860, 520
# Margins of the plot in px. The right margin has space for the names of the lines. Text is 12 px high.
LEFT, RIGHT, TOP, BOTTOM = 72, 150, 50, 50
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
# Vertical distance in px between two names beside the plot, whose text is 12 px high.
LABEL_STEP = 17
# Most numbers on the axis of sizes. More numbers would overlap.
MAX_SIZE_TICKS = 10
# Up to this many decades, the axis of values has three numbers in each decade, which are about ten in all.
MAX_DECADES = 3.5

# Pairs of a size in bytes and a busbw in GBps, in ascending order of the sizes. All numbers are above 0.
Points = Sequence[tuple[int, float]]


def draw_chart(title: str, results: Sequence[Result]) -> str:
    """Return the text of an SVG file with a chart that has one line for each collective."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.busbw_GBps > 0:
            lines.setdefault(result.collective, []).append((result.size_bytes, result.busbw_GBps))
    parts = [
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text class="head" x="{LEFT}" y="24">{escaped(title)}</text>',
    ]
    if lines:
        parts += _draw_plot(lines)
    else:
        text = "Nothing to draw: bandwidth needs two ranks."
        parts.append(f'<text class="quiet" x="{LEFT}" y="{TOP + 30}">{text}</text>')
    return drawing.document("".join(parts), WIDTH, HEIGHT)


def _draw_plot(lines: Mapping[str, Points]) -> Iterator[str]:
    """Yield the SVG elements of the plot: axes, lines with markers, and the names of the lines."""
    all_points = list(itertools.chain(*lines.values()))
    all_sizes, all_values = zip(*all_points, strict=True)
    # The factors leave some space between the lines and the frame.
    x_axis = Axis(min(all_sizes) / 1.6, max(all_sizes) * 1.6, LEFT, PLOT_WIDTH, is_logarithmic=True)
    low = min(all_values) / 1.6
    high = max(all_values) * 1.8
    y_axis = Axis(low, high, TOP + PLOT_HEIGHT, -PLOT_HEIGHT, is_logarithmic=True)
    yield from _draw_axes(x_axis, y_axis)
    for index, (name, points) in enumerate(lines.items()):
        yield from _draw_line(name, index, points, x_axis, y_axis)
    yield from _draw_labels(lines, x_axis, y_axis)


def _draw_axes(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the SVG elements of the grid with its numbers, the frame and the names of the axes."""
    bottom = TOP + PLOT_HEIGHT
    right = LEFT + PLOT_WIDTH
    for size in size_ticks(x_axis.low, x_axis.high):
        x = x_axis.position(size)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{sizes.format_binary(size)}</text>'
    for value in value_ticks(y_axis.low, y_axis.high):
        y = y_axis.position(value)
        text = f"{value:.9f}".rstrip("0").rstrip(".")
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>'
    yield f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">GBps</text>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">size</text>'


def size_ticks(low: float, high: float) -> list[int]:
    """Return the sizes to show on the axis: evenly spaced powers of two, about `MAX_SIZE_TICKS` at most."""
    first_power = math.ceil(math.log2(max(low, 1)))
    last_power = math.floor(math.log2(high))
    for step in (1, 2, 5, 10, 20):
        if (last_power - first_power) / step <= MAX_SIZE_TICKS:
            break
    first_tick = math.ceil(first_power / step) * step
    return [1 << power for power in range(first_tick, last_power + 1, step)]


def value_ticks(low: float, high: float) -> list[float]:
    """Return the values to show on the axis: 1, 2 and 5 in each decade, or only 1 for many decades."""
    digits: tuple[int, ...] = (1,)
    if math.log10(high / low) <= MAX_DECADES:
        digits = (1, 2, 5)
    ticks = []
    first_power = math.floor(math.log10(low))
    last_power = math.ceil(math.log10(high))
    for power in range(first_power, last_power + 1):
        for digit in digits:
            tick = float(f"{digit}e{power}")  # unlike a multiplication, this has no rounding error
            if low <= tick <= high:
                ticks.append(tick)
    return ticks


def _draw_line(name: str, number: int, points: Points, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the SVG elements of a line: the line through its points, and a marker with a tooltip at each."""
    # If there are more lines than colors, colors are reused, and the lines are dashed.
    round_number, colour = divmod(number, len(COLOURS))
    dash = DASHES[round_number % len(DASHES)]
    dash_attribute = ""
    if dash:
        dash_attribute = f' stroke-dasharray="{dash}"'
    positions = [(x_axis.position(size), y_axis.position(value)) for size, value in points]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    yield f'<polyline class="s{colour}" fill="none" stroke-width="2"{dash_attribute} points="{corners}"/>'
    for (size, value), (x, y) in zip(points, positions, strict=True):
        tooltip = escaped(f"{name}: {value:.4g} GBps at {sizes.format_size(size)}")
        yield f'<g class="f{colour}">{_draw_marker(number, x, y)}<title>{tooltip}</title></g>'


def _draw_marker(number: int, x: float, y: float) -> str:
    """Return the marker of a line. There are five forms: a disc, a square, two triangles and a cross."""
    forms = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
        f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"/>',
        f'<path d="M{x:.1f} {y - 4.5:.1f}l4.2 7.5h-8.4z"/>',
        f'<path d="M{x:.1f} {y + 4.5:.1f}l4.2 -7.5h-8.4z"/>',
        f'<path d="M{x - 1.4:.1f} {y - 4.2:.1f}h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z"/>',
    )
    return forms[number % len(forms)]


class _LineEnd(NamedTuple):
    """The position of a line's last point in the drawing. Sorting orders the lines from top to bottom."""

    y: float
    x: float
    number: int
    name: str


def _draw_labels(lines: Mapping[str, Points], x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """Yield the SVG elements of the names beside the plot, each connected to the end of its line."""
    ends = []
    for index, (name, points) in enumerate(lines.items()):
        size, value = points[-1]
        ends.append(_LineEnd(y_axis.position(value), x_axis.position(size), index, name))
    ends.sort()
    heights = spread_apart([end.y for end in ends], LABEL_STEP, TOP + 4, TOP + PLOT_HEIGHT)
    for end, label_y in zip(ends, heights, strict=True):
        yield from _draw_label(end, label_y)


def _draw_label(end: _LineEnd, y: float) -> Iterator[str]:
    """Yield the SVG elements for the name and the marker of a line at the height `y`.

    A thin connector leads from there to the end of the line.
    """
    x = LEFT + PLOT_WIDTH + 30
    colour = end.number % len(COLOURS)
    connector = f"M{end.x + 7:.1f} {end.y:.1f}L{x - 24} {y:.1f}H{x - 14}"
    yield f'<path class="s{colour}" fill="none" stroke-width="1" stroke-opacity="0.55" d="{connector}"/>'
    yield f'<g class="f{colour}">{_draw_marker(end.number, x - 6, y)}</g>'
    yield f'<text x="{x + 4}" y="{y + 4:.1f}">{escaped(end.name)}</text>'


def spread_apart(positions: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Move ascending positions apart until they have at least the distance `step`, and return them.

    All results are between `low` and `high`, and near to the original positions. For example, the positions
    10, 12 and 50 with the distance 17 become 10, 27 and 50.
    """
    pushed_up: list[float] = []
    lower_limit = low
    for position in positions:
        pushed_up.append(max(position, lower_limit))
        lower_limit = pushed_up[-1] + step
    # Some positions may now exceed `high`, so push them back, beginning with the last one.
    pushed_back: list[float] = []
    upper_limit = high
    for position in reversed(pushed_up):
        pushed_back.append(min(position, upper_limit))
        upper_limit = pushed_back[-1] - step
    return pushed_back[::-1]
