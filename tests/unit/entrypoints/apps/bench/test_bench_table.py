"""The printed rows: the median of the batches, and its band in percent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from imgkit_entrypoints.apps.bench import outcome, record
from imgkit_entrypoints.apps.bench.record import Result


def result(batches_us: Sequence[float] = (), times_us: Sequence[float] = ()) -> Result:
    return record.new_result(
        "all_reduce",
        1.0,
        1e-3,
        size_bytes=1 << 20,
        dtype="fp32",
        group="world",
        iterations=5,
        wrong=0,
        times=[value / 1e6 for value in times_us] or None,
        batches=[value / 1e6 for value in batches_us],
    )


@pytest.mark.parametrize(
    ("batches_us", "band"),
    [((90, 100, 100, 100, 300), "-10 +200"), ((100,) * 5, "0 +0")],
)
def test_band_is_told_in_percent(batches_us: tuple[float, ...], band: str) -> None:
    assert outcome.band(result(batches_us)) == band


def test_row_has_a_column_for_each_head() -> None:
    head = outcome.HEADER[1]
    row = outcome.result_row(result((90, 100, 100, 100, 300)), result(times_us=(100, 200)))
    assert len(row) == len(head)
    assert row.split()[4:7] == ["100.0", "-10", "+200"]
