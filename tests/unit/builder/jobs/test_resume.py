"""``imgkit resume``: today's code beside what the run changed, and what is refused.

bash runs the script that is submitted, with STUBS of the programs around it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_schedulers import SLURM_FORGOT
from file_tree import FakeProgram, write_files
from job_records import keep_job

from imgkit_builder.jobs import records, submit
from imgkit_builder.jobs.handle import find_job
from imgkit_builder.jobs.request import JobRequest, ResumedRun

SITE = ("-A", "a", "--qos", "q", "--time", "10m")
CODE = {"train.py": "print(1)", "table.csv": "1,2", "old/gone.py": "", "same.py": "print(1)"}
EndJob = Callable[..., Path]


@pytest.fixture
def code(home: Path, fake_program: FakeProgram) -> Path:
    """A folder of code beside an image, on a login node whose sbatch keeps the script."""
    (home / "mn5.sif").mkdir()  # a sandbox: imgkit does not look inside
    fake_program("sbatch", "cat > script; echo 4711")
    fake_program("module", "")
    return write_files(home / "code", CODE)


@pytest.fixture
def end_job(home: Path, code: Path, fake_program: FakeProgram, call: Any) -> EndJob:
    """``end_job(PROGRAM, STATE)``: run a job whose program is a script of sh; return the run folder."""

    def end(program: str, state: str = "FAILED  3:0") -> Path:
        options = ("--detach", *SITE, "--code", str(code), "--env", "MODE=fast", "--env", "TOKEN")
        assert call("run", "mn5", *options, "--", "dist-run", "train.py")[1] == "4711\n"
        start(program)
        fake_program("squeue", SLURM_FORGOT)
        fake_program("sacct", f"echo '4711  {state}'")
        return home / "runs/mn5-4711"

    def start(program: str) -> None:
        fake_program("srun", f'cd "$IMGKIT_RUN_DIR/workspace"; {program}')
        env = {**os.environ, "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "1"}
        subprocess.run(["bash", "script"], env=env, check=False)

    return end


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TOKEN", "hunter2")
    return "hunter2"


def script_of(home: Path) -> str:
    return (home / "script").read_text()


def test_job_is_submitted_again_with_its_values(home, end_job, call, token):
    run_folder = end_job("exit 3")
    first = script_of(home)
    assert call("resume", "4711", "--detach", "--time", "8h", "--env", "MODE=slow")[:2] == (0, "4711\n")
    expected = first.replace("dir=$PWD/runs/mn5-$SLURM_JOB_ID", f"dir={run_folder}")
    expected = expected.replace("--time=00:10:00", "--time=08:00:00").replace("MODE=fast", "MODE=slow")
    assert script_of(home) == expected
    record = records.find_record("4711")
    assert record.job.run_folder == run_folder
    assert token not in (home / "state/imgkit/jobs/4711.json").read_text()


def test_program_resumes_a_job(home, code, end_job):
    run_folder = end_job("exit 3")
    write_files(code, {"train.py": "print(2)"})
    job = find_job("4711").resume(JobRequest.of(time="8h"))
    assert (job.id, job.record.job.run_folder) == ("4711", run_folder)
    assert "--time=08:00:00" in script_of(home)
    assert (run_folder / "workspace/train.py").read_text() == "print(2)\n"


def test_code_of_today_replaces_what_the_run_left(code, end_job, call, home):
    run_folder = end_job("echo more >> table.csv; echo 1 > result.csv; exit 3")
    write_files(code, {"train.py": "print(2)", "new/file.py": "new"})
    (code / "old/gone.py").unlink()
    assert call("resume", "4711", "--detach")[0] == 0
    workspace = run_folder / "workspace"
    texts = {str(path.relative_to(workspace)): path.read_text() for path in workspace.rglob("*.*")}
    assert texts == {
        "train.py": "print(2)\n",
        "new/file.py": "new\n",
        "same.py": "print(1)\n",
        "table.csv": "1,2\nmore\n",
        "result.csv": "1\n",
    }
    assert (workspace / "train.py").stat().st_mode & 0o200
    # A later edit is compared with the code that the run has now.
    write_files(code, {"train.py": "print(3)"})
    assert call("resume", "4711", "--detach")[0] == 0
    assert (workspace / "train.py").read_text() == "print(3)\n"


def test_file_changed_on_both_sides_is_refused(code, end_job, call, home):
    run_folder = end_job("echo run > train.py; exit 3")
    before = json.loads((run_folder / "code.json").read_text())
    write_files(code, {"train.py": "print(2)", "same.py": "print(2)"})
    (home / "script").unlink()
    status, _, err = call("resume", "4711", "--detach")
    assert (status, err.splitlines()[-2:]) == (
        2,
        [
            f"imgkit: {run_folder}/workspace: the run has changed what today's code has in another version: "
            "train.py",
            "  -> to go on with the run's code: imgkit resume 4711 --same-code",
        ],
    )
    assert not (home / "script").exists()
    assert (run_folder / "workspace/same.py").read_text() == "print(1)\n"
    assert before["sha256"] in call("resume", "4711", "--dry-run", "--same-code")[1]
    assert not (home / "script").exists()
    assert call("resume", "4711", "--detach", "--same-code")[0] == 0
    assert (run_folder / "workspace/train.py").read_text() == "run\n"
    assert json.loads((run_folder / "code.json").read_text()) == before
    assert before["sha256"] in script_of(home)


def test_run_that_goes_on_is_refused(end_job, fake_program, call):
    end_job("exit 3")
    fake_program("squeue", "echo '4711  RUNNING  0:10'")
    status, _, err = call("resume", "4711", "--detach")
    assert (status, err) == (
        2,
        "imgkit: ID: the run goes on: 4711 is running\n"
        "  -> imgkit cancel 4711 or imgkit wait 4711, then imgkit resume 4711\n",
    )


def test_program_that_ended_well_needs_a_command(end_job, call, home):
    end_job("exit 0", "COMPLETED  0:0")
    status, _, err = call("resume", "4711", "--detach")
    assert (status, err) == (
        2,
        "imgkit: ID: 4711 completed: the program has ended well by itself\n"
        "  -> to go on, for example with more epochs: imgkit resume 4711 -- COMMAND\n",
    )
    assert call("resume", "4711", "--detach", "--", "dist-run", "train.py", "--epochs", "9")[0] == 0
    assert "dist-run train.py --epochs 9 " in script_of(home)


def test_run_stopped_by_a_person_goes_on(end_job, fake_program, call):
    run_folder = end_job("touch ../stop; echo 4711 0 > ../result", "COMPLETED  0:0")
    fake_program("sbatch", "echo invalid account >&2; exit 1")
    assert call("resume", "4711", "--detach")[0] == 4
    assert not (run_folder / "stop").exists()
    fake_program("sbatch", "cat > script; echo 4712")
    assert call("resume", "4711", "--detach")[:2] == (0, "4712\n")
    assert not (run_folder / "result").exists()
    assert records.find_record("4712").job.run_folder == run_folder


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"array": True}, "7 is an array or a task of one, which cannot be resumed"),
        ({"system": "runai"}, "7 is a job of runai, whose run folder imgkit cannot choose"),
        ({}, "the record of 7 does not say what the job asked for"),
    ],
)
@pytest.mark.usefixtures("home")
def test_job_that_cannot_be_resumed_is_refused(fields, error, call):
    keep_job(7, state="failed", **fields)
    status, _, err = call("resume", "7")
    assert (status, err.splitlines()[0]) == (2, f"imgkit: ID: {error}")


def test_script_of_pbs_goes_on_in_the_folder(home):
    run = ResumedRun(job="7.s", folder=home / "runs/it's 7.s")
    request = JobRequest.of(command=("dist-hello",), queue="workq", time="10m", resumed=run)
    script = submit.prepare("olivia-eap", request).script.text
    assert f"\ndir={shlex.quote(str(run.folder))}\n" in script


def test_first_job_keeps_its_exit_code(home, fake_program, call):
    fake_program("squeue", SLURM_FORGOT)
    fake_program("sacct", "echo '1  FAILED  3:0'")
    first = keep_job(1)
    keep_job(2, run_name=first.job.run_folder.name)
    write_files(first.job.run_folder, {"result": "2.0 5"})
    assert "1 failed with exit code 3; " in call("status", "1")[1]
    assert "2 failed with exit code 5; " in call("status", "2")[1]
