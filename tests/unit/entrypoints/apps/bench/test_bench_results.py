"""The results of a run: figures of the batches, the table, the files, the verdict, and the chart."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import chart, options, record, table, verdict
from imgkit_entrypoints.apps.bench.collectives import NAMES, find_collective
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
SVG = "{http://www.w3.org/2000/svg}"


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


@pytest.mark.parametrize(
    ("seconds", "time_us", "low_us", "high_us"),
    [([1, 1, 1, 1, 11], 1e6, 1e6, 11e6), ([1, 2, 3], 2e6, 1e6, 3e6), (range(1, 21), 10.5e6, 3e6, 18e6)],
)
def test_time_is_the_median_and_range_leaves_out_a_tenth_at_both_ends(seconds, time_us, low_us, high_us):
    measured = result(seconds=seconds)
    assert (measured.time_us, measured.low_us, measured.high_us) == (time_us, low_us, high_us)


def test_json_is_what_readers_of_nccl_tests_expect():
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
    wrong = run_record(result(wrong=2), result(wrong=None), result(wrong=3))
    assert json.loads(wrong.to_json({}))["out_of_bounds"] == {"count": 5, "okay": "false"}


def test_csv_has_a_row_for_each_result():
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


def test_page_names_every_field():
    verdict = {"sentences": [], "busbw": [{"expected_busbw_GBps": 1.0, "percent": 2.0}]}
    fields = set(names(json.loads(run_record(result()).to_json(verdict))))
    page = PAGE.read_text(encoding="utf-8")
    assert {name for name in fields if not re.search(rf"`{name}`", page)} == set()


def test_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "run.csv"
    for text in ("first", "second"):
        record.save(path, text, "--csv FILE")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("absent/run.json", "cannot be written")])
def test_unwritable_path_is_refused_with_its_option(tmp_path, name, message):
    with pytest.raises(UsageError, match=message) as caught:
        record.refuse_unwritable(tmp_path / name, "--plot FILE")
    assert "--plot FILE" in (caught.value.hint or "")


def test_columns_of_a_row_are_those_of_nccl_tests():
    columns = table.HEADER[0].lstrip("#").split()
    assert columns[:9] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    values = table.format_row(result(dtype="bf16", ranks=2)).split()
    assert values[:9] == ["1048576", "524288", "bfloat16", "sum", "-1", "1000.00", "1.049", "1.049", "0"]
    assert len(values) == len(columns)
    for name, redop in (("broadcast", "none"), ("reduce", "sum")):
        assert table.format_row(result(name)).split()[3:5] == [redop, "0"]


def test_columns_end_below_their_names():
    line = table.format_row(result("reduce"))
    heads = re.finditer(r"[^\s#]\S*|#wrong", table.HEADER[0])
    for head, cell in zip(heads, re.finditer(r"\S+", line), strict=True):
        assert head.end() == cell.end()
    assert len(table.HEADER[1]) == len(line)


def test_summary_has_the_mean_busbw_and_the_wrong_values():
    right = table.format_summary([result(ranks=2), result(ranks=2, seconds=[2e-3])])
    assert right[0] == "# Out of bounds values : 0 OK"
    assert float(right[1].rpartition(":")[2]) == pytest.approx(1.048576 * 0.75, rel=1e-4)
    assert table.format_summary([result(wrong=3)])[0] == "# Out of bounds values : 3 FAILED"
    assert table.format_summary([result(wrong=None)])[0] == "# Out of bounds values : N/A"
    assert table.format_row(result(wrong=None)).split()[8] == "N/A"
    assert table.format_summary([]) == ()


def test_title_names_type_ranks_and_backend():
    title = table.format_title(find_collective("all_reduce"), "fp32", FOUR_NODES)
    assert title == "# all_reduce float32 sum, 16 ranks, nccl, 4 nodes"


def large(name: str = "all_reduce", seconds: float = 0.1, size_bytes: int = 10**9) -> Result:
    return result(name, seconds=[seconds], size_bytes=size_bytes, ranks=16)


def test_percent_is_the_share_of_the_expected_busbw():
    (judged,) = verdict.judge_busbw([large(size_bytes=8, seconds=1.0), large()], FOUR_NODES, RATE_Gbps)
    assert judged.size_bytes == 10**9, "the largest size counts"
    assert judged.busbw_GBps == pytest.approx(18.75)
    assert (judged.expected_busbw_GBps, judged.percent) == pytest.approx((25.0, 75.0))


def sentences(*results: Result, world: World = FOUR_NODES, rate: float | None = RATE_Gbps) -> str:
    return "\n".join(verdict.describe_verdicts(verdict.judge_busbw(results, world, rate), world, rate))


def test_figures_are_in_the_sentence():
    text = sentences(large())
    for value in ("all_reduce of 954MiB (1GB)", "18.75 GBps", "75 %", "25 GBps", "200 Gbps"):
        assert value in text
    assert "dist-doctor" not in text


def test_low_busbw_names_the_doctor_where_all_nodes_send_all_the_time():
    assert "dist-doctor" in sentences(large(seconds=0.4))
    assert "dist-doctor" not in sentences(large("sendrecv", seconds=4.0))


@pytest.mark.parametrize(
    ("world", "rate", "text"),
    [
        (ONE_RANK, None, "--nproc"),
        (FOUR_NODES, None, "--line-rate"),
        (ONE_NODE, RATE_Gbps, "this is one node, not the network"),
    ],
)
def test_nothing_is_expected_without_a_network_or_its_rate(world, rate, text):
    (judged,) = verdict.judge_busbw([large()], world, rate)
    assert (judged.expected_busbw_GBps, judged.percent) == (None, None)
    sentence = sentences(large(), world=world, rate=rate)
    assert text in sentence
    assert "%" not in sentence


@pytest.mark.parametrize(
    ("requirement", "results", "reasons"),
    [
        ("75%", [large()], []),
        ("18.75", [large()], []),
        ("1GBps", [large()], []),
        ("20", [large()], ["all_reduce of 954MiB (1GB) reached 18.75 GBps of busbw"]),
        ("76%", [large()], ["all_reduce of 954MiB (1GB) reached 75 % of the expected busbw"]),
        ("10", [large(), large("broadcast", seconds=1.0)], ["broadcast of 954MiB"]),
        ("5", [], ["nothing was measured"]),
    ],
)
def test_what_is_missed_is_told_with_its_figures(requirement, results, reasons):
    judged = verdict.judge_busbw(results, FOUR_NODES, RATE_Gbps)
    shortfalls = verdict.find_shortfalls(options.parse_requirement(requirement), judged)
    for shortfall, reason in zip(shortfalls, reasons, strict=True):
        assert shortfall.startswith(reason)
    assert [*verdict.find_shortfalls(None, judged)] == []


@pytest.mark.parametrize(("nodes", "rate", "hint"), [(1, 200.0, "--require GBPS"), (2, None, "--line-rate")])
def test_percentage_without_an_expectation_is_refused(nodes, rate, hint):
    with pytest.raises(UsageError) as caught:
        verdict.refuse_requirement(options.parse_requirement("80%"), nodes, rate)
    assert hint in (caught.value.hint or "")
    verdict.refuse_requirement(options.parse_requirement("30"), nodes, rate)


def point(size_bytes: int, busbw_GBps: float, name: str = "broadcast") -> Result:
    seconds = find_collective(name).factor(4) * size_bytes / busbw_GBps / 1e9
    return result(name, seconds=[seconds], size_bytes=size_bytes)


def drawing(*results: Result, title: str = "busbw") -> ET.Element:
    return ET.fromstring(chart.draw_chart(title, results))  # noqa: S314 - our own


def texts(root: ET.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def corners(root: ET.Element) -> list[list[tuple[float, float]]]:
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_both_axes_are_logarithmic():
    (line,) = corners(drawing(point(64, 1.0), point(128, 10.0), point(256, 100.0)))
    (x1, y1), (x2, y2), (x3, y3) = line
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x1 < x2
    assert y1 > y2


def test_each_collective_has_a_line_and_a_name():
    root = drawing(*(point(size, 1.0, name) for name in NAMES for size in (1 << 10, 1 << 20)))
    assert len(corners(root)) == len(NAMES)
    assert set(NAMES) <= set(texts(root))


def test_lines_stay_inside_the_plot():
    (line,) = corners(drawing(point(8, 1e-6), point(1 << 20, 3.0), point(1 << 32, 400.0)))
    for x, y in line:
        assert chart.LEFT < x < chart.LEFT + chart.PLOT_WIDTH
        assert chart.TOP < y < chart.TOP + chart.PLOT_HEIGHT


def test_drawing_has_figures_in_its_tips_and_colours_for_dark_pages():
    root = drawing(point(1 << 30, 12.5))
    assert [tip.text for tip in root.iter(f"{SVG}title")] == ["broadcast: 12.5 GBps at 1GiB (1.07GB)"]
    (style,) = root.iter(f"{SVG}style")
    assert "prefers-color-scheme:dark" in (style.text or "")


@pytest.mark.parametrize("results", [(), (result(ranks=1),)], ids=["nothing", "one rank"])
def test_run_without_bandwidth_has_a_drawing_too(results):
    root = drawing(*results)
    assert corners(root) == []
    assert any("Nothing to draw" in text for text in texts(root))


def test_title_cannot_break_the_file():
    assert "<b>&\ufffd" in texts(drawing(point(64, 1.0), title="<b>&\x00"))


@pytest.mark.parametrize(("low", "high"), [(8, 8.5), (8, 1 << 33), (1, 1e15)])
def test_sizes_have_few_marks(low, high):
    assert 1 <= len(chart.size_ticks(low / 1.6, high * 1.6)) <= chart.MAX_SIZE_TICKS + 1


@given(st.lists(st.floats(60, 450), min_size=1, max_size=20))
def test_labels_never_overlap(positions):
    moved = chart.spread_apart(sorted(positions), chart.LABEL_STEP, 50, 450)
    assert all(lower - upper >= chart.LABEL_STEP - 1e-6 for upper, lower in itertools.pairwise(moved))
    assert max(moved) <= 450
    assert min(moved) >= 50
