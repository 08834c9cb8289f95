"""Workers that stop moving or never connect, as real processes below real launchers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from imgkit_entrypoints.launch import user_program

from .conftest import stub, until

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
    pulse.begin_step(step)
    WITHIN
    time.sleep(0.02)
    pulse.end_step(step)
    sys.stdout.flush()
    if stop.exists():
        break
"""
WAITS = "step == 8 and waits_for_the_others()"
SOON = {"hang_after_s": 0.6, "tick_s": 0.1, "beat_s": 0.1, "lost_s": 20.0}


def worker(between: str = "", within: str = "") -> str:
    return WORKER.replace("BETWEEN", between or "pass").replace("WITHIN", within or "pass")


MEETS = """
def init_process_group(folder):
    Path(folder, f"meets-{rank}").touch()
    while not Path(folder, "goes-on").exists():
        time.sleep(0.05)
"""


def test_ranks_that_do_not_meet_are_told_soon(nodes, tmp_path):
    """Ranks wait for others in torch's store, in a function of this name."""
    waits = worker().replace("for step in", f"{MEETS}\ninit_process_group({str(tmp_path)!r})\nfor step in")
    nodes.start(stub(waits), **SOON)
    nodes.said("ranks 0, 1 on host0 in init_process_group for ")
    assert (
        "ranks are missing, or torch's store has lost their keys\n  ranks 0, 1 on host0 (process"
        in nodes.output()
    )
    (tmp_path / "goes-on").touch()
    nodes.said(" on host0 moved again")  # on a busy machine, one rank is seen before the other
    nodes.processes[0].terminate()
    assert nodes.codes() == [0]


def test_every_way_to_hang_is_told(nodes):
    ways = (
        "time.sleep(1000)",
        "sum(itertools.repeat(0))",  # no Python runs in this process before that is over
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "(signal.pthread_sigmask(0, [40]), time.sleep(1000))",
        "(signal.signal(40, signal.SIG_DFL), time.sleep(1000))",  # 40 would end it
    )
    hang = f"if step == 8 and rank: ({', '.join(f'lambda: {way}' for way in ways)})[rank - 1]()"
    launcher = nodes.start(stub(worker(hang, WAITS), len(ways) + 1), **SOON)
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


def test_rank_of_another_node_is_told_by_its_own(nodes):
    hang = worker("if step == 8 and rank == 3: time.sleep(1000)", WAITS)
    launchers = nodes.two(hang, **{**SOON, "hang_after_s": 2.0})
    nodes.said("<rank 3 on host1 did not move from the end of step 7")
    assert "(others: step 8)" in nodes.output()
    assert nodes.output().count("move") == 1
    assert [launcher.poll() for launcher in launchers] == [None, None]


def test_all_that_stand_in_one_step_are_told(nodes):
    hang = "if step == 8: time.sleep(1000) if rank == 1 else waits_for_the_others()"
    nodes.start(stub(worker(within=hang)), **SOON)
    nodes.said("no rank has moved from step 8 for ")
    nodes.said(" waits_for_the_others\n")
    output = nodes.output()  # in either order
    for rank, frames in (
        (0, r"<string>:\d+ waits_for_the_others\n    <string>:\d+ <mod"),
        (1, r"<string>:\d+ <mod"),
    ):
        stack = rf"  rank {rank} on host0 \(process \d+\): stack, innermost first:\n    {frames}"
        assert re.search(stack, output), output


def test_worker_that_goes_on_is_told(nodes):
    hang = "if step == 8 and rank == 1: time.sleep(2)"
    launcher = nodes.start(stub(worker(hang, "rank == 0 and step == 8 and time.sleep(2)")), **SOON)
    nodes.said("rank 1 on host0 moved again after ")
    launcher.terminate()
    assert nodes.codes() == [0]


LONG_STEPS = "time.sleep(0.7 if step < 5 else 1.5 if step == 5 else 0); step == 6 and print('past it')"
BUSY = "if step == 8: {}\n    step == 9 and print('past it')"


@pytest.mark.parametrize(
    ("code", "after_s"),
    [
        (worker().replace("for step in", "time.sleep(2)\nprint('past it', flush=True)\nfor step in"), 0.6),
        (worker(within=LONG_STEPS), 1.0),
        (worker(BUSY.format("[(time.sleep(0.2), pulse.count_sign_of_life()) for _ in range(9)]")), 1.0),
        (worker(BUSY.format("time.sleep(1.8)")), 0),
    ],
    ids=["busy start", "long steps", "signs of life", "reports are off"],
)
def test_worker_that_does_not_hang_is_not_told(nodes, code, after_s):
    launcher = nodes.start(stub(code), **{**SOON, "hang_after_s": after_s})
    nodes.said("past it", count=2)
    launcher.terminate()
    assert nodes.codes() == [0]
    assert "move" not in nodes.output()
    assert " on host0" not in nodes.output()


