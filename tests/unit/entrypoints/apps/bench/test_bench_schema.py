"""The JSON Schema of the saved file: it is valid, covers all that is written, and the reader asks no less."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import (
    collectives,
    compute,
    json_schema,
    nccl_log,
    node_state,
    record,
    soak,
    verdict,
)
from imgkit_entrypoints.apps.bench.node_state import Count
from imgkit_entrypoints.apps.bench.verdict import LateRank
from imgkit_entrypoints.errors import UsageError

SCHEMA = json_schema.made()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def whole() -> dict[str, Any]:
    """A file with every optional part, written as a run writes it."""
    sizes = [1 << power for power in (12, 20, 30)]
    common: dict[str, Any] = {"dtype": "fp32", "group": "world", "variant": "2 communicators at once"}
    results = []
    for size in sizes:
        seconds = 1e-5 + size / 5e10
        results.append(
            record.new_result(
                "all_reduce",
                1.75,
                seconds,
                size_bytes=size,
                iterations=9,
                wrong=None,
                batches=[seconds] * 5,
                **common,
            )
        )
        results.append(
            record.new_result(
                "all_reduce",
                1.75,
                seconds,
                size_bytes=size,
                iterations=2,
                wrong=0,
                times=[seconds] * 2,
                **common,
            )
        )
    gpu = node_state.GpuClocks(
        index=0, sm_MHz=1980, most_MHz=None, temperature_C=61, slowed_by=("heat (hardware)",)
    )
    now = node_state.Condition(gpus=(gpu,), errors={"mlx5_0:1 symbol_error": 0})
    context = verdict.RunContext(
        hosts=("n1", "n2"),
        ranks=8,
        group="world",
        together=8,
        device="cuda",
        fabric="infiniband",
        line_rate_Gbps=200.0,
        decided={"all_reduce": nccl_log.NcclChoice(algorithm="Ring", protocol="Simple", channels=16)},
        conditions=(node_state.NodeConditions(host="n1", before=now, after=now),),
    )
    largest = verdict.Largest(
        op=collectives.named("all_reduce"),
        size_bytes=sizes[-1],
        seconds=0.1,
        batch_s=0.9,
        busbw_GBps=18.0,
        ports=({"mlx5_0:1": Count(sent_bytes=10**10, received_bytes=10**10)},) * 2,
        times=tuple((one.size_bytes, one.time_us / 1e6) for one in results[::2]),
    )
    made = record.Record(
        started="2026-11-21T15:00:00+00:00",
        command=("dist-bench",),
        world=record.World(
            ranks=8, nodes=2, ranks_per_node=4, hosts=("n1", "n2"), backend="nccl", device="cuda"
        ),
        fingerprint={"nccl": "2.27.3"},
        line_rate_Gbps=None,
        results=results,
        verdict=verdict.judge([largest], context, [LateRank(rank=1, seconds=0.02)], ["n1"] * 8),
        complete=True,
        transport=("network IB",),
    )
    made.verdict["matrix_GBps"] = [[0.0, 1.5], [1.5, 0.0]]
    moment = soak.Moment(
        at_s=30.0,
        op="all_reduce",
        size_bytes=8,
        iterations=9,
        low_us=1.0,
        median_us=2.0,
        high_us=3.0,
        busbw_GBps=4.0,
        wrong=None,
    )
    beside = compute.OverlapTimes(
        op="all_reduce", size_bytes=8, communication_s=1e-3, computation_s=1e-3, both_s=1.5e-3
    )
    made.verdict["timeline"] = [dataclasses.asdict(moment)]
    made.verdict["overlap"] = [{**dataclasses.asdict(beside), "hidden": beside.hidden}]
    made.verdict["rails_GBps"] = [made.verdict["matrix_GBps"]] * 4
    found: dict[str, Any] = json.loads(made.to_json())
    return found


WHOLE = whole()


def undescribed(data: object, described: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the fields that the schema does not name."""
    if isinstance(data, dict) and "properties" in described:
        for name, value in data.items():
            if name not in described["properties"]:
                yield f"{at}/{name}"
            else:
                yield from undescribed(value, described["properties"][name], f"{at}/{name}")
    for value in data if isinstance(data, list) else ():
        yield from undescribed(value, described.get("items", {}), at)


def paths(data: object, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in inner:
        yield from paths(value, (*here, name))


def changed(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    data = copy.deepcopy(WHOLE)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


def test_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_everything_written_is_described() -> None:
    VALIDATOR.validate(WHOLE)
    assert list(undescribed(WHOLE, SCHEMA)) == []
    assert all(WHOLE["verdict"][part] for part in SCHEMA["properties"]["verdict"]["properties"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("tool",), "nccl-tests"),
        (("complete",), "yes"),
        (("world", "ranks"), 0),
        (("results", 0, "timing"), "mean"),
        (("results", 0, "time_us"), 0),
        (("results", 1, "times_us"), []),
        (("results", 1, "p95_us"), None),
        (("results", 0, "batches_us"), [0]),
        (("results", 0, "median_us"), "12"),
        (("results", 0, "busbw_GBps"), "12"),
        (("verdict", "sentences"), None),
        (("verdict", "traffic", 0, "least_Gbps"), None),
        (("verdict", "conditions", 0, "before", "gpus", 0, "index"), -1),
    ],
)
def test_wrong_fields_are_refused(path: tuple[Any, ...], value: object) -> None:
    assert not VALIDATOR.is_valid(changed(path, value))


@pytest.mark.parametrize("path", [path for path in paths(WHOLE) if path and isinstance(path[-1], str)][:40])
def test_missing_fields_are_refused_where_the_reader_does(path: tuple[Any, ...]) -> None:
    data = copy.deepcopy(WHOLE)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    try:
        record.parse(data, "run.json")
    except UsageError:
        assert not VALIDATOR.is_valid(data)


READ = [path for path in paths(WHOLE) if path and path[:1] != ("verdict",)]


@given(
    st.sampled_from(READ), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
)
def test_what_the_reader_takes_is_valid(path: tuple[Any, ...], value: object) -> None:
    data = changed(path, value)
    try:
        record.parse(data, "run.json")
    except UsageError:
        return
    VALIDATOR.validate(data)


def test_mean_keeps_its_field_beside_the_median() -> None:
    common: dict[str, Any] = {"size_bytes": 1000, "dtype": "fp32", "group": "world", "wrong": None}
    made = record.new_result("all_reduce", 2.0, 3e-6, iterations=5, batches=[1e-6] * 4 + [11e-6], **common)
    assert (made.time_us, made.median_us) == pytest.approx((3.0, 1.0))
    assert (made.busbw_GBps, made.median_busbw_GBps) == pytest.approx((2 / 3, 2.0))


def test_command_prints_it_without_torch() -> None:
    command = (sys.executable, "-I", "-m", "imgkit_entrypoints", "dist-bench", "schema")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == SCHEMA


def test_command_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"unexpected argument run\.json"):
        json_schema.main(["run.json"])
    assert capsys.readouterr().out == ""
