"""The published tables: their arithmetic, units and names."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench.report import reference
from imgkit_entrypoints.apps.bench.report.reference import Row, Table
from imgkit_entrypoints.errors import UsageError

ROWS = [(table, row) for table in reference.TABLES for row in table.rows]
NVLINK_4_GBPS = 450
"""One direction of one H100; no all_reduce exceeds it without reduction in the switches."""


def name(value: object) -> str:
    if isinstance(value, Table):
        return value.name
    return f"{value.arm}-{value.ranks}-{value.size_bytes}" if isinstance(value, Row) else ""


@pytest.mark.parametrize(("table", "row"), [found for found in ROWS if found[1].algbw], ids=name)
def test_columns_agree_with_the_factor(table: Table, row: Row) -> None:
    assert row.algbw
    factor = 2 * (row.ranks - 1) / row.ranks
    rounded = 0.05 if table.unit == "Gbps" else 0.005
    assert abs(row.busbw - row.algbw * factor) <= rounded * (1 + factor) + 1e-9


@pytest.mark.parametrize(("table", "row"), ROWS, ids=name)
def test_no_figure_beats_the_hardware(table: Table, row: Row) -> None:
    if table.name != "h200":  # its switches reduce, which the factor does not cover
        assert table.GBps(row.busbw) < NVLINK_4_GBPS
    assert row.ranks % row.nodes == 0


def share_of_line(table: Table, row: Row) -> float:
    """The least traffic that leaves a node, as a share of its ports: algbw * 2(N-1)/N."""
    factor = 2 * (row.ranks - 1) / row.ranks
    assert table.line_rate_Gbps
    return table.GBps(row.busbw) / factor * 2 * (row.nodes - 1) / row.nodes * 8 / table.line_rate_Gbps


@pytest.mark.parametrize(
    ("table", "expected"),
    [("mn5", [87.9, 65.6, 74.3, 78.6]), ("hpe", [86.9, 76.6])],
)
def test_least_traffic_stays_below_the_line(table: str, expected: list[float]) -> None:
    found = reference.find(table)
    shares = [100 * share_of_line(found, row) for row in found.rows if row.nodes > 1]
    assert shares == pytest.approx(expected, abs=0.1)


def test_plugin_is_worth_twentyfold() -> None:
    last = {row.arm: row.busbw for row in reference.find("cscs").rows}
    assert last["libfabric"] / last["no plugin"] == pytest.approx(22.6, abs=0.1)


def test_sweeps_double_from_their_first_size() -> None:
    for table, largest in (("cscs", 128 << 20), ("h200", 16 << 30)):
        rows = reference.find(table).rows
        assert max(row.size_bytes or 0 for row in rows) == largest


def test_every_table_states_where_it_is_from() -> None:
    for table in reference.TABLES:
        assert table.source.startswith("https://")
        assert table.note
        assert table.title


@pytest.mark.parametrize(("typed", "meant"), [("mn-5", "mn5"), ("RCP", "rcp"), ("cscss", "cscs")])
def test_unknown_reference_names_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        reference.find(typed)
    assert f"did you mean {meant}?" in str(caught.value)


def test_unknown_reference_lists_all_of_them() -> None:
    with pytest.raises(UsageError, match="unknown reference 'zzz'") as caught:
        reference.find("zzz")
    assert caught.value.hint == "Known tables: cscs, h200, hpe, mn5, rcp"
