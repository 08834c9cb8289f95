"""dist-train under faults, with the real launcher and torchrun: killed, hung, moved to another host."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from labkit import ROOT, in_image, locked, shared_folder
from runkit import assert_same_state

STEPS = 60
TRAIN = """
train() {
    exec python3 -I -m imgkit_entrypoints dist-train --device cpu --nproc 2 --model faults.py:model \\
        --data faults.py:data --batch-size 4 --momentum 0.9 --steps STEPS --save-every 5 --log-every 5 "$@"
}
"""

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all runs of this file write to."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("train_faults.py", "train_kills.py", "train_schedules.py", "train_many.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    shutil.copy(ROOT / "tests/lab/saved_states.py", folder)
    (folder / "train_faults.py").rename(folder / "faults.py")
    return folder


@pytest.fixture(scope="module")
def undisturbed(standin: str, runs: Path) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = shared_folder() / "faults"
    with locked("faults"):
        if not folder.exists():
            shutil.copytree(runs, folder)
            inside(standin, folder, "(train --run-dir whole)")
    return folder / "whole"


def inside(standin: str, runs: Path, script: str, *, timeout_s: float = 600) -> str:
    """Run the shell `script` in the image; ``train`` in it becomes the whole command."""
    shell = ("bash", "-euc", TRAIN.replace("STEPS", str(STEPS)) + script)
    mounted = ("--volume", f"{runs}:/runs", "--workdir", "/runs")
    result = in_image(standin, *shell, options=mounted, timeout_s=timeout_s)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    return output


def assert_ended_as(standin: str, undisturbed: Path, run: Path) -> None:
    """Fail unless a run has ended with the state of the undisturbed one."""
    assert_same_state(standin, undisturbed, run, "weights", "optimizer", "ranks")


def test_killed_worker_is_started_again_and_goes_on(standin, runs, undisturbed):
    output = inside(standin, runs, "FAULT='once kill 1 33' train --max-failures 1 --run-dir killed")
    assert re.search(r"resumes after step (25|30) of 60: killed/checkpoints", output), output
    assert_ended_as(standin, undisturbed, runs / "killed")


@pytest.mark.soak  # tests/lab/job has spares with stubs
def test_spare_takes_over_from_a_killed_node(standin, runs, undisturbed):
    script = """
export PAUSE=0.05 IMGKIT_RUN_DIR=spare
words="--nproc 1 --nnodes 2+1 --head 127.0.0.1"
(train $words --node-rank 2) & spare=$!
(train $words --node-rank 1) & victim=$!
(train $words --node-rank 0) & head=$!
until test -e spare/checkpoints/step-*10; do sleep 0.05; kill -0 $head; done
kill -KILL $victim
wait $head
wait $spare
"""
    output = inside(standin, runs, script)
    assert "attempt 2 starts with 2 nodes; node 3 of 3" in output
    assert re.search(r"torchrun starts again \d+\.\d s after the failure was noticed", output)
    assert re.search(r"resumes after step (10|15|20) of 60: spare/checkpoints", output)
    assert (runs / "spare/result").read_text() == "local 0\n"
    assert_ended_as(standin, undisturbed, runs / "spare")


@pytest.mark.soak  # half an hour
def test_random_faults_of_three_nodes_cost_nothing(standin, runs, undisturbed):
    seed = time.time_ns() % 10**6
    # train_schedules.py waits a minute for a node, whose head may be killed before they have met.
    limits = "--lost-after 4 --rollcall-timeout 45"
    args = f"--nproc 1 --nnodes 2+1 --head 127.0.0.1 {limits} --no-network-test"
    shot = f'bash -c "$(declare -f train); train {args} \\"\\$@\\"" train'
    schedules = f"export PAUSE=0.08; python3 train_schedules.py {seed} 30 {shot}"
    output = inside(standin, runs, schedules, timeout_s=3600)
    print(output)
    for number in range(seed, seed + 30):
        assert_ended_as(standin, undisturbed, runs / f"schedule{number}")


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.soak)])
def test_any_process_killed_at_any_time_costs_nothing(standin, runs, undisturbed, kills):
    shot = f'bash -c "$(declare -f train); train --run-dir shot{kills}"'
    output = inside(standin, runs, f"export PAUSE=0.05; python3 train_kills.py {kills} {shot}")
    killed = re.findall(r"^killed (?:a worker|torchrun|the guard|the launcher) after step", output, re.M)
    assert len(killed) == kills
    assert "resumes after step" in output
    assert "skipped" not in output  # whatever was being written does not look like a checkpoint
    assert_ended_as(standin, undisturbed, runs / f"shot{kills}")


def test_stopped_worker_is_told_and_goes_on(standin, runs, undisturbed):
    script = """
export PAUSE=0.08
FAULT='once stop 1 33' train --hang-after 3 --run-dir stopped 2> >(tee err >&2) & pid=$!
until grep -q 'kill -CONT' err; do sleep 0.2; kill -0 $pid; done
eval "$(grep -o 'kill -CONT [0-9]*' err)"
wait $pid
"""
    output = inside(standin, runs, script)
    assert re.search(
        r"rank 1 on \w+ did not move from the end of step 3\d for \d+ s \(others: step 3\d\)", output
    )
    assert re.search(r"rank 1 on \w+ moved again after \d+ s", output)
    assert_ended_as(standin, undisturbed, runs / "stopped")


def test_node_without_the_checkpoint_gets_it_or_the_run_is_refused(standin, runs, undisturbed):
    # Two nodes with a run folder of their own each.
    script = """
python3 train_many.py <<END
import os
words = "--model faults.py:model --data faults.py:data --batch-size 4 --momentum 0.9 --save-every 5"
assert train(2, f"{words} --steps 12", folders="host-a host-b") == 0
assert not os.path.exists("host-b/checkpoints")
assert train(2, f"{words} --steps 60", folders="host-b host-a") == 2
assert train(2, f"{words} --steps 60", folders="host-a host-b") == 0
END
"""
    output = inside(standin, runs, script)
    assert "has step-0000000012, and the newest checkpoint of rank 0 on " in output
    assert "resumes after step 12 of 60: host-a/checkpoints/step-0000000012" in output
    assert_ended_as(standin, undisturbed, runs / "host-a")


@pytest.mark.soak
def test_scalers_skips_stop_nothing_and_go_on(standin, runs):
    script = """
python3 train_many.py <<END
words = "--model faults.py:model --data faults.py:steep --batch-size 4 --amp fp16 --lr 1e-9"
assert train(2, f"{words} --steps 60 --run-dir scaled") == 0
assert train(2, f"{words} --steps 5 --run-dir unscaled") == 0
assert train(2, f"{words} --steps 60 --run-dir unscaled") == 0
saved = (states(f"unscaled/checkpoints/step-{step:010d}") for step in (5, 60))
scales = [state["optimizer"]["scaler"]["scale"] for state in saved]
assert 65536 > scales[0] > scales[1], scales
END
"""
    inside(standin, runs, script)
    assert_ended_as(standin, runs / "scaled", runs / "unscaled")
