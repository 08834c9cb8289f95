"""``dist-bench report``: the checks of the file, the drawing, and hostile files that break no page."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import record
from imgkit_entrypoints.apps.bench.record import BenchRun
from imgkit_entrypoints.apps.bench.report import chart, command, content, reference
from imgkit_entrypoints.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).resolve().parents[6] / "docs"
Saved = dict[str, Any]
Keep = Callable[..., Path]


def result(size: int = 1 << 20, timing: str = "batched", GBps: float = 10.0, **changed: object) -> Saved:
    time_us = size / GBps / 1e3
    made: Saved = {
        "op": "all_reduce",
        "size_bytes": size,
        "dtype": "fp32",
        "group": "world",
        "timing": timing,
        "iterations": 20,
        "time_us": time_us,
        "algbw_GBps": GBps,
        "busbw_GBps": GBps * 1.75,
        "wrong": 0,
        "variant": "",
        **dict.fromkeys(("low_us", "median_us", "high_us"), time_us),
    }
    if timing == "batched":
        made["batches_us"] = [time_us]
    if timing == "iteration":
        made |= {"p50_us": time_us, "p95_us": time_us * 2, "p99_us": time_us * 3, "cv": 0.25}
        made["times_us"] = [time_us, time_us * 3]
    return made | changed


def saved(*results: Saved, **changed: object) -> Saved:
    made: Saved = {
        "schema": 1,
        "tool": "dist-bench",
        "version": "0.3.0",
        "complete": True,
        "started": "2026-11-21T15:00:00+00:00",
        "command": ["dist-bench", "all_reduce"],
        "world": {
            "ranks": 8,
            "nodes": 2,
            "ranks_per_node": 4,
            "hosts": ["node1", "node2"],
            "backend": "nccl",
            "device": "cuda",
        },
        "fingerprint": {"torch": "2.3.0", "nccl": "2.20.5", "cpus_per_rank": 20},
        "line_rate_Gbps": 800.0,
        "results": list(results) or [result(1 << 20), result(1 << 32, GBps=80.0)],
        "verdict": {"sentences": ["RDMA is in use: 8.1 GB left through mlx5_0:1"]},
    }
    return made | changed


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Writes a file like --save; with `text`, a broken file."""

    def write(name: str, data: Saved | None = None, text: str | None = None) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(data or saved()) if text is None else text, encoding="utf-8")
        return path

    return write


def parsed(*results: Saved, **changed: object) -> BenchRun:
    where = str(changed.pop("where", "run.json"))
    return record.parse(saved(*results, **changed), where)


def drawing(*runs: BenchRun, tables: tuple[str, ...] = ()) -> ET.Element:
    built = content.build(runs, [reference.find(name) for name in tables])
    return ET.fromstring(chart.document([one.chart for one in built.sections]))  # noqa: S314 - our own