# ---- programs of dist-run, which note nothing
LAUNCH = """
import os, subprocess, sys
base = 2 * int(sys.argv[1])
workers = [
    subprocess.Popen([*sys.argv[2:]], env=os.environ | {"RANK": str(base + n), "LOCAL_RANK": str(n)})
    for n in range(2)
]
sys.exit(max(worker.wait() for worker in workers))
"""
STOP = "import os, sys, time\nstop = os.environ['IMGKIT_STOP_DIR'] + '/stop'\nrank = os.environ['RANK']\n"
PROGRAM_SOON = {"tick_s": 0.1, "beat_s": 0.1, "lost_s": 20.0, "nproc": 2}


def launch(tmp_path: Path, code: str, node: int = 0) -> list[str]:
    """Two workers that run the text `code` as dist-run does."""
    program = tmp_path / f"program{node}.py"
    program.write_text(STOP + code)
    worker = [sys.executable, user_program.__file__, str(program)]
    return [sys.executable, "-c", LAUNCH, str(node), *worker]


def test_stacks_of_all_ranks_come_without_py_spy(nodes, tmp_path):
    hang = (
        "def reads_data():\n    while True: time.sleep(0.02)\n"
        "def blocks():\n    os.read(os.pipe()[0], 1)\n"
        "blocks() if rank == '0' else reads_data()\n"
    )
    nodes.start(launch(tmp_path, hang), **PROGRAM_SOON, hang_after_s=1.0)
    nodes.said(" on host0 without a sign of life for ", within_s=60)
    nodes.said(" reads_data\n", within_s=60)
    text = nodes.output()
    assert "program0.py:" in text
    assert " blocks\n" in text
    assert "user_program.py" not in text
    assert "runpy" not in text
    nodes.processes[0].kill()
    nodes.codes()


def test_program_that_works_is_not_reported(nodes, tmp_path):
    busy = "for _ in range(60):\n    time.sleep(0.05)\nprint('done')\n"
    nodes.start(launch(tmp_path, busy), **PROGRAM_SOON, hang_after_s=0.5)
    assert nodes.codes() == [0]
    assert "sign of life" not in nodes.output()


def test_ranks_that_never_connect_end_with_the_nodes_named(nodes, tmp_path):
    """A stranger has deleted the keys of all ranks, so that each waits for the others."""
    waits = "def init_process_group():\n    os.read(os.pipe()[0], 1)\ninit_process_group()\n"
    both = {"nnodes": 2, "hosts": ["host0", "host1"], "timeout_s": 3.0, **PROGRAM_SOON, "hang_after_s": 1.0}
    for node in range(2):
        nodes.start(launch(tmp_path, note("workers") + waits, node), rank=node, **both)
    assert nodes.codes(within_s=90) == [4, 4]
    text = (
        "the ranks did not connect within 3 s (--rollcall-timeout); all of them are in init_process_group: "
    )
    assert f"<{text}node 1 of 2 (host0), node 2 of 2 (host1). " in nodes.output()


def note(phase: str) -> str:
    return f"from imgkit_entrypoints.launch import start_up\nstart_up.write_phase(os.environ, {phase!r})\n"


def test_head_leaves_after_the_other_nodes(nodes, tmp_path):
    """Torchrun of the head serves the store, and ends when the node agent has heard of all nodes."""
    head = "while not os.path.exists(os.path.dirname(stop) + '/others-have-ended'): time.sleep(0.02)\n"
    member_code = "while not os.path.exists(os.environ['IMGKIT_RUN_DIR'] + '/go'): time.sleep(0.02)\n"
    both = {"nnodes": 2, "hosts": ["host0", "host1"], **PROGRAM_SOON}
    launchers = []
    for node, code in enumerate((head, member_code)):
        launchers.append(nodes.start(launch(tmp_path, code, node), rank=node, **both))
    assert not until(lambda: any(launcher.poll() is not None for launcher in launchers), within_s=2.0)
    (nodes.folder / "run").mkdir(exist_ok=True)
    (nodes.folder / "run/go").touch()
    assert nodes.codes() == [0, 0]
