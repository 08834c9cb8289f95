"""The verdict of a preflight from made-up figures: outliers, links, and what is nobody's fault."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence

import pytest

from imgkit_entrypoints.launch.preflight.run import ALONE_S, PAIR_S, ROUNDS
from imgkit_entrypoints.launch.preflight.verdict import (
    LinkResult,
    NodeResult,
    Report,
    Verdict,
    judge,
    pair_up,
)


def verdict_on(
    rates: Sequence[float | None], links: Sequence[LinkResult] = (), **fields: Mapping[int, object]
) -> Verdict:
    """Nodes with these matmul rates; ``error={2: "it hangs"}`` and the like for single nodes."""
    nodes = [
        NodeResult(
            rank=rank,
            host=f"n{rank}",
            matmul_TFLOPs=rate,
            **{name: values[rank] for name, values in fields.items() if rank in values},  # type: ignore[arg-type]
        )
        for rank, rate in enumerate(rates)
    ]
    return judge(nodes, links)


def bad(verdict: Verdict) -> list[int]:
    return [node.rank for node in verdict.outliers]


def links(nodes: int, changed: Mapping[tuple[int, int], float | str] | None = None) -> list[LinkResult]:
    """All pairs of `nodes` with the bandwidth 10, or with the bandwidth or the error in `changed`."""
    results = []
    for pair in itertools.combinations(range(nodes), 2):
        value = (changed or {}).get(pair, 10.0)
        field = "error" if isinstance(value, str) else "GBps"
        results.append(LinkResult(nodes=pair, **{field: value}))
    return results


SLOW = ("matmul 1.4 TFLOP/s, 30 % below the median of 2",)


@pytest.mark.parametrize(
    ("rates", "reasons"),
    [
        ([2.0] * 8, {}),
        ([2.0, 2.0, 2.0, 1.4], {3: SLOW}),
        ([2.0, 2.0, 2.0, 1.5], {}),
        ([2.0, 2.0, 2.0, 200.0], {}),
        ([2.0, 2.0, None, 2.0], {2: ("matrix products could not be measured",)}),
        ([None, None, None, 2.0], {}),
        ([0.0] * 4, {}),
    ],
    ids=["equal", "slow", "a quarter below", "faster", "no figure", "no usual figure", "all zero"],
)
def test_node_more_than_a_quarter_below_the_median_is_slow(rates, reasons):
    assert verdict_on(rates).reasons == reasons


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_fewer_than_four_nodes_are_only_reported(nodes):
    verdict = verdict_on([2.0] * (nodes - 1) + [0.1], error={0: "it hangs"})
    assert 0 in bad(verdict)
    assert verdict.excluded == ()
    assert "reported only: fewer than 4 nodes" in report(verdict).table()[-1]


def test_node_that_is_gone_cannot_take_part_in_any_run():
    verdict = verdict_on([2.0, 2.0], error={1: "lost: it closed the connection"}, is_gone={1: True})
    assert [node.rank for node in verdict.excluded] == [1]


def test_worst_node_comes_first():
    verdict = verdict_on(
        [2.0, 1.0, 2.0, 0.5, 2.0, None, 2.0], error={5: "it hangs"}, failed={6: ("driver: old",)}
    )
    assert bad(verdict) == [5, 3, 1, 6]
    assert verdict.reasons[6] == ("dist-doctor: driver: old",)


THREE_SLOW = [f"{pair}: 1 GB/s, 82 % below the median of 5.5" for pair in ("n0 - n2", "n1 - n2", "n2 - n3")]


@pytest.mark.parametrize(
    ("nodes", "changed", "slow_links"),
    [
        (8, [], []),
        (4, [((0, 2), 1.0), ((1, 2), 1.0), ((2, 3), 1.0)], THREE_SLOW),
        (4, [((1, 2), 1.0), ((0, 1), 8.2)], ["n1 - n2: 1 GB/s, 90 % below the median of 10"]),
        (4, [((0, 1), "not done within 4 s")], ["n0 - n1: not done within 4 s"]),
        (2, [((0, 1), "no route")], ["n0 - n1: no route"]),
    ],
    ids=["equal", "three of a node", "one", "no data", "only one"],
)
def test_slow_links_are_named_and_leave_nobody_out(nodes, changed, slow_links):
    verdict = verdict_on([2.0] * nodes, links(nodes, dict(changed)))
    assert bad(verdict) == []
    assert verdict.slow_links == tuple(slow_links)


def test_node_that_reaches_nobody_is_the_culprit():
    verdict = verdict_on([2.0] * 4, links(4, dict.fromkeys([(0, 3), (1, 3), (2, 3)], "no route")))
    assert verdict.reasons == {3: ("it exchanges data with none of 3 partners: no route",)}
    assert verdict.slow_links == ()


@pytest.mark.parametrize("nodes", range(1, 20))
def test_all_rounds_together_pair_everybody_once(nodes):
    rounds = [pair_up(nodes, turn) for turn in range(nodes + nodes % 2 - 1)]
    pairs = [pair for turn in rounds for pair in turn]
    assert sorted(pairs) == list(itertools.combinations(range(nodes), 2))
    for turn in rounds:
        assert len({node for pair in turn for node in pair}) == 2 * len(turn), "one partner at a time"


def test_all_stages_together_stay_within_a_minute():
    assert ALONE_S + ROUNDS * PAIR_S <= 60


def report(
    verdict: Verdict, *, passed: bool = True, left_out: tuple[int, ...] = (), scheduler: str = "slurm"
) -> Report:
    return Report(verdict=verdict, seconds=21.4, left_out=left_out, passed=passed, scheduler=scheduler)


def test_report_has_the_option_of_slurm():
    verdict = verdict_on([2.0, 2.0, 0.5, 2.0, 2.0, 0.5, 2.0, 2.0])
    assert report(verdict).exclude_option == "--exclude=n[2,5]"
    assert report(verdict, scheduler="manual").exclude_option == "n[2,5]"
    assert report(verdict_on([2.0] * 4)).exclude_option == ""


def test_table_shows_figures_reasons_and_result():
    verdict = verdict_on([2.0, 2.0, 0.5, 2.0], links(4), notes={0: ("warn a",), 1: ("warn a",)})
    text = "\n".join(report(verdict, left_out=(2,)).table())
    assert re.search(r"^n2 +0.5 +10$", text, re.MULTILINE)
    assert "OUTLIER n2: matmul 0.5 TFLOP/s, 75 % below the median of 2" in text
    assert "note: n[0-1]: warn a" in text
    assert text.endswith("preflight of 4 nodes in 21 s: 1 outlier, --exclude=n2; the run starts without it")


def test_table_of_many_nodes_names_outliers_only():
    text = "\n".join(report(verdict_on([2.0] * 99 + [0.5]), passed=False).table())
    assert "n99" in text
    assert "n50" not in text


def test_json_has_every_figure_and_reason():
    verdict = verdict_on([2.0, 2.0, None, 2.0], links(4, {(1, 3): 1.0}))
    document = json.loads(report(verdict, passed=False).to_json())
    assert document["nodes"][2] == {
        "rank": 2,
        "host": "n2",
        "matmul_TFLOPs": None,
        "error": "",
        "is_gone": False,
        "failed": [],
        "notes": [],
        "outlier": True,
        "left_out": False,
        "reasons": ["matrix products could not be measured"],
    }
    assert document["links"][0] == {"nodes": [0, 1], "GBps": 10.0, "error": ""}
    assert (document["passed"], document["exclude"], document["median_TFLOPs"]) == (
        False,
        "--exclude=n2",
        2.0,
    )
    assert document["slow_links"] == ["n1 - n3: 1 GB/s, 90 % below the median of 10"]
