"""Workers that stop moving, as real processes below real launchers: named, with their stacks, and spared."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

STUB = str(Path(__file__).with_name("stub_torchrun.py"))
WORKER = """
import itertools, os, signal, sys, time
from pathlib import Path
from imgkit_entrypoints.launch.watchdog import Pulse

node = int(os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"].split(":")[0][-1])
rank = 2 * node + int(os.environ["LOCAL_RANK"])
stop = Path(os.environ["IMGKIT_STOP_DIR"], "stop")
pulse = Pulse(os.environ["IMGKIT_STOP_DIR"], rank)

def waits_for_the_others():
    while not stop.exists():
        time.sleep(0.05)

for step in itertools.count(1):
    BETWEEN
    pulse.begins(step)
    WITHIN
    time.sleep(0.02)
    pulse.done(step)
    sys.stdout.flush()
    if stop.exists():
        break
"""
WAITS = "step == 8 and waits_for_the_others()"
SOON = {"hang_after_s": 0.6, "tick_s": 0.1, "beat_s": 0.1, "lost_s": 20.0}


def worker(between: str = "", within: str = "") -> str:
    return WORKER.replace("BETWEEN", between or "pass").replace("WITHIN", within or "pass")


def alone(code: str, workers: int = 2) -> list[str]:
    """One node."""
    return [sys.executable, STUB, str(workers), code]


MEETS = """
def init_process_group(folder):
    Path(folder, f"meets-{rank}").touch()
    while not Path(folder, "goes-on").exists():
        time.sleep(0.05)
"""


def test_ranks_that_do_not_meet_are_told_soon(nodes: Any, tmp_path: Path) -> None:
    """Ranks wait for others in torch's store, in a function of this name."""
    waits = worker().replace("for step in", f"{MEETS}\ninit_process_group({str(tmp_path)!r})\nfor step in")
    nodes.start(alone(waits), **SOON)
    nodes.said("ranks 0, 1 on host0 in init_process_group for ")
    assert (
        "ranks are missing, or torch's store has lost their keys\n  ranks 0, 1 on host0 (process"
        in nodes.output()
    )
    (tmp_path / "goes-on").touch()
    nodes.said(" on host0 moved again")  # on a busy machine, one rank is seen before the other
    nodes.processes[0].terminate()
    assert nodes.codes() == [0]


def test_busy_start_is_not_told(nodes: Any) -> None:
    nodes.start(
        alone(worker().replace("for step in", "time.sleep(2)\nprint('busy', flush=True)\nfor step in")),
        **SOON,
    )
    nodes.said("busy", count=2)
    nodes.processes[0].terminate()
    assert nodes.codes() == [0]
    assert " on host0" not in nodes.output()


def test_every_way_to_hang_is_told(nodes: Any) -> None:
    ways = (
        "time.sleep(1000)",
        "sum(itertools.repeat(0))",  # no Python runs in this process before that is over
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "(signal.pthread_sigmask(0, [40]), time.sleep(1000))",
        "(signal.signal(40, signal.SIG_DFL), time.sleep(1000))",  # 40 would end it
    )
    hang = f"if step == 8 and rank: ({', '.join(f'lambda: {way}' for way in ways)})[rank - 1]()"
    launcher = nodes.start(alone(worker(hang, WAITS), len(ways) + 1), **SOON)
    nodes.said("did not move")
    output = nodes.output()
    late = r"<ranks 1, 2, 3, 4, 5 on host0 did not move from the end of step 7 for \d s \(others: step 8\)\n"
    assert re.search(late, output), output
    stack = r"stack, innermost first:\n    <string>:\d+ <lambda>\n    <string>:\d+ <module>"
    assert re.search(rf"  ranks 1, 2 on host0 \(process \d+, \d+\): {stack}", output), output
    assert re.search(r"  rank 3 .*: it is stopped \(SIGSTOP\); to continue it: kill -CONT \d+\n", output), (
        output
    )
    assert re.search(r"  ranks 4, 5 .*: no stack: it did not answer signal 40 in 2 s\n", output), output
    assert launcher.poll() is None


def test_rank_of_another_node_is_told_by_its_own(nodes: Any) -> None:
    hang = worker("if step == 8 and rank == 3: time.sleep(1000)", WAITS)
    launchers = nodes.two(hang, **{**SOON, "hang_after_s": 2.0})
    nodes.said("<rank 3 on host1 did not move from the end of step 7")
    assert "(others: step 8)" in nodes.output()
    assert nodes.output().count("move") == 1
    assert [launcher.poll() for launcher in launchers] == [None, None]


def test_all_that_stand_in_one_step_are_told(nodes: Any) -> None:
    hang = "if step == 8: time.sleep(1000) if rank == 1 else waits_for_the_others()"
    nodes.start(alone(worker(within=hang)), **SOON)
    nodes.said("no rank has moved from step 8 for ")
    nodes.said(" waits_for_the_others\n")
    output = nodes.output()  # in either order
    for rank, frames in (
        (0, r"<string>:\d+ waits_for_the_others\n    <string>:\d+ <mod"),
        (1, r"<string>:\d+ <mod"),
    ):
        stack = rf"  rank {rank} on host0 \(process \d+\): stack, innermost first:\n    {frames}"
        assert re.search(stack, output), output


def test_worker_that_goes_on_is_told(nodes: Any) -> None:
    hang = "if step == 8 and rank == 1: time.sleep(2)"
    launcher = nodes.start(alone(worker(hang, "rank == 0 and step == 8 and time.sleep(2)")), **SOON)
    nodes.said("rank 1 on host0 moved again after ")
    launcher.terminate()
    assert nodes.codes() == [0]


def test_steps_that_take_long_are_not_told(nodes: Any) -> None:
    slow = "time.sleep(0.7 if step < 5 else 1.5 if step == 5 else 0); step == 6 and print('past it')"
    launcher = nodes.start(alone(worker(within=slow)), **{**SOON, "hang_after_s": 1.0})
    nodes.said("past it", count=2)
    launcher.terminate()
    assert nodes.codes() == [0]
    assert "move" not in nodes.output()


@pytest.mark.parametrize(
    ("busy", "after_s"),
    [("[(time.sleep(0.2), pulse.lives()) for _ in range(9)]", 1.0), ("time.sleep(1.8)", 0)],
)
def test_sign_of_life_or_zero_keeps_it_quiet(nodes: Any, busy: str, after_s: float) -> None:
    busy = f"if step == 8: {busy}\n    step == 9 and print('past it')"
    launcher = nodes.start(alone(worker(busy)), **{**SOON, "hang_after_s": after_s})
    nodes.said("past it", count=2)
    launcher.terminate()
    assert nodes.codes() == [0]
    assert "move" not in nodes.output()
