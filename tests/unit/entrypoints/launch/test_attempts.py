"""Attempts of real launchers over stub workers: who takes part, what is lost, and how the run ends."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollcall_nodes import head_placement

from imgkit_entrypoints.launch.attempts import (
    FailedAttempt,
    StartWatch,
    assign_ranks,
    describe_cause,
    end_reason,
)
from imgkit_entrypoints.rollcall.messages import RENDEZVOUS, STARTING, WORKERS
from imgkit_entrypoints.rollcall.session import HeadSession

from .conftest import until

MARKERS = ("<number of nodes of this attempt>", "<node rank of this attempt>", "<port from the roll call>")
WORK = """
import os, signal, sys, time
nnodes, rank, port = sys.argv[1:4]
attempt, stop = int(os.environ["IMGKIT_ATTEMPT"]), os.environ["IMGKIT_STOP_DIR"]
first = os.environ["IMGKIT_FIRST_ATTEMPT"]
print("attempt", attempt, "rank", rank, "of", nnodes, "port", port, "works;", "first at", first, flush=True)
"""
PULSE = "from imgkit_entrypoints.launch.watchdog import Pulse\n"
HANG = WORK + "time.sleep(100)"
HANG_ONCE = WORK + "time.sleep(100 * (attempt == 1))"
SAVE = (
    WORK
    + """
while not os.path.exists(stop + "/stop"): time.sleep(0.02)
open(stop + "/state-saved", "w").write(os.environ["IMGKIT_JOB_ID"] + " 7")
"""
)


def start(nodes: Any, code: str, **options: Any) -> list[subprocess.Popen[bytes]]:
    """Three nodes; two of them train, and run the Python text `code`."""
    argv = [sys.executable, "-c", code, *MARKERS]
    hosts = ["host0", "host1", "host2"]
    options = {"nnodes": 3, "size": "2+1", "max_failures": 3, "hosts": hosts, **options}
    three = [nodes.start(argv, rank=rank, **options) for rank in range(3)]
    nodes.said("works;", 2)
    return three


def worker(nodes: Any, rank: int) -> int:
    """The worker of the node that started with `rank`."""
    (guard,) = (pid for pid in nodes.live_processes() if parent(pid) == nodes.processes[rank].pid)
    (worker_pid,) = (pid for pid in nodes.live_processes() if parent(pid) == guard)
    return worker_pid


def parent(pid: int) -> int:
    """The parent of a process; 0 if it has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def result(nodes: Any) -> str:
    """The code in the run's result."""
    job, code = (nodes.folder / "run/result").read_text().split()
    assert job == nodes.job
    return str(code)


def test_spare_takes_the_rank_of_a_killed_node(nodes):
    three = start(nodes, HANG_ONCE)
    assert "attempt 1 rank 0 of 2" in nodes.output()
    three[1].kill()
    assert nodes.codes() == [0, -9, 0]
    output = nodes.output()
    assert "lost node 2 of 3 (host1): " in output  # closed, or reset if it had not read everything
    assert "attempt 2 starts with 2 nodes; node 3 of 3 (host2) takes rank 1" in output
    assert "attempt 2 rank 1 of 2" in (nodes.folder / "node2-2.log").read_text()
    first, again = first_attempts((nodes.folder / "node0-0.log").read_text())
    assert first == again
    assert (nodes.folder / "run/attempt").read_text().split()[:2] == [nodes.job, "2"]
    assert result(nodes) == "0"


@pytest.mark.soak
def test_lost_spare_costs_nothing(nodes):
    three = start(nodes, WORK + "time.sleep(1)")
    three[2].kill()
    assert nodes.codes() == [0, 0, -9]
    assert "lost node 3 of 3 (host2), a spare" in nodes.output()
    assert "attempt 2" not in nodes.output()


def test_node_that_is_done_may_be_lost(nodes):
    go = "os.path.exists(os.environ['IMGKIT_RUN_DIR'] + '/go')"
    three = start(nodes, WORK + f"while rank == '0' and not {go}: time.sleep(0.02)")
    assert until(lambda: all(parent(pid) != three[1].pid for pid in nodes.live_processes()))
    time.sleep(0.5)  # it reports the end of its part meanwhile
    three[1].kill()
    nodes.said("lost node 2 of 3")
    (nodes.folder / "run/go").touch()
    assert nodes.codes() == [0, -9, 0]
    assert "attempt 2" not in nodes.output()


@pytest.mark.parametrize("victim", ["worker", pytest.param("guard", marks=pytest.mark.soak)])
def test_killed_process_of_a_node_is_a_new_attempt_with_the_same_nodes(nodes, victim):
    start(nodes, HANG_ONCE)
    pid = worker(nodes, 1)
    os.kill(pid if victim == "worker" else parent(pid), signal.SIGKILL)
    assert nodes.codes() == [0, 0, 0]
    output = nodes.output()
    assert "attempt 2 starts with 2 nodes\n" in output.replace(">", "")
    assert "attempt 2 rank 1 of 2" in (nodes.folder / "node1-1.log").read_text()
    assert len(set(re.findall(r"attempt (\d) rank \d of 2 port (\d+)", output))) == 2, "a new port"


