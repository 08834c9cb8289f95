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

PAGE = Path(__file__).resolve().parents[5] / "docs/guides/bench.md"


def result(seconds: Sequence[float] = (1e-3,), wrong: int | None = 0) -> Result:
    return record.new_result(
        named("all_reduce"),
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
    measured = result([1e-3, 1e-3, 1e-3, 1e-3, 11e-3])
    assert measured.time_us == pytest.approx(1000.0)
    assert measured.algbw_GBps == pytest.approx(1.048576)
    assert measured.busbw_GBps == pytest.approx(1.5 * 1.048576)


def test_range_leaves_out_the_fastest_and_slowest_tenth() -> None:
    assert (result([1.0, 2.0, 3.0]).low_us, result([1.0, 2.0, 3.0]).high_us) == (1e6, 3e6)
    seconds = [float(number) for number in range(1, 21)]
    assert (result(seconds).low_us, result(seconds).high_us) == (3e6, 18e6)


def test_wrong_elements_of_all_sizes_are_added_up() -> None:
    assert run_record(result(wrong=2), result(wrong=None), result(wrong=3)).wrong == 5


def test_csv_has_the_results_of_the_json() -> None:
    saved = run_record(result(), result(wrong=None))
    rows = list(csv.DictReader(io.StringIO(saved.to_csv())))
    results = json.loads(saved.to_json({}))["results"]
    assert [list(row) for row in rows] == [list(entry) for entry in results]
    for row, entry in zip(rows, results, strict=True):
        assert float(row["busbw_GBps"]) == entry["busbw_GBps"]
    assert [row["wrong"] for row in rows] == ["0", ""]


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
