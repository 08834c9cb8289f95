"""The chart: one line for each collective, logarithmic both ways, readable in light and dark."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import chart, record
from imgkit_entrypoints.apps.bench.collectives import NAMES, find_collective
from imgkit_entrypoints.apps.bench.record import Result
from imgkit_entrypoints.apps.bench.verify import dtype_named

SVG = "{http://www.w3.org/2000/svg}"


def result(size_bytes: int, busbw_GBps: float, name: str = "broadcast") -> Result:
    return record.new_result(
        find_collective(name),
        dtype_named("fp32"),
        size_bytes=size_bytes,
        iterations=5,
        seconds=[find_collective(name).factor(2) * size_bytes / busbw_GBps / 1e9],
        ranks=2,
        wrong=0,
    )


def drawing(*results: Result, title: str = "busbw") -> ET.Element:
    return ET.fromstring(chart.draw_chart(title, results))  # noqa: S314 - our own


def texts(root: ET.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def corners(root: ET.Element) -> list[list[tuple[float, float]]]:
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_both_axes_are_logarithmic() -> None:
    (line,) = corners(drawing(result(64, 1.0), result(128, 10.0), result(256, 100.0)))
    (x1, y1), (x2, y2), (x3, y3) = line
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x1 < x2
    assert y1 > y2


def test_each_collective_has_a_line_and_a_name() -> None:
    root = drawing(*(result(size, 1.0, name) for name in NAMES for size in (1 << 10, 1 << 20)))
    assert len(corners(root)) == len(NAMES)
    assert set(NAMES) <= set(texts(root))


def test_lines_stay_inside_the_plot() -> None:
    values = ((8, 1e-6), (1 << 20, 3.0), (1 << 32, 400.0))
    for x, y in corners(drawing(*(result(size, value) for size, value in values)))[0]:
        assert chart.LEFT < x < chart.LEFT + chart.PLOT_WIDTH
        assert chart.TOP < y < chart.TOP + chart.PLOT_HEIGHT


def test_figures_are_in_the_tips() -> None:
    root = drawing(result(1 << 30, 12.5))
    assert [tip.text for tip in root.iter(f"{SVG}title")] == ["broadcast: 12.5 GBps at 1GiB (1.07GB)"]


def test_style_has_colours_for_dark_pages() -> None:
    (style,) = drawing(result(64, 1.0)).iter(f"{SVG}style")
    assert "prefers-color-scheme:dark" in (style.text or "")


def test_run_without_bandwidth_has_a_drawing_too() -> None:
    lone = record.new_result(
        find_collective("all_reduce"),
        dtype_named("fp32"),
        size_bytes=64,
        iterations=5,
        seconds=[1.0],
        ranks=1,
        wrong=0,
    )
    for results in ((), (lone,)):
        root = drawing(*results)
        assert corners(root) == []
        assert any("Nothing to draw" in text for text in texts(root))


def test_title_cannot_break_the_file() -> None:
    assert "<b>&\ufffd" in texts(drawing(result(64, 1.0), title="<b>&\x00"))


@pytest.mark.parametrize(("low", "high"), [(8, 8.5), (8, 1 << 33), (1, 1e15)])
def test_sizes_have_few_marks(low: float, high: float) -> None:
    assert 1 <= len(chart.size_ticks(low / 1.6, high * 1.6)) <= chart.MAX_SIZE_TICKS + 1


@given(st.lists(st.floats(60, 450), min_size=1, max_size=20))
def test_labels_never_overlap(positions: list[float]) -> None:
    moved = chart.spread_apart(sorted(positions), chart.LABEL_STEP, 50, 450)
    assert all(lower - upper >= chart.LABEL_STEP - 1e-6 for upper, lower in itertools.pairwise(moved))
    assert max(moved) <= 450
    assert min(moved) >= 50
