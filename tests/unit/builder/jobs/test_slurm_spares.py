"""The Slurm script of a job with spares, run by a real bash with STUBS of Slurm and of the runtime."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_program
from labkit import until

STUBS = {
    # Three tasks. It returns when all have ended, as with --no-kill --kill-on-bad-exit=0 --wait=0.
    "srun": """
while [[ $1 != bash ]]; do shift; done
for id in 0 1 2; do SLURM_NODEID=$id "$@" & done
trap 'echo ended srun; pkill -P "$(jobs -p | paste -sd,)"; exit 143' TERM
wait
exit 1
""",
    "scontrol": """
if [[ $1 == requeue ]]; then echo "$*" >> asked; exit 1; fi
[[ $# == 2 ]] && printf '%s\\n' node1 node2 node3 || cat left
""",
    "squeue": "cat left\n",
    "scancel": 'echo "scancel $*" >> asked\n',
    "sleep": "exec /bin/sleep 0.02\n",
    # The launcher of node N is the file `launcher N`.
    "singularity": 'exec bash "launcher $SLURM_NODEID"\n',
}
MOVES_LATE = """\
touch moving
until [[ -e go ]]; do /bin/sleep 0.02; done
exec /bin/mv "$@"
"""
NOTHING = "exit 1\n"
SLEEPS = "exec /bin/sleep 60\n"


def writes(result: str) -> str:
    return f'echo "{result}" > "$IMGKIT_RUN_DIR/result"\n'


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, start_script: Start) -> Start:
    """``start(LAUNCHER, LAUNCHER, LAUNCHER)``: the script of a job of 2+1 nodes with these launchers."""
    args = ["mn5", "-A", "a", "--qos", "q", "--time", "10m", "--nodes", "2+1", "--stop-before", "0"]
    (tmp_path / "left").write_text("node1\nnode2\nnode3\n")

    def run(*launchers: str) -> subprocess.Popen[str]:
        for number, text in enumerate(launchers):
            (tmp_path / f"launcher {number}").write_text(text)
        return start_script(args, STUBS, SLURM_JOB_ID="7")

    return run


def code(script: subprocess.Popen[str]) -> int:
    script.communicate(timeout=20)
    return script.returncode


def slurm_calls(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


@pytest.mark.parametrize("text", ["0", "1", "85"])
def test_result_counts_and_not_the_code_of_srun(start, text):
    assert code(start(writes(f"7.0 {text}") + "exit 3\n", NOTHING, NOTHING)) == int(text)


def test_task_that_does_not_return_is_ended_after_the_result(start):
    script = start(writes("7.0 0"), NOTHING, SLEEPS)
    stdout, _ = script.communicate(timeout=20)
    assert (script.returncode, "ended srun" in stdout) == (0, True)


def test_launcher_of_the_head_that_was_killed_ends_the_job(start, tmp_path):
    assert code(start("kill -KILL $$\n", NOTHING, SLEEPS)) == 137
    assert slurm_calls(tmp_path) == []


def test_result_of_an_earlier_start_is_removed(start, tmp_path):
    (tmp_path / "runs/mn5-7").mkdir(parents=True)
    (tmp_path / "runs/mn5-7/result").write_text("7.0 0\n")
    assert code(start("exit 3\n", NOTHING, NOTHING)) == 3


def test_signal_ends_the_launcher_before_its_task(start, tmp_path):
    """Slurm ends what is left of a task whose first process has ended: the launcher could not save.

    Here a second signal comes, as from srun when the job script has ended, while the result is being written.
    """
    write_program(tmp_path / "mv", MOVES_LATE, "bash")
    script = start("trap 'exit 85' TERM; touch ready; while :; do /bin/sleep 0.02; done\n", NOTHING, NOTHING)
    until((tmp_path / "ready").exists)
    (end_file,) = (tmp_path / "runs/mn5-7").glob(".imgkit-ended.????????")
    os.killpg(script.pid, signal.SIGTERM)  # as scancel does
    until((tmp_path / "moving").exists)
    os.killpg(script.pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    until(lambda: end_file.read_text() == "85\n", within_s=60)


def test_node_requeues_the_job_once_slurm_has_given_the_first_node_up(start, tmp_path):
    start(SLEEPS, NOTHING, NOTHING)
    run_dir = tmp_path / "runs/mn5-7"
    until(lambda: bool(list(run_dir.glob(".imgkit-ended.*"))))
    time.sleep(1)  # more than ten of the stub's seconds
    assert slurm_calls(tmp_path) == []  # the first node is still part of the job
    (tmp_path / "left").write_text("node2\nnode3\n")
    until(lambda: len(slurm_calls(tmp_path)) >= 2)
    assert slurm_calls(tmp_path)[0] == "requeue 7"
    until(lambda: "scancel 7" in slurm_calls(tmp_path))  # the stub refuses to requeue, as some sites do


def test_slurm_that_does_not_answer_requeues_nothing(start, tmp_path):
    (tmp_path / "left").write_text("")
    start(SLEEPS, NOTHING, NOTHING)
    until(lambda: bool(list((tmp_path / "runs/mn5-7").glob(".imgkit-ended.*"))))
    time.sleep(1)
    assert slurm_calls(tmp_path) == []
