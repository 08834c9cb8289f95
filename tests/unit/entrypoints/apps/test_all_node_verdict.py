"""The verdict names the bad host from the answers of all ranks."""

from __future__ import annotations

import dataclasses

from imgkit_entrypoints.apps.doctor import Answer, failed_hosts, format_table, judge_nodes, verdict_line
from imgkit_entrypoints.doctor.checks import Check

HOSTS = ("as01", "as01", "as02", "as02", "as03", "as03")
TIMED_OUT = "Timed out waiting 60000ms for recv operation to complete"


def make_answers(**changed: dict[str, object]) -> dict[int, Answer]:
    """Answers of six good ranks on three hosts; ``r3={...}`` changes one."""
    good = {rank: Answer(rank=rank, host=host, device="cpu") for rank, host in enumerate(HOSTS)}
    for name, values in changed.items():
        good[int(name[1:])] = dataclasses.replace(good[int(name[1:])], **values)  # type: ignore[arg-type]
    return good


def judged(answers: dict[int, Answer]) -> dict[str, str]:
    return {node.host: node.verdict for node in judge_nodes(HOSTS, answers, 60)}


def test_good_nodes_are_ok() -> None:
    nodes = judge_nodes(HOSTS, make_answers(), 60)
    assert [(node.host, node.ranks, node.verdict) for node in nodes] == [
        ("as01", (0, 1), "ok"),
        ("as02", (2, 3), "ok"),
        ("as03", (4, 5), "ok"),
    ]
    assert verdict_line(nodes, 6) == "all_reduce of 1 MiB verified on 3 nodes, 6 ranks"


def test_sender_of_wrong_numbers_is_named() -> None:
    answers = make_answers(**{f"r{rank}": {"wrong": (2,)} for rank in (0, 1, 3, 4, 5)})
    assert judged(answers) == {"as01": "ok", "as02": "fail", "as03": "ok"}
    nodes = judge_nodes(HOSTS, answers, 60)
    assert nodes[1].reasons == ("the values of rank 2 arrived corrupted at 5 of 6 ranks",)
    assert verdict_line(nodes, 6).startswith("FAILED on as02 (")


def test_wrong_clock_is_a_warning_of_its_node() -> None:
    checked = {"checks": (Check(name="gpus", verdict="ok", evidence="4"),)}
    answers = make_answers(**{f"r{rank}": {"time_s": 1e9 + rank / 100, **checked} for rank in range(6)})
    assert judged(answers) == {"as01": "ok", "as02": "ok", "as03": "ok"}
    late = {**answers, 2: dataclasses.replace(answers[2], time_s=1e9 - 90)}
    assert judged(late) == {"as01": "ok", "as02": "warn", "as03": "ok"}
    assert "its clock is 90.0 s behind the median of all nodes" in "".join(
        format_table(judge_nodes(HOSTS, late, 60))
    )


def test_receiver_of_wrong_numbers_is_named() -> None:
    answers = make_answers(r5={"wrong": (0, 1, 2, 3, 4, 5)})
    assert judged(answers) == {"as01": "ok", "as02": "ok", "as03": "fail"}
    assert "rank 5 received wrong values from rank 0, 1, 2" in judge_nodes(HOSTS, answers, 60)[2].reasons[0]


def test_silent_rank_is_named_and_others_are_victims() -> None:
    answers = make_answers(**{f"r{rank}": {"error": TIMED_OUT, "seconds": 60.0} for rank in (0, 1, 4, 5)})
    del answers[2], answers[3]
    assert judged(answers) == {"as01": "unknown", "as02": "fail", "as03": "unknown"}
    text = "".join(format_table(judge_nodes(HOSTS, answers, 60)))
    assert "rank 2 did not answer within 60 s" in text
    assert "rank 0 after 60 s: Timed out" in text


def test_failing_check_names_the_host() -> None:
    check = Check(
        name="memlock", verdict="fail", evidence="Max locked memory 65536", fix="ulimit -l unlimited"
    )
    answers = make_answers(**{f"r{rank}": {"error": TIMED_OUT} for rank in range(6)})
    answers[2] = dataclasses.replace(answers[2], checks=(check,))
    assert judged(answers) == {"as01": "unknown", "as02": "fail", "as03": "unknown"}
    lines = [line.strip() for line in format_table(judge_nodes(HOSTS, answers, 60))]
    at = lines.index("fail memlock: Max locked memory 65536")
    assert lines[at + 1] == "-> ulimit -l unlimited"


def test_errors_everywhere_fail_everywhere() -> None:
    answers = make_answers(**{f"r{rank}": {"error": TIMED_OUT} for rank in range(6)})
    assert set(judged(answers).values()) == {"fail"}


def test_warning_alone_does_not_fail() -> None:
    check = Check(name="stack", verdict="warn", evidence="2097152", fix="ulimit -s 8192")
    nodes = judge_nodes(HOSTS, make_answers(r0={"checks": (check,)}), 60)
    assert [node.verdict for node in nodes] == ["warn", "ok", "ok"]
    assert "verified" in verdict_line(nodes, 6)


def test_host_that_said_nothing_is_still_listed() -> None:
    answers = make_answers()
    del answers[5]
    nodes = judge_nodes((*HOSTS[:5], ""), answers, 60)
    assert nodes[-1].host == "a host that never reported its name"
    assert nodes[-1].verdict == "fail"
    assert nodes[1].verdict == "ok"


def test_containers_of_one_machine_are_told() -> None:
    gpu = {"device": "cuda:0", "machine": "b00t"}
    answers = make_answers(
        r0={**gpu, "nccl_host": "pod-0 27"},
        r2={**gpu, "nccl_host": "pod-1 31"},
        r4={**gpu, "machine": "0ther", "nccl_host": "pod-2 27"},
    )
    nodes = judge_nodes(HOSTS, answers, 60)
    assert [node.verdict for node in nodes] == ["warn", "warn", "ok"]
    assert "is the same on as02, but" in nodes[0].checks[0].evidence
    assert "NCCL_HOSTID" in nodes[0].checks[0].fix


def test_containers_that_share_memory_are_fine() -> None:
    same = {"device": "cuda:0", "machine": "b00t", "nccl_host": "one 27"}
    assert set(judged(make_answers(r0=same, r2=same)).values()) == {"ok"}
    unknown = {"device": "cuda:0", "machine": ""}
    assert set(judged(make_answers(r0={**unknown, "nccl_host": "a"}, r2=unknown)).values()) == {"ok"}


def test_strict_run_fails_by_a_warning() -> None:
    warned = (Check(name="gpus", verdict="warn", evidence="3 visible", fix="ask for 4"),)
    nodes = judge_nodes(HOSTS, make_answers(r2={"checks": warned}), 60)
    assert failed_hosts(nodes, strict=False) == []
    assert failed_hosts(nodes, strict=True) == ["as02"]
    assert verdict_line(nodes, 6, strict=True).startswith("FAILED on as02 (3 nodes, 6 ranks): --strict")
