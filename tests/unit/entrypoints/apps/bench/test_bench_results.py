"""The results of a run: figures of the batches, the table, the files of JSON and CSV, and the verdict."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench import options, record, table, verdict
from imgkit_entrypoints.apps.bench.collectives import find_collective
from imgkit_entrypoints.apps.bench.record import Result, RunRecord, World
from imgkit_entrypoints.apps.bench.verify import dtype_named
from imgkit_entrypoints.errors import UsageError

PAGE = Path(__file__).resolve().parents[5] / "docs/guides/bench.md"
FOUR_NODES = World(
    ranks=16, nodes=4, ranks_per_node=4, hosts=("n1", "n2", "n3", "n4"), backend="nccl", device="cuda"
)
ONE_NODE = World(ranks=4, nodes=1, ranks_per_node=4, hosts=("n1",), backend="nccl", device="cuda")
ONE_RANK = World(ranks=1, nodes=1, ranks_per_node=1, hosts=("n1",), backend="gloo", device="cpu")
RATE_Gbps = 200.0


def result(
    name: str = "all_reduce",
    *,
    seconds: Sequence[float] = (1e-3,),
    wrong: int | None = 0,
    size_bytes: int = 1 << 20,
    ranks: int = 4,
    dtype: str = "fp32",
) -> Result:
    return record.new_result(
        find_collective(name),
        dtype_named(dtype),
        size_bytes=size_bytes,
        iterations=50,
        seconds=seconds,
        ranks=ranks,
        wrong=wrong,
    )


def run_record(*results: Result) -> RunRecord:
    return RunRecord(
        started="2026-11-21T15:00:00+00:00",
        command=("dist-bench", "--save", "run.json"),
        world=ONE_NODE,
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
        record.save(path, text, "--csv FILE")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("absent/run.json", "cannot be written")])
def test_unwritable_path_is_refused_with_its_option(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        record.refuse_unwritable(tmp_path / name, "--plot FILE")
    assert "--plot FILE" in (caught.value.hint or "")


def test_columns_of_a_row_are_those_of_nccl_tests() -> None:
    columns = table.HEADER[0].lstrip("#").split()
    assert columns[:9] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    values = table.format_row(result(dtype="bf16", ranks=2)).split()
    assert values[:9] == ["1048576", "524288", "bfloat16", "sum", "-1", "1000.00", "1.049", "1.049", "0"]
    assert len(values) == len(columns)


def test_columns_end_below_their_names() -> None:
    line = table.format_row(result("reduce"))
    for head, cell in zip(
        re.finditer(r"[^\s#]\S*|#wrong", table.HEADER[0]), re.finditer(r"\S+", line), strict=True
    ):
        assert head.end() == cell.end()
    assert len(table.HEADER[1]) == len(line)


@pytest.mark.parametrize(("name", "redop", "root"), [("broadcast", "none", "0"), ("reduce", "sum", "0")])
def test_root_and_reduction_are_shown(name: str, redop: str, root: str) -> None:
    assert table.format_row(result(name)).split()[3:5] == [redop, root]


def test_summary_has_the_mean_busbw_and_the_wrong_values() -> None:
    right = table.format_summary([result(ranks=2), result(ranks=2, seconds=[2e-3])])
    assert right[0] == "# Out of bounds values : 0 OK"
    assert float(right[1].rpartition(":")[2]) == pytest.approx(1.048576 * 0.75, rel=1e-4)
    assert table.format_summary([result(wrong=3)])[0] == "# Out of bounds values : 3 FAILED"
    assert table.format_summary([result(wrong=None)])[0] == "# Out of bounds values : N/A"
    assert table.format_row(result(wrong=None)).split()[8] == "N/A"
    assert table.format_summary([]) == ()


def test_title_names_type_ranks_and_backend() -> None:
    title = table.format_title(find_collective("all_reduce"), "fp32", FOUR_NODES)
    assert title == "# all_reduce float32 sum, 16 ranks, nccl, 4 nodes"


def large(name: str = "all_reduce", seconds: float = 0.1, size_bytes: int = 10**9) -> Result:
    return result(name, seconds=[seconds], size_bytes=size_bytes, ranks=16)


def test_percent_is_the_share_of_the_expected_busbw() -> None:
    (judged,) = verdict.judge_busbw([large(size_bytes=8, seconds=1.0), large()], FOUR_NODES, RATE_Gbps)
    assert judged.size_bytes == 10**9, "the largest size counts"
    assert judged.busbw_GBps == pytest.approx(18.75)
    assert (judged.expected_busbw_GBps, judged.percent) == pytest.approx((25.0, 75.0))


@pytest.mark.parametrize(("world", "rate"), [(ONE_NODE, RATE_Gbps), (FOUR_NODES, None)])
def test_nothing_is_expected_without_a_network_or_its_rate(world: World, rate: float | None) -> None:
    (judged,) = verdict.judge_busbw([large()], world, rate)
    assert judged.expected_busbw_GBps is None
    assert judged.percent is None
    assert "%" not in "".join(verdict.describe_verdicts([judged], world, rate))


def sentences(*results: Result, world: World = FOUR_NODES, rate: float | None = RATE_Gbps) -> str:
    return "\n".join(verdict.describe_verdicts(verdict.judge_busbw(results, world, rate), world, rate))


def test_figures_are_in_the_sentence() -> None:
    text = sentences(large())
    for value in ("all_reduce of 954MiB (1GB)", "18.75 GBps", "75 %", "25 GBps", "200 Gbps"):
        assert value in text
    assert "dist-doctor" not in text


def test_low_busbw_names_the_doctor_where_all_nodes_send_all_the_time() -> None:
    assert "dist-doctor" in sentences(large(seconds=0.4))
    assert "dist-doctor" not in sentences(large("sendrecv", seconds=4.0))


@pytest.mark.parametrize(
    ("world", "rate", "option"),
    [
        (ONE_RANK, None, "--nproc"),
        (FOUR_NODES, None, "--line-rate"),
    ],
)
def test_missing_option_is_named(world: World, rate: float | None, option: str) -> None:
    assert option in sentences(large(), world=world, rate=rate)


def shortfalls(text: str, *results: Result) -> list[str]:
    judged = verdict.judge_busbw(results, FOUR_NODES, RATE_Gbps)
    return [*verdict.find_shortfalls(options.parse_requirement(text), judged)]


@pytest.mark.parametrize("text", ["75%", "18.75", "1GBps"])
def test_what_is_reached_is_no_failure(text: str) -> None:
    assert shortfalls(text, large()) == []


@pytest.mark.parametrize(
    ("text", "reached"), [("20", "18.75 GBps of busbw"), ("76%", "75 % of the expected busbw")]
)
def test_what_is_missed_is_told_with_its_figures(text: str, reached: str) -> None:
    (reason,) = shortfalls(text, large())
    assert reason.startswith(f"all_reduce of 954MiB (1GB) reached {reached}")


def test_each_collective_must_reach_it() -> None:
    (reason,) = shortfalls("10", large(), large("broadcast", seconds=1.0))
    assert reason.startswith("broadcast")


def test_run_without_a_result_fails() -> None:
    assert shortfalls("5")
    assert [*verdict.find_shortfalls(None, [])] == []


@pytest.mark.parametrize(("nodes", "rate", "hint"), [(1, 200.0, "--require GBPS"), (2, None, "--line-rate")])
def test_percentage_without_an_expectation_is_refused(nodes: int, rate: float | None, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        verdict.refuse_requirement(options.parse_requirement("80%"), nodes, rate)
    assert hint in (caught.value.hint or "")
    verdict.refuse_requirement(options.parse_requirement("30"), nodes, rate)
