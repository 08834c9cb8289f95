"""The files of a run: the figures of the batches, the fields of JSON and CSV, and unwritable paths."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench import record
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.apps.bench.record import Result, RunRecord, World
from imgkit_entrypoints.apps.bench.verify import dtype_named
from imgkit_entrypoints.errors import UsageError

PAGE = Path(__file__).resolve().parents[5] / "docs/bench.md"


def result(name: str = "all_reduce", *, seconds: Sequence[float] = (1e-3,), wrong: int | None = 0) -> Result:
    return record.new_result(
        named(name),
        dtype_named("fp32"),
        size_bytes=1 << 20,
        iterations=50,
        seconds=seconds,
        ranks=4,
        wrong=wrong,
    )


def run_record(*results: Result) -> RunRecord:
    return RunRecord(
        started="2026-11-21T15:00:00+00:00",
        command=("dist-bench", "--save", "run.json"),
        world=World(ranks=4, nodes=1, ranks_per_node=4, hosts=("n1",), backend="gloo", device="cpu"),
        fingerprint={"torch": "2.13.0"},
        line_rate_Gbps=None,
        results=list(results),
    )


def test_time_is_the_median_of_the_batches() -> None:
    measured = result(seconds=[1e-3, 1e-3, 1e-3, 1e-3, 11e-3])
    assert measured.time_us == pytest.approx(1000.0)
    assert measured.algbw_GBps == pytest.approx(1.048576)
    assert measured.busbw_GBps == pytest.approx(1.5 * 1.048576)


@pytest.mark.parametrize(("count", "low_us", "high_us"), [(3, 1e6, 3e6), (20, 3e6, 18e6)])
def test_range_leaves_out_the_fastest_and_slowest_tenth(count: int, low_us: float, high_us: float) -> None:
    measured = result(seconds=[float(number) for number in range(1, count + 1)])
    assert (measured.low_us, measured.high_us) == (low_us, high_us)


def test_wrong_elements_of_all_sizes_are_added_up() -> None:
    assert run_record(result(wrong=2), result(wrong=None), result(wrong=3)).wrong == 5


def test_json_is_what_readers_of_nccl_tests_expect() -> None:
    data = json.loads(run_record(result(), result("all_gather", wrong=None)).to_json({}))
    # NVIDIA/nccl-tests v2.17, src/util.cu: the names of its `-J` file.
    reduced, gathered = data["results"]
    assert reduced == {
        **{"experiment_name": "all_reduce", "size": 1 << 20, "count": 1 << 18, "type": "float"},
        **{"redop": "sum", "root": -1, "actual_iterations": 50, "out_of_place": None},
        "in_place": {
            **{"time": 1000.0, "low": 1000.0, "high": 1000.0, "nwrong": 0},
            "alg_bw": pytest.approx(1.048576),
            "bus_bw": pytest.approx(1.5 * 1.048576),
        },
    }
    assert (gathered["in_place"], gathered["out_of_place"]["nwrong"]) == (None, None)
    assert data["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert data["average_bus_bandwidth"]["bandwidth"] == pytest.approx(1.048576 * (1.5 + 0.75) / 2)
    assert data["version"] == 1


def test_csv_has_a_row_for_each_result() -> None:
    rows = list(csv.DictReader(io.StringIO(run_record(result(), result(wrong=None)).to_csv())))
    assert [(row["collective"], row["dtype"], row["wrong"]) for row in rows] == [
        ("all_reduce", "fp32", "0"),
        ("all_reduce", "fp32", ""),
    ]
    assert float(rows[0]["busbw_GBps"]) == pytest.approx(1.5 * 1.048576)


def names(data: object) -> Iterator[str]:
    for name, value in data.items() if isinstance(data, dict) else ():
        yield name
        for inner in value if isinstance(value, list) else (value,):
            yield from names(inner) if name != "fingerprint" else ()


def test_page_names_every_field() -> None:
    verdict = {"sentences": [], "busbw": [{"expected_busbw_GBps": 1.0, "percent": 2.0}]}
    fields = set(names(json.loads(run_record(result()).to_json(verdict))))
    page = PAGE.read_text(encoding="utf-8")
    assert {name for name in fields if not re.search(rf"`{name}`", page)} == set()


def test_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    for text in ("first", "second"):
        record.save(path, text, "--csv")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("absent/run.json", "cannot be written")])
def test_unwritable_path_is_refused_with_its_option(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        record.check_writable(tmp_path / name, "--plot")
    assert "--plot FILE" in (caught.value.hint or "")
