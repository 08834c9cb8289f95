"""What a run was like, as SVG: values over the steps, drawn by hand like the charts of dist-bench."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.report.chart import DASHES, STYLE, text

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 40, 50
MOST_POINTS = 2000
"""Of a line: more than its pixels help nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line."""

    label: str
    points: tuple[tuple[int, float], ...]
    """Step and value, steps ascending."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    length: float
    """In the drawing; negative: upwards."""

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * self.length


def document(panels: Sequence[Panel]) -> str:
    """One SVG file, the charts below each other."""
    high = HEIGHT * len(panels)
    size = f'width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}"'
    drawings = [
        f'<svg y="{HEIGHT * row}" width="{WIDTH}" height="{HEIGHT}">{"".join(_draw(panel))}</svg>'
        for row, panel in enumerate(panels)
    ]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        f'<style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>\n'
        + "\n".join(drawings)
        + "\n</svg>\n"
    )


def _draw(panel: Panel) -> Iterator[str]:
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    curves = [curve for curve in panel.curves if curve.points]
    yield f'<text class="head" x="{LEFT}" y="24">{text(panel.title)}</text>'
    if not curves:
        yield f'<text class="quiet" x="{LEFT}" y="{TOP + 30}">Nothing is known.</text>'
        return
    steps, values = zip(*(point for curve in curves for point in curve.points), strict=True)
    across = _Axis(min(0, *steps), max(steps), LEFT, wide)
    least, most = min(0.0, *values), max(values)
    up = _Axis(least, most if most > least else least + 1, TOP + tall, -tall)
    for step in ticks(across.low, across.high):
        x = across.at(step)
        yield f'<path class="grid" d="M{x:.1f} {TOP}v{tall}"/>'
        yield f'<text x="{x:.1f}" y="{TOP + tall + 18}" text-anchor="middle">{step:.10g}</text>'
    for value in ticks(up.low, up.high):
        y = up.at(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{wide}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}"/>'
    yield f'<text x="{LEFT + wide / 2}" y="{TOP + tall + 38}" text-anchor="middle">step</text>'
    for number, curve in enumerate(curves):
        yield from _line(curve, number, across, up)


def _line(curve: Curve, number: int, across: _Axis, up: _Axis) -> Iterator[str]:
    every = math.ceil(len(curve.points) / MOST_POINTS)
    points = curve.points[::-every][::-1]  # the last one is always there
    way = " ".join(f"{across.at(step):.1f},{up.at(value):.1f}" for step, value in points)
    look = f'class="s{number}" fill="none" stroke-width="2" stroke-dasharray="{DASHES[number]}"'
    yield f'<polyline {look} points="{way}"/>'
    for step, value in points[-1:]:
        yield f'<circle class="f{number}" cx="{across.at(step):.1f}" cy="{up.at(value):.1f}" r="3.5"/>'
    if curve.label:
        x, y = WIDTH - RIGHT - 150, TOP + 20 + 18 * number
        yield f'<path {look} d="M{x} {y - 4}h30"/><text x="{x + 38}" y="{y}">{text(curve.label)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most six."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= (high - low) / 5)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * place for place in range(first, last + 1)]
