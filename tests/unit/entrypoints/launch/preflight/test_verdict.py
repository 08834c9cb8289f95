"""The verdict of a preflight from made-up figures: outliers, links, and what is nobody's fault."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

import pytest

from imgkit_entrypoints.launch.preflight.verdict import Judgement, NodeFigures, PairFigures, Report, judge


def judged(
    rates: Sequence[float | None], pairs: Sequence[PairFigures] = (), **more: Mapping[int, object]
) -> Judgement:
    """Nodes with these matmul rates; ``broken={2: "it hangs"}`` and the like for single nodes."""
    nodes = [
        NodeFigures(
            rank=rank,
            host=f"n{rank}",
            figures={} if rate is None else {"matmul": rate},
            **{name: values[rank] for name, values in more.items() if rank in values},  # type: ignore[arg-type]
        )
        for rank, rate in enumerate(rates)
    ]
    return judge(nodes, pairs)


def bad(found: Judgement) -> list[int]:
    return [node.rank for node in found.outliers]


def links(nodes: int, slow: Mapping[tuple[int, int], float] | None = None) -> list[PairFigures]:
    """All pairs of `nodes` with the bandwidth 10, but those in `slow`."""
    return [
        PairFigures(nodes=pair, figures={"bandwidth": (slow or {}).get(pair, 10.0), "latency": 5.0})
        for pair in itertools.combinations(range(nodes), 2)
    ]


def test_equal_nodes_have_no_outlier() -> None:
    found = judged([2.0] * 8, links(8))
    assert (bad(found), found.links) == ([], ())


def test_one_of_equal_nodes_is_slow() -> None:
    found = judged([2.0, 2.0, 2.0, 1.7])  # the deviation is 0
    assert bad(found) == [3]
    assert "matmul 1.7 TFLOP/s, 1.18 times worse than the median of 2" in found.outliers[0].reasons[0]


@pytest.mark.parametrize("rate", [1.9, 2.0, 3.0, 200.0])
def test_less_than_a_tenth_or_faster_is_no_outlier(rate: float) -> None:
    assert bad(judged([2.0, 2.0, 2.0, rate])) == []


def test_wide_spread_hides_what_is_within_it() -> None:
    assert bad(judged([1.0, 1.3, 1.7, 2.2, 0.8, 1.1])) == []


def test_rate_near_zero_stands_out_of_a_wide_spread() -> None:
    # By rates, nothing could be 5 deviations below this median; the cost of a rate is a time.
    assert bad(judged([218.0, 136.0, 2.35, 218.0])) == [2]


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_node_without_a_figure_that_others_have_is_bad(value: float | None) -> None:
    found = judged([2.0, 2.0, value, 2.0])
    assert bad(found) == [2]
    assert found.outliers[0].reasons == ("matmul: it could not be measured",)
    assert "matmul" not in found.outliers[0].figures


def test_figure_that_most_lack_condemns_nobody() -> None:
    assert bad(judged([None, None, None, 2.0])) == []


def test_zero_everywhere_condemns_nobody() -> None:
    assert bad(judged([0.0] * 4)) == []


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_fewer_than_four_nodes_are_only_reported(nodes: int) -> None:
    found = judged([2.0] * (nodes - 1) + [0.1], broken={0: "it hangs"})
    assert 0 in bad(found)
    assert found.condemned == ()


def test_node_that_is_gone_cannot_take_part_in_any_run() -> None:
    found = judged([2.0, 2.0], broken={1: "lost: it closed the connection"}, gone={1: True})
    assert [node.rank for node in found.condemned] == [1]


def test_worst_node_comes_first() -> None:
    found = judged([2.0, 1.0, 2.0, 0.5, 2.0, 2.0, 2.0], broken={5: "it hangs"}, failed={6: ("driver: old",)})
    assert bad(found) == [5, 6, 3, 1]
    assert [node.loss for node in found.outliers] == [math.inf, math.inf, 4.0, 2.0]


def test_node_slow_with_all_partners_is_the_culprit() -> None:
    found = judged([2.0] * 4, links(4, {(0, 2): 1.0, (1, 2): 1.0, (2, 3): 1.0}))
    assert bad(found) == [2]
    assert found.links == ()


def test_node_slow_with_one_partner_names_the_link() -> None:
    found = judged([2.0] * 4, links(4, {(1, 2): 1.0}))
    assert bad(found) == []
    assert found.links == ("n1 - n2: bandwidth 1 GB/s, 10 times worse than the median of 10 of all links",)


def test_network_may_differ_by_a_fifth() -> None:
    found = judged([2.0] * 4, links(4, dict.fromkeys([(0, 2), (1, 2), (2, 3)], 8.2)))
    assert (bad(found), found.links) == ([], ())


def test_pair_without_data_is_a_link() -> None:
    broken = PairFigures(nodes=(0, 1), error="not done within 4 s")
    found = judged([2.0] * 4, [broken, *links(4)[1:]])
    assert (bad(found), found.links) == ([], ("n0 - n1: not done within 4 s",))


def test_node_that_reaches_nobody_is_the_culprit() -> None:
    dead = [PairFigures(nodes=pair, error="no route") for pair in ((0, 3), (1, 3), (2, 3))]
    found = judged([2.0] * 4, [*dead, *(pair for pair in links(4) if 3 not in pair.nodes)])
    assert bad(found) == [3]
    assert found.outliers[0].reasons == ("it exchanges data with none of 3 partners: no route",)
    assert found.links == ()


def test_single_failed_exchange_proves_nothing_about_a_node() -> None:
    found = judged([2.0, 2.0], [PairFigures(nodes=(0, 1), error="no route")])
    assert (bad(found), found.links) == ([], ("n0 - n1: no route",))


def report(
    found: Judgement, *, passed: bool = True, left_out: tuple[int, ...] = (), scheduler: str = "slurm"
) -> Report:
    return Report(
        judgement=found,
        seconds=21.4,
        all_reduce_GBps=1.5,
        left_out=left_out,
        passed=passed,
        scheduler=scheduler,
    )


def test_report_has_the_words_of_slurm() -> None:
    found = judged([2.0, 2.0, 0.5, 2.0, 2.0, 0.5, 2.0, 2.0])
    assert report(found).exclude == "--exclude=n[2,5]"
    assert report(found).way == "--exclude=n[2,5]"
    assert report(found, scheduler="manual").way == "other hosts than n[2,5]"
    assert report(judged([2.0] * 4)).exclude == ""


def test_table_shows_figures_reasons_and_result() -> None:
    found = judged([2.0, 2.0, 0.5, 2.0], notes={0: ("warn a",), 1: ("warn a",)})
    text = "\n".join(report(found, left_out=(2,)).table())
    assert re.search(r"^n2 +0.5 ", text, re.MULTILINE)
    assert "OUTLIER n2: matmul 0.5 TFLOP/s, 4 times worse than the median of 2" in text
    assert "note: n[0-1]: warn a" in text
    assert text.endswith("preflight of 4 nodes in 21 s: 1 outlier, --exclude=n2; the run starts without it")


def test_table_of_many_nodes_names_outliers_only() -> None:
    text = "\n".join(report(judged([2.0] * 99 + [0.5]), passed=False).table())
    assert "n99" in text
    assert "n50" not in text


def test_few_nodes_are_said_to_be_only_reported() -> None:
    assert "reported only: fewer than 4 nodes" in report(judged([2.0, 2.0, 0.1])).summary


def test_json_is_strict_where_a_node_has_nothing() -> None:
    found = json.loads(report(judged([2.0, 2.0, math.nan, 2.0]), passed=False).to_json())
    assert found["nodes"][2] == {
        "node_rank": 2,
        "host": "n2",
        "outlier": True,
        "left_out": False,
        "figures": {},
        "reasons": ["matmul: it could not be measured"],
        "loss": None,
        "notes": [],
    }
    assert (found["passed"], found["exclude"], found["medians"]) == (False, "--exclude=n2", {"matmul": 2.0})