def texts(root: ET.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def banded(size: int, *batches_us: float) -> Saved:
    mean_us = sum(batches_us) / len(batches_us)
    return result(size, GBps=size / mean_us / 1e3, batches_us=list(batches_us))


def rows(*runs: BenchRun) -> list[tuple[str, ...]]:
    return list(content.build(runs, []).sections[0].bandwidth.rows)


# The file


def test_whole_file_becomes_values(keep: Keep) -> None:
    run = record.load(keep("run", saved(result(timing="iteration"))))
    assert (run.world.ranks, run.world.hosts) == (8, ("node1", "node2"))
    assert run.fingerprint["cpus_per_rank"] == "20"
    assert run.results[0].times_us == pytest.approx((104.8576, 314.5728))


def test_unknown_fields_are_left_alone() -> None:
    assert parsed(result(colour="red"), later={"a": 1}).results[0].op == "all_reduce"


def test_table_has_the_median_and_its_band() -> None:
    (row,) = rows(parsed(banded(1 << 20, 100.0, 110.0, 120.0, 130.0, 500.0)))
    assert row[1:3] == ("120.0", "100.0 to 500.0")
    assert row[3] == chart.figure((1 << 20) / 120e3)


@pytest.mark.parametrize(
    ("times", "ratio"), [((90.0, 99.0, 100.0), "1.20 undecided"), ((50.0, 55.0, 60.0), "2.18")]
)
def test_ratio_with_overlapping_bands_is_undecided(times: tuple[float, ...], ratio: str) -> None:
    first = parsed(
        banded(1 << 20, 99.0, 119.0, 120.0) if "u" in ratio else banded(1 << 20, 119.0, 120.0, 121.0)
    )
    assert rows(first, parsed(banded(1 << 20, *times), where="b.json"))[0][-1] == ratio


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": 2, "version": "9.1"}, "schema 2; this imgkit reads schema 1"),
        ({"schema": True}, "schema True"),
        ({"tool": "nccl-tests"}, "not a file written by dist-bench"),
        ({"complete": "yes"}, "complete is 'yes'"),
        ({"command": "dist-bench"}, "command is not an array"),
        ({"line_rate_Gbps": -1}, "line_rate_Gbps is -1.0"),
        ({"world": []}, "expected a JSON object"),
        ({"fingerprint": None}, "expected a JSON object"),
        ({"verdict": {"sentences": [1]}}, "sentences holds 1, not a string"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_fields_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parsed(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size_bytes": 0}, "size_bytes must be a whole number of at least 1"),
        ({"size_bytes": 10**400}, "size_bytes must be a whole number of at least 1"),
        ({"timing": "fast"}, "timing 'fast'"),
        ({"timing": "iteration"}, "times_us is missing"),
        ({"time_us": "12"}, "time_us is '12', not a number"),
        ({"time_us": 10**400}, "time_us is inf"),
        ({"time_us": 0}, "time_us is 0"),
        ({"wrong": 1.5}, "wrong must be a whole number"),
        ({"dtype": None}, "dtype holds None, not a string"),
        ({"algbw_GBps": 80.0}, "are 10 GBps, not 80"),  # Gbps
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_results_are_refused_by_place(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parsed(result(64), result() | changed)
    assert caught.value.where == "run.json: results[1]"


def test_newer_schema_names_its_writer() -> None:
    with pytest.raises(UsageError) as caught:
        parsed(schema=2, version="9.1")
    assert "imgkit 9.1" in (caught.value.hint or "")


def test_one_size_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"results\[1\] repeats all_reduce, 1048576 B, batched"):
        parsed(result(), result())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"schema": NaN}', "\ufeff{}"])
def test_broken_json_is_refused(keep: Keep, text: str) -> None:
    with pytest.raises(UsageError, match="not valid JSON"):
        record.load(keep("broken", text=text))


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x04")
    for name, said in (("", "directory"), ("none.json", "No such file"), ("binary.json", "not valid JSON")):
        with pytest.raises(UsageError, match=said):
            record.load(tmp_path / name)


def test_documentation_names_every_field() -> None:
    told = (DOCS / "bench-report.md").read_text(encoding="utf-8")

    def names(data: object) -> Iterator[str]:
        for name, value in data.items() if isinstance(data, dict) else ():
            yield name
            for inner in value if isinstance(value, list) else (value,):
                yield from names(inner) if name != "fingerprint" else ()

    fields = set(names(saved(result(timing="iteration"))))
    assert {name for name in fields if f"`{name}`" not in told} == set()


# The charts


def test_every_run_is_one_line() -> None:
    root = drawing(parsed(where="rdma.json"), parsed(where="tcp.json"))
    assert len(root.findall(f".//{SVG}polyline")) == 2
    labels = [text for text in texts(root) if ": 8 ranks, 2 nodes" in text]
    assert sorted(label.split(":")[0] for label in labels) == ["rdma", "tcp"]


def test_higher_bandwidth_is_drawn_higher() -> None:
    root = drawing(parsed(result(64, GBps=1.0), result(128, GBps=10.0), result(256, GBps=100.0)))
    (way,) = (line.get("points", "") for line in root.iter(f"{SVG}polyline"))
    (x1, y1), (x2, y2), (x3, y3) = (map(float, point.split(",")) for point in way.split())
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)  # logarithmic both ways
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 > y2


def test_axis_tells_both_units() -> None:
    root = drawing(parsed(result(GBps=0.00001), result(1 << 30, GBps=100.0)))
    assert {"GBps", "Gbps", "0.0001", "0.0008", "100", "800", "32MiB"} <= set(texts(root))


def test_line_rate_is_drawn_and_named() -> None:
    assert "line rate of a node: 800 Gbps = 100 GBps" in texts(drawing(parsed()))
    assert not any("line rate" in text for text in texts(drawing(parsed(line_rate_Gbps=None))))


def test_line_rate_is_drawn_at_its_height() -> None:
    root = drawing(parsed(result(64, GBps=1.0), result(128, GBps=100.0, busbw_GBps=100.0)))
    (way,) = (line.get("points", "") for line in root.iter(f"{SVG}polyline"))
    (level,) = (path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "level")
    assert f" {way.split(',')[-1]}H" in level


def test_published_points_stand_at_their_payload() -> None:
    root = drawing(parsed(), tables=("mn5",))
    told = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert any("mn5, 2 nodes, 8 GPUs" in one and "(1230.8 Gbps) at 3.73GiB (4GB)" in one for one in told)


def test_published_tables_stay_with_their_op() -> None:
    root = drawing(parsed(result(op="all_gather")), tables=("mn5",))
    assert not any("mn5" in text for text in texts(root))


def test_each_op_has_its_own_chart() -> None:
    runs = [parsed(result(), result(op="all_gather")), parsed(result(), where="b.json")]
    built = content.build(runs, [])
    assert [len(one.chart.lines) for one in built.sections] == [2, 1]


def test_types_never_share_a_line() -> None:
    built = content.build([parsed(result(), result(dtype="bf16", GBps=20.0))], [])
    assert [line.label.split(":")[0] for line in built.sections[0].chart.lines] == ["run fp32", "run bf16"]


def test_timings_never_share_a_chart() -> None:
    batched, iteration = parsed(where="a.json"), parsed(result(timing="iteration"), where="b.json")
    with pytest.raises(UsageError, match="cannot share a chart") as caught:
        content.build([batched, iteration], [])
    assert caught.value.where == "a.json: batched; b.json: iteration"


def test_common_timing_is_found() -> None:
    both = parsed(result(), result(timing="iteration", GBps=5.0), where="a.json")
    (section,) = content.build([both, parsed(result(timing="iteration"), where="b.json")], []).sections
    assert "iteration times" in section.chart.title
    assert [line.points[0][1] for line in section.chart.lines] == [8.75, 17.5]


def other_charts(*runs: BenchRun) -> dict[str, chart.SizeChart]:
    (section,) = content.build(runs, []).sections
    return {one.unit: one for one in section.others}


def test_latency_has_its_own_chart() -> None:
    (line,) = other_charts(parsed(banded(1 << 20, 100.0, 110.0, 120.0, 130.0, 500.0)))["us"].lines
    assert line.points == ((1 << 20, pytest.approx(120.0)),)
    assert line.band == ((1 << 20, 100.0, 500.0),)


def test_latency_of_single_iterations_reaches_from_p50_to_p95() -> None:
    run = parsed(banded(1 << 20, 100.0, 110.0, 120.0), result(1 << 20, timing="iteration"))
    single = next(one for one in run.results if one.timing == "iteration")
    drawn = other_charts(run)["us"]
    assert "p95" in drawn.what
    assert drawn.lines[0].points == ((1 << 20, single.p50_us),)
    assert drawn.lines[0].band == ((1 << 20, single.p50_us, single.p95_us),)
    assert single.p50_us
    assert single.p95_us


@pytest.mark.parametrize("high", [1.0, 108.0, 1e9, 3.7e11, 1e300, math.inf])
def test_percent_axis_has_a_few_marks_for_any_figure(high: float) -> None:
    assert 1 <= len(chart.percents(high)) <= 9


def test_latency_is_batched_where_one_run_lacks_iterations() -> None:
    both = parsed(result(), result(timing="iteration"), where="a.json")
    assert "p95" not in other_charts(both, parsed(result(), where="b.json"))["us"].what


def test_percent_of_the_line_rate_is_linear() -> None:
    drawn = other_charts(parsed(result(64, GBps=10.0), result(128, GBps=20.0), result(256, GBps=30.0)))["%"]
    assert [value for _, value in drawn.lines[0].points] == pytest.approx([17.5, 35.0, 52.5])
    root = ET.fromstring(chart.document([drawn]))  # noqa: S314 - our own
    (way,) = (line.get("points", "") for line in root.iter(f"{SVG}polyline"))
    first, second, third = (float(point.split(",")[1]) for point in way.split())
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert {"0", "20", "100", "%"} <= set(texts(root))


def test_unknown_line_rate_has_no_percent() -> None:
    assert set(other_charts(parsed(line_rate_Gbps=None))) == {"us"}
    assert set(other_charts(parsed(result(group="node")))) == {"us"}


def test_band_lies_around_its_line() -> None:
    built = content.build([parsed(banded(64, 1.0, 2.0, 4.0), banded(128, 1.0, 2.0, 4.0))], [])
    (line,) = built.sections[0].chart.lines
    assert all(low < value < high for (_, value), (_, low, high) in zip(line.points, line.band, strict=True))
    assert "<polygon" in chart.draw(built.sections[0].chart)


def test_five_published_lines_are_drawn_at_most() -> None:
    tables = [reference.find(name) for name in ("mn5", "rcp", "cscs")]
    (section,) = content.build([parsed()], tables).sections
    published = [line.label for line in section.chart.lines if line.published]
    assert len(published) == 5
    assert any(label.startswith("mn5, 2 nodes, 8 GPUs") for label in published)
    assert any("9 more are in the table" in note for note in section.notes)


def test_few_published_lines_are_all_drawn() -> None:
    (section,) = content.build([parsed()], [reference.find("cscs")]).sections
    assert not any("more are in the table" in note for note in section.notes)


def test_phone_gets_unscaled_text() -> None:
    built = content.build([parsed(), parsed(where="b.json")], [reference.find("mn5")])
    for one in (built.sections[0].chart, *built.sections[0].others):
        root = ET.fromstring(chart.draw(one, chart.NARROW).replace("<svg", f'<svg xmlns="{SVG[1:-1]}"', 1))  # noqa: S314
        assert float(root.get("width", "")) <= 390 - 2 * 20
        places = [float(text.get("x", "")) for text in root.iter(f"{SVG}text")]
        assert all(0 <= place <= chart.NARROW.width for place in places)
    assert command.html(built).count('class="phone"') == command.html(built).count('class="desk"') == 3


def test_one_rank_has_nothing_to_draw() -> None:
    root = drawing(parsed(result(busbw_GBps=0.0)))
    assert "Nothing to draw: bandwidth needs two ranks." in texts(root)


def test_two_runs_are_held_against_each_other() -> None:
    slow = parsed(result(GBps=2.5), where="tcp.json")
    (section,) = content.build([parsed(result(GBps=10.0), where="rdma.json"), slow], []).sections
    assert section.bandwidth.head[-1] == "tcp / rdma"
    assert section.bandwidth.rows[0][-1] == "0.25"


def test_run_stands_beside_its_published_shape() -> None:
    fast = parsed(result(1 << 32, GBps=87.9))
    (section,) = content.build([fast], [reference.find("mn5")]).sections
    assert section.beside
    (row,) = section.beside.rows
    assert (row[0], row[3], row[4], row[5]) == ("run", "1230.8", "mn5", "1.00")


def test_differing_fingerprints_are_marked() -> None:
    other = parsed(where="b.json", fingerprint={"torch": "2.3.0", "nccl": "2.27.7"})
    grid = content.build([parsed(where="a.json"), other], []).fingerprint
    assert {grid.rows[index][0] for index in grid.marked} == {"nccl", "cpus_per_rank"}


def test_wrong_values_and_broken_ends_are_told() -> None:
    told = command.markdown(content.build([parsed(result(wrong=7), complete=False)], []))
    assert "7 WRONG elements" in told
    assert "INCOMPLETE" in told


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([result(wrong=None)], "not verified"),
        ([result(wrong=None), result(timing="iteration")], "verified, all correct"),
        ([result(wrong=None), result(64)], "1 of 2 verified, all correct"),
    ],
    ids=["none", "other timing", "one size"],
)
def test_checked_values_are_told(results: list[Saved], said: str) -> None:
    assert content.build([parsed(*results)], []).runs.rows[0][3] == said


