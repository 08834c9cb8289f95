"""Charts of a run as SVG: values over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.drawing import COLOURS, DASHES, escaped

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 40, 50
MOST_POINTS = 2000
"""Points per line; more than its pixels would not be visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """One line."""

    label: str
    points: tuple[tuple[int, float], ...]
    """Step and value, steps ascending."""


@dataclass(frozen=True, slots=True)
class StepChart:
    """One chart."""

    title: str
    curves: tuple[StepCurve, ...]
    from_zero: bool = True
    """Whether the axis of values begins at 0. If not, it fits the values, and is logarithmic where they span
    two decades."""


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    length: float
    """Length in the drawing; negative: upwards."""
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            return self.start + math.log(value / self.low) / math.log(self.high / self.low) * self.length
        return self.start + (value - self.low) / (self.high - self.low) * self.length

    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.logarithmic else ticks(self.low, self.high)


def document(charts: Sequence[StepChart]) -> str:
    """One SVG file with the charts below each other."""
    drawings = [_figure(chart, y=number * HEIGHT) for number, chart in enumerate(charts)]
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return drawing.document("\n".join((paper, *drawings)), WIDTH, HEIGHT * len(charts))


def _figure(chart: StepChart, y: int) -> str:
    return (
        f'<svg role="img" aria-label="{escaped(chart.title)}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(_draw(chart))}</svg>'
    )


def _draw(chart: StepChart) -> Iterator[str]:
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    curves = [curve for curve in chart.curves if curve.points]
    yield f'<text class="head" x="{LEFT}" y="24">{escaped(chart.title)}</text>'
    if not curves:
        yield f'<text class="quiet" x="{LEFT}" y="{TOP + 30}">No data.</text>'
        return
    steps, values = zip(*(point for curve in curves for point in curve.points), strict=True)
    across = _Axis(min(0, *steps), max(steps), LEFT, wide)
    up = _values_axis(min(values), max(values), from_zero=chart.from_zero, tall=tall)
    for step in ticks(across.low, across.high):
        x = across.at(step)
        yield f'<path class="grid" d="M{x:.1f} {TOP}v{tall}"/>'
        yield f'<text x="{x:.1f}" y="{TOP + tall + 18}" text-anchor="middle">{step:.10g}</text>'
    for value in up.ticks():
        y = up.at(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{wide}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}"/>'
    yield f'<text x="{LEFT + wide / 2}" y="{TOP + tall + 38}" text-anchor="middle">step</text>'
    for number, curve in enumerate(curves):
        yield from _line(curve, number, across, up)
        if curve.label:
            yield from _label(curve.label, number, WIDTH - RIGHT - 300 + 160 * number, 24)


def _values_axis(least: float, most: float, *, from_zero: bool, tall: int) -> _Axis:
    if from_zero or least == most:
        least = min(0.0, least)
        return _Axis(least, most if most > least else least + 1, TOP + tall, -tall)
    if least > 0 and most >= 100 * least:
        return _Axis(least / 1.2, most * 1.2, TOP + tall, -tall, logarithmic=True)
    margin = 0.05 * (most - least)
    return _Axis(least - margin, most + margin, TOP + tall, -tall)


def _line(curve: StepCurve, number: int, across: _Axis, up: _Axis) -> Iterator[str]:
    every = math.ceil(len(curve.points) / MOST_POINTS)
    points = curve.points[::-every][::-1]  # always includes the last one
    way = " ".join(f"{across.at(step):.1f},{up.at(value):.1f}" for step, value in points)
    yield f'<polyline {_look(number)} points="{way}"/>'
    for step, value in points[-1:]:
        x, y = across.at(step), up.at(value)
        yield f'<circle class="f{number % len(COLOURS)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'


def _look(number: int) -> str:
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    return f'class="s{number % len(COLOURS)}" fill="none" stroke-width="2" stroke-dasharray="{dash}"'


def _label(text: str, number: int, x: int, y: int) -> Iterator[str]:
    yield f'<path {_look(number)} d="M{x} {y - 4}h30"/><text x="{x + 38}" y="{y}">{escaped(text)}</text>'


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`, at most six."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 5)))]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most six."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= (high - low) / 5)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 1)]
