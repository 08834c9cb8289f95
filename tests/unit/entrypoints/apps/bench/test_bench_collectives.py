"""The size, bandwidth and result of each collective: nccl-tests' definitions, and every element's origin."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench import collectives
from imgkit_entrypoints.apps.bench.collectives import COLLECTIVES, NAMES, Collective, Shape, find_collective

REDUCED, SHARED, WHOLE = (0.0, 1.0, 1.5, 1.75), (0.0, 0.5, 0.75, 0.875), (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "factors", "busbw", "fills_network"),
    # nccl-tests, src/*.cu: the factor of getBw for 1, 2, 4 and 8 ranks. Then the expected busbw of 4 nodes of
    # 4 ranks with 800 Gbps (100 GBps) each, and whether all nodes send all the time: a low one is a fault.
    [
        ("all_reduce", REDUCED, 100.0, True),  # a flat ring sends 2 x 15/16 of the size out of each node
        ("all_gather", SHARED, 100.0, True),
        ("reduce_scatter", SHARED, 100.0, True),
        ("alltoall", SHARED, 100 / 3 * 15 / 16, True),  # a node's 4 ranks send 3/4 of their sizes out of it
        ("alltoallv", SHARED, 100 / 3 * 15 / 16, True),
        ("gather", SHARED, 100 / 0.75 * 15 / 16, False),  # 3/4 of the size enters the root's node
        ("scatter", SHARED, 100 / 0.75 * 15 / 16, False),
        ("broadcast", WHOLE, 100.0, False),
        ("reduce", WHOLE, 100.0, False),
        ("sendrecv", WHOLE, 100.0, False),
    ],
)
def test_factors_are_those_of_nccl_tests(name, factors, busbw, fills_network):
    collective = find_collective(name)
    assert tuple(collective.factor(ranks) for ranks in (1, 2, 4, 8)) == factors
    assert collective.expected_busbw_GBps(800.0, 4, 4) == pytest.approx(busbw)
    assert collective.fills_network == fills_network


@pytest.mark.parametrize(
    ("ranks", "algbw", "busbw"),
    # Published rows of all_reduce, columns rounded to 0.1 (EPFL's RoCE guide; BSC's MareNostrum 5 tables).
    [(2, 1687.1, 1687.1), (4, 1081.0, 1621.5), (8, 703.3, 1230.8), (16, 349.9, 656.0), (64, 335.4, 660.4)],
)
def test_factor_reproduces_published_rows(ranks, algbw, busbw):
    assert algbw * find_collective("all_reduce").factor(ranks) == pytest.approx(busbw, abs=0.16)


@pytest.mark.parametrize(
    ("name", "size", "elements"),
    # nccl-tests, src/*.cu: (count / ranks) & ~(16 / element - 1) per rank; too small a size is 0 there.
    [("all_reduce", 8, 2), ("all_gather", 8, 12), ("all_gather", 4096, 1020), ("all_reduce", 1, 1)],
)
def test_every_rank_gets_as_many_elements(name, size, elements):
    assert find_collective(name).round_to_elements(size, 4, 3) == elements


@pytest.mark.parametrize("item", [2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 3, 8, 12])
def test_no_chunk_is_cut_within_16_bytes(ranks, item):
    for op in (operation for operation in COLLECTIVES if operation.is_divided):
        for size in (1, 100, 4096, 1_000_000_007):
            chunk = op.round_to_elements(size, item, ranks) * item // ranks
            assert chunk % 16 == 0
            as_nccl_tests = (size // item // ranks & ~(16 // item - 1)) * item
            assert chunk == (as_nccl_tests or 16)


def simulated(op: Collective, inputs: list[list[int]], rank: int) -> list[int] | None:
    """An independent definition of each collective; None if a rank gets nothing."""
    ranks, root = len(inputs), collectives.ROOT
    part = max(1, len(inputs[root]) // ranks)
    total = [sum(column) for column in zip(*inputs, strict=False)]
    joined = [value for row in inputs for value in row]
    rank_slice = slice(rank * part, (rank + 1) * part)
    results: dict[str, list[int] | None] = {
        "all_reduce": total,
        "all_gather": joined,
        "reduce_scatter": total[rank_slice],
        "broadcast": inputs[root],
        "reduce": total if rank == root else None,
        "alltoall": [value for row in inputs for value in row[rank_slice]],
        "alltoallv": [value for row in inputs for value in row[rank_slice]],
        "sendrecv": inputs[(rank - 1) % ranks],
        "gather": joined if rank == root else None,
        "scatter": inputs[root][rank_slice],
    }
    return results[op.name]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", COLLECTIVES, ids=NAMES)
def test_result_says_where_every_element_is_from(op, ranks):
    count = op.round_to_elements(48, 4, ranks)
    inputs = [
        [1000 * rank + index for index in range(op.input(Shape(count=count, ranks=ranks, rank=rank)))]
        for rank in range(ranks)
    ]
    for rank in range(ranks):
        shape = Shape(count=count, ranks=ranks, rank=rank)
        expected = simulated(op, inputs, rank)
        output: list[int] = []
        for segment in op.result(shape):
            assert segment.start == len(output)
            positions = range(segment.offset, segment.offset + segment.count)
            sources = inputs if segment.source is None else [inputs[segment.source]]
            output += [sum(row[position] for row in sources) for position in positions]
        assert (output or None) == expected
        if op.has_separate_output and expected is not None:
            assert op.output_elements(shape) == len(expected)


@pytest.mark.parametrize(("name", "factor"), [("all_reduce", 1), ("broadcast", 1), ("alltoall", 2)])
def test_buffers_are_at_most_twice_the_size(name, factor):
    assert find_collective(name).buffer_bytes(4096, 4) == factor * 4096
    assert all(op.buffer_bytes(4096, 4) <= 2 * 4096 for op in COLLECTIVES)


def test_record_without_call_or_result_is_refused():
    with pytest.raises(TypeError, match="'call' and 'result'"):
        Collective(name="barrier")  # type: ignore[call-arg]
