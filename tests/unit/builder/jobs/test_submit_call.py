"""``submit`` as a function: what it does, prints and refuses, with a fake sbatch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_schedulers import SLURM_FORGOT
from file_tree import FakeProgram
from notes import Notes

import imgkit_builder as imgkit
from imgkit_builder.jobs import records, submit
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.transport import Transport
from imgkit_entrypoints.errors import ToolFailed, UsageError

REQUEST = JobRequest.of(command=("dist-hello",), account="a", qos="acc_debug", time="10m", nodes="2")
SITE = ("-A", "a", "--qos", "acc_debug", "--time", "10m")
EndedJob = Callable[[str], None]
OUT_OF_MEMORY = "the job ran out of memory"


@pytest.fixture
def folder(home: Path, fake_program: FakeProgram) -> Path:
    """The current folder, with an image and a fake sbatch, which keeps the script."""
    (home / "mn5.sif").mkdir()  # a sandbox: imgkit does not look inside
    fake_program("sbatch", "cat > script; echo 4711")
    return home


@pytest.fixture
def ended_job(folder: Path, fake_program: FakeProgram) -> EndedJob:
    """``ended_job("FAILED  3:0")``: job 4711 has left the queue, and the accounting knows how it ended."""

    def end(state: str) -> None:
        fake_program("squeue", SLURM_FORGOT)
        fake_program("sacct", f"echo '4711  {state}'")

    return end


def test_submitted_job_is_known_by_its_id(folder, capfd):
    record = submit.submit_job(submit.prepare("mn5", REQUEST), Transport())
    assert (record.job.id, record.recipe, record.command) == ("4711", "mn5", ("dist-hello",))
    assert records.find_record("4711") == record
    assert (folder / "script").read_text() == submit.prepare("mn5", REQUEST).script.text
    assert capfd.readouterr() == ("", "")


def test_dry_run_prints_the_bytes_that_are_submitted(folder, call):
    argv = ("mn5", *SITE, "--nodes", "2")
    code, out, err = call("run", *argv, "--dry-run", "--", "dist-hello")
    assert (code, err) == (0, "")
    assert not (folder / "script").exists()
    assert call("run", "--detach", *argv, "--", "dist-hello")[:2] == (0, "4711\n")
    assert (folder / "script").read_text() == out


def test_array_is_not_followed(folder, call):
    code, out, err = call("run", "mn5", *SITE, "--option=--array=0-1", "--", "dist-hello")
    assert (code, out) == (0, "4711\n")
    assert err.splitlines()[-2:] == [
        "imgkit: imgkit status 4711; imgkit cancel 4711",
        "imgkit: an array is not followed: each of its tasks has an id and an output of its own",
    ]


def test_warnings_and_a_full_disk_are_notes(folder):
    (folder / "state").write_text("a file where the records would lie")
    report = Notes()
    prepared = submit.prepare("mn5", REQUEST.changed(command=("hostname",)))
    record = submit.submit_job(prepared, Transport(), report)
    assert record.job.id == "4711"
    assert "hostname starts once per node" in report.texts[0]
    assert "the job 4711 is submitted, but its record cannot be saved" in report.texts[1]


@pytest.mark.parametrize(
    ("recipe", "request_", "reason", "where"),
    [
        ("cpu", JobRequest.of(command=("dist-hello",)), "cpu has no scheduler", "system.scheduler"),
        ("mn5", REQUEST.changed(command=(), interactive=True), "the job is interactive", "interactive"),
    ],
)
def test_job_in_this_process_is_refused(recipe, request_, reason, where):
    with pytest.raises(UsageError) as caught:
        submit.submit_job(submit.prepare(recipe, request_), Transport())
    assert caught.value.what == f"{reason}: the run would take place in this process"
    assert caught.value.where == where


def test_job_without_its_image_is_refused(folder):
    (folder / "mn5.sif").rmdir()
    with pytest.raises(UsageError, match="no image"):
        submit.submit_job(submit.prepare("mn5", REQUEST), Transport())
    assert not (folder / "script").exists()


def test_output_is_followed_until_the_job_ends(folder, ended_job, call):
    """The fake job has written its output when it is looked at first, and is known to have failed."""
    ended_job("FAILED  3:0")
    (folder / "mn5-4711.out").write_text("the output\n")
    code, out, err = call("run", "mn5", *SITE, "--", "dist-hello")
    assert (code, out) == (1, "")
    assert "imgkit logs 4711" in err
    assert "4711 failed with exit code 3; imgkit resume 4711; run folder: " in err
    assert records.find_record("4711").state == "failed"


@pytest.mark.parametrize(
    ("error", "count"),
    [("ValueError: ... environment variable RANK expected, but not set", 2), ("ValueError: bad value", 1)],
)
def test_hint_at_the_start_is_repeated_where_it_explains_the_end(folder, ended_job, call, error, count):
    ended_job("FAILED  1:0")
    (folder / "mn5-4711.out").write_text(f"{error}\n")
    code, _, err = call("run", "mn5", *SITE, "--", "python", "train.py")
    hint = "python starts once per node; `dist-run train.py ...` starts one process per GPU"
    assert (code, err.count(hint)) == (1, count)
    assert ("failed with exit code 1" in err.splitlines()[-1]) == (count == 1)


@pytest.mark.parametrize(
    ("state", "output", "cause"),
    [
        ("OUT_OF_MEMORY  0:125", "", OUT_OF_MEMORY),
        ("FAILED  1:0", "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.", OUT_OF_MEMORY),
        ("FAILED  1:0", "=>> PBS: job killed: mem 2097200kb exceeded limit 2097152kb", OUT_OF_MEMORY),
        ("FAILED  137:0", "", "exit code 137: a process was killed, most often because memory ran out"),
        ("FAILED  1:0", "imgkit: no oom here", ""),
    ],
)
@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--mem", "4G"), "it had --mem 4G; request more, or use fewer data workers"),
        (
            (),
            "it stated no size, so it had the scheduler's default; add --mem SIZE, or use fewer data workers",
        ),
    ],
)
def test_end_of_memory_is_explained_with_its_size(
    folder,
    ended_job,
    call,
    state,
    output,
    cause,
    flags,
    remedy,
):
    ended_job(state)
    (folder / "mn5-4711.out").write_text(f"{output}\n")
    code, _, err = call("run", "mn5", *SITE, *flags, "--", "dist-hello")
    last_line = err.splitlines()[-1]
    assert code == 1
    if cause:
        assert last_line == f"imgkit: {cause}: {remedy}"
    else:
        assert "failed with exit code 1; imgkit resume 4711; run folder: " in last_line


def test_help_lists_the_usual_options_first(call):
    text = call("run", "--help")[1]
    usual, advanced = text.split("\nOptions:\n")[1].split("\nAdvanced:\n")
    names = [re.findall(r"^  (?:-\w, )?(--[\w-]+)", part, re.MULTILINE) for part in (usual, advanced)]
    assert len(names[0]) == 10
    assert {"--on", "--nodes", "--time"} <= {*names[0]}
    assert len({*names[0], *names[1]}) == len(names[0]) + len(names[1])


def test_api_runs_a_job_and_follows_it(folder, ended_job, fake_program, monkeypatch):
    monkeypatch.setattr("imgkit_builder.jobs.job_status.POLL_S", (0.01,))
    fake_program("squeue", "echo '4711  gpu RUNNING, 1 nodes'")
    fake_program("scancel", 'echo "$*" > cancelled')
    job = imgkit.run("mn5", REQUEST)
    assert (job.id, job.status(), job.logs()) == ("4711", "running", "")
    assert imgkit.find_job("4711").record == job.record
    assert job.wait(timeout_s=0.1) == "running"
    (folder / "mn5-4711.out").write_text("hello\n")
    assert job.logs() == "hello\n"
    job.cancel()
    assert (folder / "cancelled").read_text() == "4711\n"
    ended_job("COMPLETED  0:0")
    fake_program("scancel", "echo no such job; exit 1")
    assert job.wait() == "succeeded"
    assert job.fetch() == folder / "runs/mn5-4711"
    with pytest.raises(ToolFailed, match="scancel failed with exit code 1"):
        job.cancel()


def test_api_refuses_what_the_command_refuses(folder):
    with pytest.raises(UsageError, match="there is no remote 'far'"):
        imgkit.run("mn5", REQUEST, on="far")
    with pytest.raises(UsageError, match="a base is for a remote"):
        imgkit.run("mn5", REQUEST, base="debian:12")
    with pytest.raises(UsageError, match="no record of a job 'x'"):
        imgkit.find_job("x")