def test_stopped_launcher_is_replaced_and_ends_when_it_goes_on(nodes):
    three = start(nodes, HANG_ONCE, lost_s=1.0)
    three[1].send_signal(signal.SIGSTOP)
    assert [three[0].wait(timeout=20), three[2].wait(timeout=20)] == [0, 0]
    assert "lost node 2 of 3 (host1): no heartbeat for 1 s" in nodes.output()
    three[1].send_signal(signal.SIGCONT)
    assert nodes.codes() == [0, 4, 0]


def test_lost_head_ends_all(nodes):
    three = start(nodes, HANG)
    three[0].kill()
    assert nodes.codes() == [-9, 4, 4]
    assert not (nodes.folder / "run/result").exists()


def test_run_ends_when_more_nodes_are_lost_than_it_has_spares(nodes):
    three = start(nodes, HANG)
    three[1].kill()
    nodes.said("attempt 2 starts with 2 nodes; node 3 of 3 (host2) takes rank 1")
    nodes.said("of 2 port", 4)
    three[2].kill()
    assert nodes.codes() == [4, -9, -9]
    assert "no further attempt: 1 node left, and the run needs 2" in nodes.output()
    assert result(nodes) == "4"


def test_program_that_always_fails_ends_the_run_with_its_code(nodes):
    start(nodes, WORK + "sys.exit(7 if rank == '1' else time.sleep(100))")
    assert nodes.codes() == [7, 7, 7]
    output = nodes.output()
    assert "no further attempt: two failures in a row before the first step" in output
    assert "(node 2 of 3 (host1) ended with exit code 7; before that: node 2 of 3 (host1)" in output
    assert result(nodes) == "7"


def test_two_failures_at_one_step_end_the_run(nodes):
    start(nodes, WORK + PULSE + "Pulse(stop, int(rank)).begin_step(33)\nsys.exit(1)")
    assert nodes.codes() == [1, 1, 1]
    assert "no further attempt: two failures in a row at step 33" in nodes.output()


@pytest.mark.soak
def test_failures_are_counted(nodes):
    start(nodes, WORK + PULSE + "Pulse(stop, int(rank)).begin_step(9 * attempt)\nsys.exit(1)", max_failures=2)
    assert nodes.codes() == [1, 1, 1]
    assert "no further attempt: --max-failures 2" in nodes.output()
    assert "attempt 3 starts" in nodes.output()


def first_attempts(text: str) -> list[float]:
    """When the first attempt began, as the workers were told."""
    return [float(seconds) for seconds in re.findall(r"first at ([\d.]+)", text)]


def test_one_node_starts_anew_too(nodes):
    argv = [sys.executable, "-c", WORK + "sys.exit(attempt == 1)", "1", "0", MARKERS[2]]
    start_s = time.monotonic()
    nodes.start(argv, max_failures=1)
    assert nodes.codes() == [0]
    assert "attempt 2 rank 0 of 1" in nodes.output()
    first, again = first_attempts(nodes.output())
    assert start_s < first == again
    nodes.start(argv, max_failures=1)  # a requeued job
    assert nodes.codes() == [0, 0]
    assert len(set(first_attempts(nodes.output()))) == 2
    assert result(nodes) == "0"


def test_saved_run_ends_the_spare_as_well(nodes):
    three = start(nodes, SAVE)
    three[2].terminate()
    assert nodes.codes() == [85, 85, 85]
    assert result(nodes) == "85"
    assert (nodes.folder / "run/requeued").read_text().split()[1] == "7"


def test_stop_during_a_restart_starts_nothing_more(nodes):
    slow = WORK + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ntime.sleep(100)"
    three = start(nodes, slow)
    three[1].kill()
    nodes.said("ending the program: lost node 2 of 3")
    three[0].terminate()
    assert nodes.codes() == [4, -9, 4]
    assert "no further attempt: a stop was requested" in nodes.output()
    assert nodes.output().count("attempt 2") == 0
    assert result(nodes) == "4"


@pytest.mark.soak
def test_stop_of_a_second_attempt_saves(nodes):
    three = start(nodes, SAVE)
    three[1].kill()
    nodes.said("works;", 4)
    (nodes.folder / "run/stop").touch()
    assert nodes.codes() == [0, -9, 0]
    assert "state saved at step 7" in nodes.output()
    assert result(nodes) == "0"


def test_run_folder_that_cannot_be_written_costs_the_marks_alone(nodes):
    # At the start such a folder is refused; this one is lost later.
    run = nodes.folder / "run"
    run.mkdir()
    three = start(nodes, HANG_ONCE)
    run.rename(nodes.folder / "lost")
    run.write_text("a file")
    three[1].kill()
    assert nodes.codes() == [0, -9, 0]
    assert "workers of an earlier attempt may still write" in nodes.output()
    assert "imgkit status will not see how the run has ended" in nodes.output()


