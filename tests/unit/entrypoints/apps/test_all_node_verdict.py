"""The verdict names the bad host from the answers of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from imgkit_entrypoints.apps.doctor import Answer, failed_hosts, format_table, judge_nodes, verdict_line
from imgkit_entrypoints.doctor.checks import Check

HOSTS = ("as01", "as01", "as02", "as02", "as03", "as03")
TIMED_OUT = {"error": "Timed out waiting 60000ms for recv operation to complete", "seconds": 60.0}
MEMLOCK = Check(name="memlock", verdict="fail", evidence="Max locked memory 65536", fix="ulimit -l unlimited")
STACK = Check(name="stack", verdict="warn", evidence="2097152", fix="ulimit -s 8192")
GPU = {"device": "cuda:0", "machine": "b00t"}
ALL_RANKS = range(len(HOSTS))
CHECKED = (Check(name="gpus", verdict="ok", evidence="4"),)
IN_TIME = {rank: {"time_s": 1e9 + rank / 100, "checks": CHECKED} for rank in ALL_RANKS}

Changes = Mapping[int, Mapping[str, object] | None]


def on(*ranks: int, **values: object) -> dict[int, Mapping[str, object] | None]:
    return dict.fromkeys(ranks, values)


def make_answers(changes: Changes) -> dict[int, Answer]:
    """Return the answers of six good ranks on three hosts; None removes the answer of a rank."""
    answers = {}
    for rank, host in enumerate(HOSTS):
        values: Any = changes.get(rank, {})
        if values is not None:
            answers[rank] = dataclasses.replace(Answer(rank=rank, host=host, device="cpu"), **values)
    return answers


@pytest.mark.parametrize(
    ("changes", "verdicts", "lines"),
    [
        ({}, ("ok", "ok", "ok"), []),
        (
            on(0, 1, 3, 4, 5, wrong=(2,)),
            ("ok", "fail", "ok"),
            ["ranks 2-3\nthe values of rank 2 arrived corrupted at 5 of 6 ranks\nok "],
        ),
        (
            on(5, wrong=(0, 1, 2, 3, 4, 5)),
            ("ok", "ok", "fail"),
            ["rank 5 received wrong values from rank 0, 1, 2, 3, 4, 5"],
        ),
        (
            on(0, 1, 4, 5, **TIMED_OUT) | {2: None, 3: None},
            ("unknown", "fail", "unknown"),
            ["rank 2 did not answer within 60 s", f"rank 0 after 60 s: {TIMED_OUT['error']}"],
        ),
        (
            on(*ALL_RANKS, **TIMED_OUT) | on(2, **TIMED_OUT, checks=(MEMLOCK,)),
            ("unknown", "fail", "unknown"),
            ["\nfail memlock: Max locked memory 65536\n-> ulimit -l unlimited\n"],
        ),
        (on(*ALL_RANKS, **TIMED_OUT), ("fail", "fail", "fail"), []),
        (on(0, checks=(STACK,)), ("warn", "ok", "ok"), ["\nwarn stack: 2097152\n-> ulimit -s 8192\n"]),
        (IN_TIME, ("ok", "ok", "ok"), []),
        (
            {**IN_TIME, 2: {**IN_TIME[2], "time_s": 1e9 - 90}},
            ("ok", "warn", "ok"),
            ["its clock is 90.0 s behind the median of all nodes"],
        ),
        (
            on(0, **GPU, nccl_host="pod-0 27")
            | on(2, **GPU, nccl_host="pod-1 31")
            | on(4, **{**GPU, "machine": "0ther"}, nccl_host="pod-2 27"),
            ("warn", "warn", "ok"),
            ["is the same on as02, but", "NCCL_HOSTID"],
        ),
        (on(0, 2, **GPU, nccl_host="one 27"), ("ok", "ok", "ok"), []),
        (
            on(0, device="cuda:0", nccl_host="a") | on(2, device="cuda:0"),
            ("ok", "ok", "ok"),
            [],
        ),
    ],
    ids=[
        "good",
        "sender of wrong values",
        "receiver of wrong values",
        "silent node and its victims",
        "failed check",
        "errors everywhere",
        "warning",
        "clocks",
        "wrong clock",
        "containers of one machine",
        "containers that share memory",
        "unknown machine",
    ],
)
def test_bad_node_is_named_with_its_reason(changes, verdicts, lines):
    nodes = judge_nodes(HOSTS, make_answers(changes), 60)
    assert tuple(node.verdict for node in nodes) == verdicts
    assert [(node.host, node.ranks) for node in nodes] == [
        ("as01", (0, 1)),
        ("as02", (2, 3)),
        ("as03", (4, 5)),
    ]
    table = "\n".join(line.strip() for line in format_table(nodes))
    for line in lines:
        assert line in table
    failed = [node.host for node in nodes if node.verdict == "fail"]
    if failed:
        assert verdict_line(nodes, 6) == f"FAILED on {', '.join(failed)} (3 nodes, 6 ranks)"
    else:
        assert verdict_line(nodes, 6) == "all_reduce of 1 MiB verified on 3 nodes, 6 ranks"


def test_host_that_said_nothing_is_still_listed():
    nodes = judge_nodes((*HOSTS[:5], ""), make_answers({5: None}), 60)
    assert nodes[-1].host == "a host that never reported its name"
    assert [node.verdict for node in nodes] == ["ok", "ok", "ok", "fail"]


def test_strict_run_fails_by_a_warning():
    nodes = judge_nodes(HOSTS, make_answers(on(2, checks=(STACK,))), 60)
    assert failed_hosts(nodes, strict=False) == []
    assert failed_hosts(nodes, strict=True) == ["as02"]
    assert verdict_line(nodes, 6, strict=True).startswith("FAILED on as02 (3 nodes, 6 ranks): --strict")
