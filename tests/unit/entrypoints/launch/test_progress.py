"""Where the time of a start went: the parts, when the start began, and who prints the line."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from imgkit_entrypoints import fence
from imgkit_entrypoints.launch import progress, start_up
from imgkit_entrypoints.launch.progress import PROGRESS_FILE, PROGRESS_LAYOUT, StepTimer
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.launch.stop_protocol import RESULT, RunFolder, parse_result_code


class Clock:
    """The monotonic clock of the module under test, which tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now_s)

    def attempt(self, timer: StepTimer, folder: Path, began_s: float, ended_s: float, *notes: float) -> None:
        """Run an attempt whose program leaves `notes`."""
        self.now_s = began_s
        progress.remove_notes(folder)
        timer.start_attempt()
        if notes:
            (folder / PROGRESS_FILE).write_bytes(PROGRESS_LAYOUT.pack(*notes))
        self.now_s = ended_s
        timer.end_attempt(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_line_has_each_part_with_its_share(tmp_path, clock):
    timer = StepTimer(0)
    clock.attempt(timer, tmp_path, 5, 98, 10, 90, 6)
    clock.now_s = 100
    assert (
        timer.summary(2) == "100 s on 2 nodes: starting 10 s (10 %), training 74 s (74 %), saving 6 s (6 %)"
    )


def test_short_start_has_tenths_of_seconds(tmp_path, clock):
    timer = StepTimer(0)
    clock.attempt(timer, tmp_path, 1, 10, 2.5, 9.75, 0.25)
    line = "10.0 s on 1 node: starting 2.5 s (25 %), training 7.0 s (70 %), saving 0.2 s (2 %)"
    assert timer.summary(1) == line


def test_attempts_add_up(tmp_path, clock):
    timer = StepTimer(0)
    clock.attempt(timer, tmp_path, 5, 60, 20, 50, 10)
    clock.attempt(timer, tmp_path, 70, 199, 80, 190, 0)
    clock.now_s = 200
    assert "starting 30 s (15 %), training 130 s (65 %), saving 10 s (5 %)" in timer.summary(2)


def test_attempt_without_steps_has_no_notes_of_the_one_before(tmp_path, clock):
    timer = StepTimer(0)
    clock.attempt(timer, tmp_path, 5, 60, 20, 50, 10)
    clock.attempt(timer, tmp_path, 70, 200)
    assert "starting 20 s (10 %), training 20 s (10 %), saving 10 s (5 %)" in timer.summary(2)


def test_program_without_steps_gets_no_line(tmp_path, clock):
    timer = StepTimer(0)
    assert timer.summary(2) == ""
    (tmp_path / PROGRESS_FILE).write_bytes(PROGRESS_LAYOUT.pack(1, 2, 0))  # of an earlier start
    clock.attempt(timer, tmp_path, 5, 100)
    assert timer.summary(2) == ""


TIMES = strategies.floats(-10, 200)


@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=50
)
@hypothesis.given(strategies.lists(strategies.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=3))
def test_no_notes_make_a_part_negative_or_too_long(tmp_path, clock, notes):
    timer = StepTimer(0)
    for number, note_times in enumerate(notes):
        clock.attempt(timer, tmp_path, 10 + 50 * number, 50 + 50 * number, *note_times)
    parts = timer._parts.values()
    assert min(parts) >= 0
    assert sum(parts) <= clock.now_s + 1e-6


@pytest.mark.parametrize("data", [b"", b"x", bytes(PROGRESS_LAYOUT.size), b"\xff" * PROGRESS_LAYOUT.size])
def test_notes_that_are_none_are_not_read(tmp_path, data):
    (tmp_path / PROGRESS_FILE).write_bytes(data)
    assert progress.read_progress(tmp_path) is None


# ---- the beginning
def age_s(folder: RunFolder | None, **env: str) -> float:
    return time.monotonic() - start_up.start_time_s(env, folder)


def test_time_counts_from_the_start_of_the_job_in_a_run_folder(tmp_path):
    job_start = str(int(time.time()) - 100000)
    process_age_s = time.monotonic() - start_up.process_start_s()
    assert 100000 <= age_s(RunFolder(path=tmp_path), SLURM_JOB_START_TIME=job_start) < 100100
    assert age_s(None, SLURM_JOB_START_TIME=job_start) == pytest.approx(process_age_s, abs=5)
    assert age_s(RunFolder(path=tmp_path)) == pytest.approx(process_age_s, abs=5)