def test_rendezvous_counts_from_when_all_nodes_are_in_it(monkeypatch):
    """Torchrun of a node on a slow file system is read for minutes, while the others wait for it."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    roll = HeadSession(replace(head_placement(nnodes=12), hosts=()), 1)
    watch = StartWatch(roll, 120.0)
    roll.phase = RENDEZVOUS
    assert watch.check_for_stall() == ""
    now += 1000
    assert watch.check_for_stall() == ""
    roll._phases.update(dict.fromkeys(range(1, 12), RENDEZVOUS))
    roll._phases[3] = WORKERS
    assert watch.check_for_stall() == ""
    now += 119
    assert watch.check_for_stall() == ""
    now += 1
    reason = watch.check_for_stall()
    assert "within 120 s (--rollcall-timeout); without workers: node 1 of 12 (127.0.0.1), " in reason
    assert "node 3 of 12, node 5 of 12, " in reason
    assert "node 9 of 12 and 3 more. " in reason
    roll.phase = WORKERS
    roll._phases.update(dict.fromkeys(range(1, 12), WORKERS))
    assert watch.check_for_stall() == ""


def test_each_attempt_has_a_rendezvous_of_its_own():
    roll = HeadSession(head_placement(nnodes=3), 1)
    roll._phases.update({1: WORKERS, 2: RENDEZVOUS})
    assert roll.phases == {0: STARTING, 1: WORKERS, 2: RENDEZVOUS}
    roll.start_attempt(2, {0: 0, 2: 1})
    assert roll.phases == {0: STARTING, 2: STARTING}


def failed(position: int | None = None, after_s: float = 1000.0) -> FailedAttempt:
    return FailedAttempt(cause="lost node 1", position=position, after_s=after_s)


@pytest.mark.parametrize(
    ("alive", "nnodes", "previous", "ranks"),
    [
        ([0, 1, 2], 2, {}, {0: 0, 1: 1}),
        ([0, 2, 3, 4], 4, {0: 0, 1: 1, 2: 2, 3: 3}, {0: 0, 4: 1, 2: 2, 3: 3}),
        ([0, 1], 2, {0: 0, 1: 1}, {0: 0, 1: 1}),
        ([0, 2], 2, {}, {0: 0, 2: 1}),
        ([0], 2, {}, {}),
        ([0, 1], 4, {}, {}),
        ([], 1, {}, {}),
    ],
    ids=["first", "lost node", "lost spare", "node left out", "no spare", "half", "none"],
)
def test_spares_take_the_free_ranks(alive, nnodes, previous, ranks):
    assert assign_ranks(alive, nnodes, previous) == ranks


@given(st.integers(1, 9), st.integers(0, 3), st.data())
def test_ranks_are_whole_and_kept_over_any_losses(nnodes, spares, data):
    alive = list(range(nnodes + spares))
    before: Mapping[int, int] = {}
    while ranks := assign_ranks(alive, nnodes, before):
        assert sorted(ranks.values()) == list(range(nnodes))
        assert ranks[0] == 0
        for number, rank in before.items():
            if number in alive:
                assert ranks[number] == rank
        before = ranks
        if len(alive) == 1:
            break
        alive.remove(data.draw(st.sampled_from(alive[1:])))


@pytest.mark.parametrize(
    ("failures", "max_failures", "reason"),
    [
        ([failed(65, 1.0)], 3, ""),
        ([failed(65), failed(99)], 1, "--max-failures 1: the run survives 1 failure"),
        ([failed(65)], 0, "--max-failures 0"),
        *(
            (
                [failed(9), *map(failed, positions)],
                9,
                "two failures in a row at step 33; a new attempt would fail there as well",
            )
            for positions in itertools.product((65, 66), repeat=2)
        ),
        ([failed(65), failed(90), failed(65)], 9, ""),
        (
            [failed(-1, 5.0), failed(None, 7.0)],
            9,
            "two failures in a row before the first step, 5 s and 7 s after the start",
        ),
        ([failed(-1, 5.0), failed(None, 61.0)], 9, ""),
        ([failed(-1, 5.0), failed(10, 5.0)], 9, ""),
    ],
)
def test_run_ends_after_too_many_or_equal_failures(failures, max_failures, reason):
    assert end_reason(failures, max_failures) == reason


def test_cause_is_a_lost_node_or_the_first_exit_code():
    lost = {"node 1": "it closed the connection"}
    assert describe_cause(lost, {"node 0": 1}) == "lost node 1: it closed the connection"
    assert describe_cause({}, {"node 1": 137}) == "node 1 ended with exit code 137 (SIGKILL)"
    assert describe_cause({}, {"node 1": 7, "node 0": 1}) == "node 1 ended with exit code 7"
