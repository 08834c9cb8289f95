"""The timeline of a long run, and what it says about slow parts."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench import soak
from imgkit_entrypoints.apps.bench.compute import OverlapTimes


def moments(*speeds: float, op: str = "all_reduce") -> list[soak.Moment]:
    return [
        soak.Moment(
            at_s=60.0 * (number + 1),
            op=op,
            size_bytes=1 << 30,
            iterations=100,
            low_us=90.0,
            median_us=100.0,
            high_us=120.0,
            busbw_GBps=speed,
            wrong=0,
        )
        for number, speed in enumerate(speeds)
    ]


def test_even_run_names_no_slow_part() -> None:
    (told,) = soak.sentences(moments(40.0, 41.0, 39.0))
    assert told == (
        "all_reduce of 1GiB (1.07GB) over 3m00s: 40 GBps of busbw, from 39 to 41 in 3 parts of the time."
    )


def test_slowest_part_is_told_with_its_time() -> None:
    told = soak.sentences(moments(40.0, 40.0, 20.0, 10.0, 40.0))[1]
    assert "below 70 % of that in 2 of 5 parts" in told
    assert "The slowest ended 4m00s after the start: 10 GBps." in told


def test_operations_are_not_mixed() -> None:
    told = soak.sentences([*moments(40.0, 40.0), *moments(4.0, 4.0, op="alltoall")])
    assert len(told) == 2
    assert not any("SLOW" in text for text in told)


@pytest.mark.parametrize(("seconds", "text"), [(3.9, "3s"), (62, "1m02s"), (3600, "1h00m00s")])
def test_times_are_told_in_hours_and_minutes(seconds: float, text: str) -> None:
    assert soak.clock(seconds) == text


def test_wrong_values_stand_in_their_row() -> None:
    (moment,) = moments(40.0)
    assert "WRONG" not in soak.line(moment)


@pytest.mark.parametrize(
    ("both_s", "hidden"), [(0.003, 0.0), (0.002, 1.0), (0.0025, 0.5), (0.005, 0.0), (0.001, 1.0)]
)
def test_hidden_share_is_of_the_shorter_one(both_s: float, hidden: float) -> None:
    found = OverlapTimes(
        op="all_reduce", size_bytes=1 << 20, communication_s=0.001, computation_s=0.002, both_s=both_s
    )
    assert found.hidden == pytest.approx(hidden)
