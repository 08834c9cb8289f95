"""The size, bandwidth and result of each collective: nccl-tests' definitions, and every element's origin."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from imgkit_entrypoints.apps.bench import collectives
from imgkit_entrypoints.apps.bench.collectives import COLLECTIVES, NAMES, Collective, Segment, named


@pytest.mark.parametrize(
    ("name", "factors"),
    # nccl-tests, src/*.cu: the factor of getBw for 2, 4 and 8 ranks.
    [
        ("all_reduce", (1.0, 1.5, 1.75)),
        ("all_gather", (0.5, 0.75, 0.875)),
        ("reduce_scatter", (0.5, 0.75, 0.875)),
        ("alltoall", (0.5, 0.75, 0.875)),
        ("alltoallv", (0.5, 0.75, 0.875)),
        ("gather", (0.5, 0.75, 0.875)),
        ("scatter", (0.5, 0.75, 0.875)),
        ("broadcast", (1.0, 1.0, 1.0)),
        ("reduce", (1.0, 1.0, 1.0)),
        ("sendrecv", (1.0, 1.0, 1.0)),
    ],
)
def test_factors_are_those_of_nccl_tests(name: str, factors: tuple[float, ...]) -> None:
    assert tuple(named(name).factor(ranks) for ranks in (2, 4, 8)) == factors


def test_table_of_factors_is_whole() -> None:
    assert len(NAMES) == len(set(NAMES)) == 10
    assert len(collectives.EVERY) == 9


@pytest.mark.parametrize(
    ("ranks", "algbw", "busbw"),
    # Published rows of all_reduce, columns rounded to 0.1 (EPFL's RoCE guide; BSC's MareNostrum 5 tables).
    [(2, 1687.1, 1687.1), (4, 1081.0, 1621.5), (8, 703.3, 1230.8), (16, 349.9, 656.0), (64, 335.4, 660.4)],
)
def test_factor_reproduces_published_rows(ranks: int, algbw: float, busbw: float) -> None:
    assert algbw * named("all_reduce").factor(ranks) == pytest.approx(busbw, abs=0.16)


def test_one_rank_uses_no_bus() -> None:
    assert named("all_reduce").factor(1) == named("all_gather").factor(1) == 0.0


@pytest.mark.parametrize(
    ("name", "size", "elements"),
    # nccl-tests, src/*.cu: (count / ranks) & ~(16 / element - 1) per rank; too small a size is 0 there.
    [("all_reduce", 8, 2), ("all_gather", 8, 12), ("all_gather", 4096, 1020), ("all_reduce", 1, 1)],
)
def test_every_rank_gets_as_many_elements(name: str, size: int, elements: int) -> None:
    assert named(name).elements(size, 4, 3) == elements


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 3, 8, 12])
def test_no_chunk_is_cut_within_16_bytes(ranks: int, item: int) -> None:
    for op in (one for one in COLLECTIVES if one.parts):
        for size in (1, 100, 4096, 1_000_000_007):
            chunk = op.elements(size, item, ranks) * item // ranks
            assert chunk % 16 == 0
            as_nccl_tests = (size // item // ranks & ~(16 // item - 1)) * item
            assert chunk == (as_nccl_tests or 16)


@pytest.mark.parametrize(
    ("name", "least", "ring"),
    # 4 nodes of 4 ranks: bytes that leave a node for each byte of the size.
    [
        ("all_reduce", 1.5, 1.875),
        ("all_gather", 0.75, 0.9375),
        ("alltoall", 3.0, 3.0),
        ("broadcast", 1.0, 1.0),
        ("sendrecv", 1.0, 1.0),
    ],
)
def test_traffic_of_a_node_is_a_range(name: str, least: float, ring: float) -> None:
    op = named(name)
    assert (op.least_traffic(4, 4), op.ring_traffic(4, 4)) == pytest.approx((least, ring))


@pytest.mark.parametrize("op", COLLECTIVES, ids=NAMES)
def test_one_node_sends_nothing_out(op: Collective) -> None:
    assert op.least_traffic(1, 8) == op.ring_traffic(1, 8) == 0.0


def simulated(op: Collective, inputs: list[list[int]], rank: int) -> list[int] | None:
    """An independent definition of each collective; None if a rank gets nothing."""
    ranks, root = len(inputs), collectives.ROOT
    part = max(1, len(inputs[root]) // ranks)
    splits = [0, *itertools.accumulate(op.shape(op.elements(48, 4, ranks), ranks, rank).splits)]
    total = [sum(column) for column in zip(*inputs, strict=False)]
    joined = [value for row in inputs for value in row]
    mine = slice(rank * part, (rank + 1) * part)
    results: dict[str, list[int] | None] = {
        "all_reduce": total,
        "all_gather": joined,
        "reduce_scatter": total[mine],
        "broadcast": inputs[root],
        "reduce": total if rank == root else None,
        "alltoall": [value for row in inputs for value in row[mine]],
        "alltoallv": [value for row in inputs for value in row[splits[rank] : splits[rank + 1]]],
        "sendrecv": inputs[(rank - 1) % ranks],
        "gather": joined if rank == root else None,
        "scatter": inputs[root][mine],
    }
    return results[op.name]


VARIANTS = (
    *COLLECTIVES,
    collectives.variant("alltoallv", skew=1.0),
    collectives.variant("alltoallv", skew=9.0),
    *(collectives.variant(name, out_of_place=True) for name in ("all_reduce", "broadcast", "reduce")),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", VARIANTS, ids=lambda op: f"{op.name} {op.variant}")
def test_result_says_where_every_element_is_from(op: Collective, ranks: int) -> None:
    count = op.elements(48, 4, ranks)
    inputs = [
        [1000 * rank + place for place in range(op.input_elements(count, ranks, rank))]
        for rank in range(ranks)
    ]
    for rank in range(ranks):
        wanted = simulated(op, inputs, rank)
        said: list[int] = []
        for segment in op.result(op.shape(count, ranks, rank)):
            assert segment.start == len(said)
            places = range(segment.offset, segment.offset + segment.count)
            sources = inputs if segment.source is None else [inputs[segment.source]]
            said += [sum(row[place] for row in sources) for place in places]
        assert (said or None) == wanted
        if op.separate and wanted is not None:
            assert op.output_elements(count, ranks, rank) == len(wanted)


@pytest.mark.parametrize(("name", "times"), [("all_reduce", 1), ("broadcast", 1), ("alltoall", 2)])
def test_buffers_are_at_most_twice_the_size(name: str, times: float) -> None:
    assert named(name).buffer_bytes(4096, 4) == times * 4096
    assert all(op.buffer_bytes(4096, 4) <= 2 * 4096 for op in VARIANTS)


def test_popular_expert_receives_most() -> None:
    op = collectives.variant("alltoallv", skew=1.0)
    assert op.shape(1 << 20, 4, 0).splits == (262144, 131072, 87376, 65536)  # 1, 1/2, 1/3 and 1/4 of it
    assert op.output_elements(1 << 20, 4, 0) == 1 << 20
    assert op.variant == "skew 1"


def test_no_skew_is_alltoall() -> None:
    op, plain = collectives.variant("alltoallv", skew=0.0), named("alltoall")
    assert op.shape(1 << 20, 4, 0).splits == (1 << 18,) * 4
    assert op.least_traffic(4, 8) == pytest.approx(plain.least_traffic(4, 8))


def test_skew_takes_traffic_from_other_ranks_only() -> None:
    # Two nodes of two: ranks 0 and 1 receive 1 + 1/2 of a share from each of two other ranks.
    assert collectives.variant("alltoallv", skew=1.0).least_traffic(2, 2) == pytest.approx(0.75)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_skewed_chunks_are_never_empty(ranks: int) -> None:
    splits = collectives.variant("alltoallv", skew=5.0).shape(ranks * 4, ranks, 0).splits
    assert min(splits) > 0
    assert all(one % 4 == 0 for one in splits)


def test_variant_is_told_where_it_changes_something() -> None:
    asked = [collectives.variant(name, redop="avg", out_of_place=True).variant for name in NAMES[:3]]
    assert asked == ["avg, out of place", "", "avg"]


@pytest.mark.parametrize(("ranks", "exact"), [(2, True), (8, True), (3, False), (12, False)])
def test_averages_are_verified_where_they_are_exact(ranks: int, exact: bool) -> None:
    assert collectives.variant("all_reduce", redop="avg").exact(ranks) is exact
    assert collectives.variant("all_reduce", redop="max").exact(ranks)


def test_new_collective_is_one_record() -> None:
    # An exchange with both neighbours of a ring.
    op = Collective(
        name="neighbours",
        output=lambda shape: 2 * shape.count,
        bus=lambda _: Fraction(2),
        leaves_node=lambda _share, _weights: 2.0,
        call=lambda to: to.bind(print, to.input),
        result=lambda shape: (
            Segment(start=0, count=shape.count, source=(shape.rank - 1) % shape.ranks, offset=0),
            Segment(start=shape.count, count=shape.count, source=(shape.rank + 1) % shape.ranks, offset=0),
        ),
    )
    assert [part.source for part in op.result(op.shape(4, 3, 0))] == [2, 1]
    assert (op.buffer_bytes(100, 3), op.factor(8), op.least_traffic(2, 4)) == (300, 2.0, 2.0)
    assert op.busbw_GBps(10**9, 0.5, 3) == 4.0
    assert op.separate
    assert not op.variant


def test_record_without_call_or_result_is_refused() -> None:
    with pytest.raises(TypeError, match="'call' and 'result'"):
        Collective(name="barrier")  # type: ignore[call-arg]


def test_low_share_of_the_line_rate_is_remarkable_where_all_nodes_send_all_the_time() -> None:
    assert {op.name for op in COLLECTIVES if op.fills_network} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "alltoall",
    }