@pytest.mark.parametrize("name", [RESULT, fence.ATTEMPT_FILE])
def test_later_start_of_a_job_begins_where_the_earlier_one_ended(tmp_path, name):
    now = int(time.time())
    (tmp_path / name).touch()
    os.utime(tmp_path / name, (now - 50000, now - 50000))
    assert 50000 <= age_s(RunFolder(path=tmp_path), SLURM_JOB_START_TIME=str(now - 100000)) < 50100


@pytest.mark.parametrize("wrong", ["", "x", "0", "-5", "99999999999", "1" * 30])
def test_wrong_start_of_the_job_does_not_count(tmp_path, wrong):
    process_age_s = time.monotonic() - start_up.process_start_s()
    assert age_s(RunFolder(path=tmp_path), SLURM_JOB_START_TIME=wrong) == pytest.approx(process_age_s, abs=5)


def test_worker_goes_on_where_the_launcher_stopped():
    agent = StartUp(time.monotonic() - 100.0)
    agent.record("node_agent", time.monotonic() - 99.0)
    agent.record("roll_call", time.monotonic() - 90.0)
    worker = StartUp.from_env(agent.variables(0.0))
    worker.record("imports")
    assert list(worker.parts) == ["node_agent", "roll_call", "torchrun", "imports"]
    assert worker.parts["roll_call"] == pytest.approx(9.0, abs=0.1)
    assert sum(worker.parts.values()) == pytest.approx(100.0, abs=0.2)


def test_worker_without_a_launcher_begins_with_its_process():
    worker = StartUp.from_env({})
    worker.record("imports")
    assert list(worker.parts) == ["imports"]
    assert worker.parts["imports"] > 0.05  # this process runs since pytest's start


@pytest.mark.parametrize("value", ["x", "1.0 agent", "1.0 agent=fast", " = "])
def test_damaged_variable_is_ignored(value):
    assert StartUp.from_env({start_up.VARIABLE: value}).parts == {}


def test_time_never_runs_backwards():
    timings = StartUp(10.0)
    timings.record("container", 9.0)
    timings.record("node_agent", 11.0)
    assert timings.parts == {"container": 0.0, "node_agent": 1.0}


# ---- the node agent
WORKER = """
import os, sys, time
from imgkit_entrypoints.launch.progress import ProgressNotes

rank = int(os.environ["LOCAL_RANK"])
notes = ProgressNotes(os.environ["IMGKIT_STOP_DIR"], rank)
time.sleep(0.2)
notes.note_step_begin()
time.sleep(0.3)
notes.note_step_end()
with notes.time_save():
    time.sleep(0.1)
notes.note_step_end()
END
"""
LINE = re.compile(r"<[\d.]+ s on (.+): starting ([\d.]+) s .*, training ([\d.]+) s .*, saving ([\d.]+) s .*>")


@pytest.mark.parametrize("end", ["", "sys.exit(1)"])
def test_head_alone_prints_the_line(nodes, end):
    nodes.two(WORKER.replace("END", end))
    assert nodes.codes() == ([1, 1] if end else [0, 0])
    ((where, *seconds),) = LINE.findall(nodes.output())
    assert where == "2 nodes"
    starting, training, saving = map(float, seconds)
    assert starting >= 0.2
    assert training >= 0.2
    assert saving == pytest.approx(0.1, abs=0.1)


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_left_in_the_run_folder(nodes, code):
    nodes.two(f"raise SystemExit({code})")
    assert nodes.codes() == [code, code]
    assert "starting" not in nodes.output(), "the program has noted no step"
    assert not (nodes.folder / "run/requeue").exists(), "it has saved nothing"
    assert parse_result_code((nodes.folder / "run" / RESULT).read_text()) == code


@pytest.mark.parametrize(
    "text", ["", "7", "7 ", "7 x", "7 1 2", "cat: no such file 1", "7 1000", "7 -1", "7 ²"]
)
def test_other_text_is_no_result(text):
    assert parse_result_code(text) is None