def test_no_finished_size_is_refused() -> None:
    with pytest.raises(UsageError, match="no run finished a size"):
        content.build([record.parse(saved() | {"results": []}, "run.json")], [])


@given(
    st.lists(st.floats(0, 1000), max_size=30).map(sorted),
    st.floats(1, 30),
)
@example([0.0, 5.0, 6.0, 6.0, 6.0, 6.0, 500.0], 10.0)
@example([500.0, 512.0, 513.0, 513.0, 513.0], 10.0)
def test_labels_never_overlap(wanted: list[float], step: float) -> None:
    places = chart.spaced(wanted, step, 0, 1000)
    assert all(second - first >= step - 1e-6 for first, second in itertools.pairwise(places))
    if step * len(wanted) <= 1000:
        assert all(-1e-6 <= place <= 1000 + 1e-6 for place in places)


@given(st.floats(1e-9, 1e9))
def test_figures_keep_three_digits(value: float) -> None:
    assert float(chart.figure(value)) == pytest.approx(value, rel=6e-3)
    assert "e" not in chart.figure(value)


# The page


class Tags(HTMLParser):
    """Every element and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.loads: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.loads |= {name for name, _ in attrs if name in ("src", "srcset", "data", "xlink:href", "onload")}


EVIL = "</svg><script>alert(1)</script><img src=x onerror=y>\"'&\x1b[31m\ud800|`*[a](b)\n# x"


def test_page_loads_and_runs_nothing() -> None:
    tags = Tags()
    tags.feed(command.html(content.build([parsed()], [reference.find("rcp")])))
    assert not tags.names & {"script", "link", "img", "iframe", "object", "base"}
    assert not tags.loads


def test_hostile_texts_stay_texts(keep: Keep, tmp_path: Path) -> None:
    data = saved(
        result(op=EVIL, dtype=EVIL, group=EVIL),
        started=EVIL,
        command=[EVIL],
        fingerprint={EVIL: EVIL},
        verdict={"sentences": [EVIL]},
    )
    data["world"] |= {"hosts": [EVIL], "backend": EVIL, "device": EVIL}
    file = keep("<script>&", data)
    for name in ("a.html", "a.svg", "a.md"):
        assert command.main([str(file), "-o", str(tmp_path / name)]) == 0
        told = (tmp_path / name).read_text(encoding="utf-8")
        assert not re.search(r"(?<!\\)<(script|img)", told)
        assert "\x1b" not in told
    ET.parse(tmp_path / "a.svg")  # noqa: S314 - our own
    lines = (tmp_path / "a.md").read_text(encoding="utf-8").splitlines()
    assert not any(line.startswith("# x") for line in lines)


def paths(data: object, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    inner = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for name, value in inner:
        yield from paths(value, (*here, name))


WHOLE = saved(result(), result(1 << 24), result(timing="iteration"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([path for path in paths(WHOLE) if path]), JSON)
def test_any_file_is_reported_or_refused(path: tuple[Any, ...], value: object) -> None:
    data = copy.deepcopy(WHOLE)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        built = content.build([record.parse(data, "run.json")], [reference.find("mn5")])
    except UsageError:
        return
    command.html(built).encode()
    command.markdown(built).encode()
    ET.fromstring(chart.document([one.chart for one in built.sections]))  # noqa: S314 - our own


# The command


def test_markdown_goes_to_stdout(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(keep("run"))]) == 0
    assert "| 1MiB (1.05MB) | 104.9 | 104.9 to 104.9 | 10.0 | 17.5 | 140.0 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["report.pdf", "report", ".html"])
def test_unknown_format_is_refused(keep: Keep, name: str) -> None:
    with pytest.raises(UsageError, match="names no known format"):
        command.main([str(keep("run")), "-o", name])


def test_same_file_twice_is_refused(keep: Keep) -> None:
    file = str(keep("run"))
    with pytest.raises(UsageError, match="the same file is given twice"):
        command.main([file, file])


def test_unknown_reference_writes_nothing(keep: Keep, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    with pytest.raises(UsageError, match="unknown reference 'mn4'"):
        command.main([str(keep("run")), "--reference", "mn4", "-o", str(target)])
    assert not target.exists()


def test_failed_write_leaves_the_old_report(keep: Keep, tmp_path: Path) -> None:
    target = tmp_path / "folder.html"
    target.mkdir()
    with pytest.raises(UsageError, match="cannot write the report"):
        command.main([str(keep("run")), "-o", str(target)])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert target.is_dir()


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    assert content.labels(["a/run.json", "b/run.json"]) == ["a/run.json", "b/run.json"]
    assert content.labels(["a/one.json", "b/two.json"]) == ["one", "two"]


def test_command_runs_without_torch_or_launch(keep: Keep) -> None:
    words = ["dist-bench", "report", str(keep("run")), "--reference", "mn5"]
    blocked = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words!r}; "
    run = "from imgkit_entrypoints.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked + run],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "## all\\_reduce" in done.stdout or "## all_reduce" in done.stdout


def test_command_tells_its_mistakes(keep: Keep) -> None:
    file = str(keep("run", text="{"))
    done = subprocess.run(
        [sys.executable, "-m", "imgkit_entrypoints", "dist-bench", "report", file],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"dist-bench: {file}: not valid JSON" in done.stderr
