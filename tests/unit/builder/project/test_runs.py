"""The list of runs: records, states and numbers of killed runs."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from job_records import keep_job

from imgkit_builder.base.process import Finished
from imgkit_builder.jobs import job_status, measured
from imgkit_builder.jobs.measured import LastNumbers
from imgkit_builder.jobs.request import CodeRecord
from imgkit_builder.jobs.submitted import FINAL_STATES
from imgkit_entrypoints.errors import ToolFailed

pytestmark = pytest.mark.usefixtures("home")


def fake_scheduler(*answers: tuple[int, str]) -> mock.Mock:
    """Return a runner of programs, each of which gets the next exit code and output."""
    finished = [Finished(argv=(), returncode=code, output=output) for code, output in answers]
    return mock.Mock(side_effect=finished)


def put(name: str, *lines: object) -> Path:
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / measured.METRICS).write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return folder


def test_newest_run_comes_first(call):
    code = CodeRecord(sha256="c" * 64, git="v1-dirty", uncommitted=True)
    command = ("dist-run", "a b")
    keep_job(1, state="succeeded", image_id="sha256:" + "a" * 64, code=code, command=command)
    keep_job(3, remote="far")
    keep_job(2)
    put("mn5-1", {"step": 5, "loss": 0.25})
    code, out, _ = call("runs")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows] == ["JOB", "3@far", "2", "1"]
    assert rows[3][4:] == ["succeeded", "5", "0.25", "a" * 12, "c" * 12, "dist-run", "'a", "b'"]
    newest = json.loads(call("runs", "-n", "2", "--json")[1])["runs"]
    assert [(row["id"], row["remote"], row["loss"]) for row in newest] == [
        ("3@far", "far", None),
        ("2", None, None),
    ]


def test_run_without_metrics_has_no_numbers(home):
    assert measured.last_numbers(home).step is None


def test_no_runs_is_an_answer(call):
    assert call("runs")[:2] == (0, "no runs yet; imgkit run starts one\n")
    assert json.loads(call("runs", "--json")[1])["runs"] == []


def test_damaged_record_is_left_out(home, call):
    keep_job(2)
    (home / "state/imgkit/jobs/damaged.json").write_text("{")
    assert [row["id"] for row in json.loads(call("runs", "--json")[1])["runs"]] == ["2"]


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        (((0, "1  gpu RUNNING, 1 nodes\n"),), "running"),
        (((0, " JOBID STATE\n 4 R\n"),), ""),
        # The accounting is late.
        (((0, ""), (0, "1  RUNNING\n"), (0, "JobId=1 JobState=COMPLETED")), "succeeded"),
        (((0, ""), (0, "JobID  State\n-----  -----\n1  COMPLETED\n")), "succeeded"),
        (((0, ""), (1, "disabled"), (0, "JobId=1 JobState=COMPLETED")), "succeeded"),
        (((1, "Invalid job id"), (1, "disabled"), (0, "JobId=1 JobState=TIMEOUT")), "failed"),
        (((1, "Invalid job id"), (1, "disabled"), (1, "Invalid job id"), (0, "1.0 0\n")), "succeeded"),
        (((1, "Invalid job id"), (1, ""), (1, ""), (0, "1.0 3\n")), "failed"),
        (((1, "Invalid job id"), (1, ""), (1, ""), (0, "1.0")), "ended"),
        (((1, "Invalid job id"), (1, ""), (1, ""), (1, "no such file")), "ended"),
    ],
)
def test_scheduler_says_the_state(answers, state):
    run = fake_scheduler(*answers)
    record = job_status.refresh_state(keep_job(1), run)
    assert (record.state, run.call_count) == (state, len(answers))
    if state in FINAL_STATES:
        assert job_status.refresh_state(record, run) == record  # nobody is asked again


@pytest.mark.parametrize(("result", "code"), [((0, "1.0 7\n"), 7), ((1, "no such file"), 143)])
def test_exit_code_of_the_program_counts_before_that_of_ended_tasks(result, code):
    answers = ((1, "Invalid job id"), (1, "disabled"), (0, "JobId=1 JobState=FAILED ExitCode=143:0"), result)
    run = fake_scheduler(*answers)
    report = job_status.report_job(keep_job(1), run)
    assert (report.record.state, report.code, run.call_count) == ("failed", code, len(answers))


def test_scheduler_without_an_answer_ends_no_job():
    run = fake_scheduler((1, "Unable to contact slurm controller"))
    with pytest.raises(ToolFailed, match="squeue failed with exit code 1"):
        job_status.refresh_state(keep_job(1), run)


def test_repeated_steps_count_once():
    lines: list[object] = [{"step": step, "loss": 9.0} for step in (1, 2, 3)]
    killed = ['{"step": 4, "lo', '{"step": 5, "loss": NaN}', "[1]", '{"step": true, "loss": 1}', "7"]
    again = [{"step": 2, "loss": 1, "name": "x", "on": True}, {"step": 3, "eval_loss": 0.5}]
    assert measured.last_numbers(put("x", *lines, *killed, *again)) == LastNumbers(step=3, loss=1.0)
