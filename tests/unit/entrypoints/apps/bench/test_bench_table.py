"""The printed table has the columns of nccl-tests, and the last lines that programs search for."""

from __future__ import annotations

import re

import pytest

from imgkit_entrypoints.apps.bench import record, table
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.apps.bench.record import Result, World
from imgkit_entrypoints.apps.bench.verify import dtype_named


def result(name: str = "all_reduce", wrong: int | None = 0, seconds: float = 1e-3) -> Result:
    return record.new_result(
        named(name),
        dtype_named("bf16"),
        size_bytes=1 << 20,
        iterations=50,
        seconds=[seconds],
        ranks=2,
        wrong=wrong,
    )


def test_columns_of_a_row_are_those_of_nccl_tests() -> None:
    columns = table.HEADER[0].lstrip("#").split()
    assert columns[:9] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    values = table.row(result()).split()
    assert values[:9] == ["1048576", "524288", "bfloat16", "sum", "-1", "1000.00", "1.049", "1.049", "0"]
    assert len(values) == len(columns)


def test_columns_end_below_their_names() -> None:
    line = table.row(result("reduce"))
    for head, cell in zip(
        re.finditer(r"[^\s#]\S*|#wrong", table.HEADER[0]), re.finditer(r"\S+", line), strict=True
    ):
        assert head.end() == cell.end()
    assert len(table.HEADER[1]) == len(line)


@pytest.mark.parametrize(("name", "redop", "root"), [("broadcast", "none", "0"), ("reduce", "sum", "0")])
def test_root_and_reduction_are_shown(name: str, redop: str, root: str) -> None:
    assert table.row(result(name)).split()[3:5] == [redop, root]


def test_summary_has_the_mean_busbw_and_the_wrong_values() -> None:
    right = table.summary([result(seconds=1e-3), result(seconds=2e-3)])
    assert right[0] == "# Out of bounds values : 0 OK"
    assert float(right[1].rpartition(":")[2]) == pytest.approx(1.048576 * 0.75, rel=1e-4)
    assert table.summary([result(wrong=3)])[0] == "# Out of bounds values : 3 FAILED"
    assert table.summary([result(wrong=None)])[0] == "# Out of bounds values : N/A"
    assert table.row(result(wrong=None)).split()[8] == "N/A"
    assert table.summary([]) == ()


def test_title_names_type_ranks_and_backend() -> None:
    world = World(ranks=8, nodes=2, ranks_per_node=4, hosts=("a", "b"), backend="nccl", device="cuda")
    assert (
        table.title(named("all_reduce"), "fp32", world) == "# all_reduce float32 sum, 8 ranks, nccl, 2 nodes"
    )
