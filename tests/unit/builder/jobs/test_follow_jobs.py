"""``status``, ``logs`` and ``shell --job``, with fake schedulers."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fake_schedulers import SLURM_FORGOT, pbs_ended
from file_tree import FakeProgram, write_files
from job_records import keep_job, queued_job

from imgkit_builder.jobs import records, submit, systems
from imgkit_builder.jobs.handle import find_job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.transport import Transport
from imgkit_entrypoints.errors import UsageError

pytestmark = pytest.mark.usefixtures("home")
RUN_FOLDER = Path("runs/mn5-1")
RUNNING = "echo '1  gpu RUNNING, 1 nodes'"


@pytest.fixture(autouse=True)
def program(fake_program: FakeProgram) -> FakeProgram:
    """``program("squeue", SCRIPT)``: replace a program of the schedulers, which no test may ask otherwise."""
    for name in ("squeue", "sacct", "scontrol", "qstat"):
        fake_program(name, "echo not asked; exit 9")
    return fake_program


def test_ended_job_is_shown_by_the_accounting(call, program):
    keep_job()
    program("squeue", SLURM_FORGOT)
    program("sacct", "echo 'JobID State'; echo '1     TIMEOUT  0:0'")
    code, out, err = call("status", "1")
    assert code == 0
    assert "1     TIMEOUT  0:0" in out
    assert f"1 failed; run folder: {Path.cwd()}/runs/mn5-1\n" in out
    assert "imgkit: sacct --allocations --jobs=1" in err
    assert records.find_record("1").state == "failed"


def test_forgotten_job_is_shown_by_its_run_folder(call, program):
    keep_job()
    for name in ("squeue", "scontrol"):
        program(name, SLURM_FORGOT)
    program("sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    assert "1 has ended; neither the scheduler nor the run folder knows how" in call("status", "1")[1]
    write_files(RUN_FOLDER, {"result": "1.0 3"})
    assert "1 failed with exit code 3, by its run folder" in call("status", "1")[1]
    assert json.loads(call("status", "1", "--json")[1])["state"] == "failed"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("cancelled", "was cancelled"),
        ("failed", "ended with its state saved (exit code 85), by its run folder"),
    ],
)
def test_forgotten_job_that_was_cancelled_has_not_failed(call, state, text, program):
    keep_job()
    write_files(RUN_FOLDER, {"result": "1 85"})
    program("scancel", "exit 0")
    if state == "cancelled":
        assert call("cancel", "1")[0] == 0
    for name in ("squeue", "sacct", "scontrol"):
        program(name, SLURM_FORGOT)
    assert f"1 {text}; run folder: " in call("status", "1")[1]
    assert json.loads(call("runs", "--json")[1])["runs"][0]["state"] == state


def test_job_that_could_not_be_cancelled_has_failed(call, program):
    keep_job(id="1.s", system="pbs")
    program("qdel", "echo Job has finished >&2; exit 35")
    assert call("cancel", "1.s")[0] == 35
    program("qstat", pbs_ended(3))
    assert "1.s failed with exit code 3; run folder" in call("status", "1.s")[1]


def test_api_tells_a_cancelled_job_by_its_handle(program):
    keep_job(id="1.s", system="pbs")
    program("qdel", "exit 0")
    handle = find_job("1.s")
    handle.cancel()
    program("qstat", pbs_ended(271))
    assert handle.status() == "cancelled"


@pytest.mark.parametrize(("number", "state"), [(0, "completed"), (-29, "failed with exit code -29")])
def test_ended_job_of_pbs_is_shown_by_its_history(call, program, number, state):
    keep_job(id="1.s", system="pbs")
    program("qstat", pbs_ended(number))
    code, out, _ = call("status", "1.s")
    assert code == 0
    assert f"Exit_status = {number}" in out
    assert "Variable_List" not in out
    assert f"1.s {state}; run folder" in out


def test_status_shows_how_much_the_gpus_are_used(call, program):
    keep_job()
    program("squeue", RUNNING)
    assert "GPUs" not in call("status", "1")[1]
    assert "gpu_use" not in json.loads(call("status", "1", "--json")[1])
    use = {"readings": 480, "gpu_percent": 87.4, "memory_MiB": 61240.0}
    write_files(RUN_FOLDER, {"gpu-use.json": json.dumps(use)})
    out = call("status", "1")[1]
    assert out.splitlines()[-1] == "GPUs 87 % in use on average, at most 59.8 GiB of memory"
    assert json.loads(call("status", "1", "--json")[1])["gpu_use"] == use


def test_status_lists_the_jobs_that_have_not_ended(call, program):
    keep_job(1)
    keep_job(2, state="succeeded")
    keep_job(3, system="pbs", id="3.s")
    keep_job(4, remote="far")
    program("squeue", RUNNING)
    program("qstat", pbs_ended(0))
    code, out, err = call("status")
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[-6]) for row in rows] == [
        ("JOB", "STATE"),
        ("4@far", "submitted"),
        ("3.s", "succeeded"),
        ("1", "running"),
    ]
    assert code != 0  # one did not answer
    assert "4@far: " in err
    answer = json.loads(call("status", "--json")[1])
    assert ([row["id"] for row in answer["jobs"]], answer["complete"]) == (["4@far", "1"], False)


def test_jobs_that_nobody_can_ask_about_are_listed_for_a_week(call):
    now = {"submitted": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    keep_job(1, system="runai", id="old")
    keep_job(2, answer="Thank you", id="unknown-1")
    keep_job(3, system="runai", id="new", **now)
    keep_job(4, answer="Thank you", id="unknown-2", **now)
    rows = json.loads(call("status", "--json")[1])["jobs"]
    assert {row["id"]: row["state"] for row in rows} == {"new": "submitted", "unknown-2": "unknown"}


def test_no_open_job_is_an_answer(call):
    keep_job(2, state="succeeded")
    assert call("status")[:2] == (0, "no job waits or runs; imgkit runs lists those that have ended\n")


def test_logs_without_an_id_are_those_of_the_last_job(call):
    assert "no job was submitted from here" in call("logs")[2]
    keep_job(1)
    keep_job(2, id="2.s", system="pbs")
    keep_job(3, answer="Thank you", id="unknown-1")
    code, out, err = call("logs", "--json")
    assert (code, json.loads(out)["id"]) == (0, "2.s")
    assert "imgkit: job 2.s, the last one" in err


def test_fetch_without_an_id_is_that_of_the_last_job(call):
    keep_job(1)
    code, _, err = call("fetch")
    assert code == 2
    assert "imgkit: job 1, the last one" in err
    assert "the job 1 ran here" in err


def test_logs_of_an_ended_job_end(call, program):
    keep_job(1)
    program("squeue", SLURM_FORGOT)
    Path("mn5-1.out").write_text("all\n")
    assert call("logs", "1")[0] == 0


def test_task_of_an_array_is_found_by_its_id(call):
    keep_job(1, array=True)
    keep_job(2, id="2[].s", system="pbs", array=True)
    keep_job(3, array=True, remote="far")
    assert records.find_record("1_4").job.id == "1_4"
    assert {records.find_record(job_id).job.id for job_id in ("2[4]", "2[4].s")} == {"2[4].s"}
    assert records.find_record("3_0@far").job.handle == "3_0@far"
    for job_id in ("1_", "1[4]", "2_4", "2[4].t", "2[x]", "3_0@near", "10_1"):
        with pytest.raises(UsageError, match="no record of a job"):
            records.find_record(job_id)
    assert call("logs", "1_4", "--json")[0] == 0
    assert "1 is an array job" in call("logs", "1")[2]
    assert "mn5.o2.4" in call("logs", "2[4]", "--json")[1]


def test_shell_in_a_job_has_its_container(call, program):
    Path("mn5.sif").mkdir()  # a sandbox: imgkit does not look inside
    program("sbatch", "cat > script; echo 7")
    request = JobRequest.of(command=("dist-hello",), account="a", qos="acc_debug", time="10m", env=("A=b c",))
    submit.submit_job(submit.prepare("mn5", request), Transport())
    code, out, _ = call("shell", "--job", "7", "--dry-run")
    assert code == 0
    assert out.startswith("srun --jobid=7 --overlap --nodes=1 --ntasks=1 ")
    started = next(line for line in Path("script").read_text().splitlines() if "mn5.sif" in line)
    for part in ("--nv", f"{Path.cwd()}/mn5.sif", "A=b c"):
        assert part in out
    assert "mn5.sif" in started
    assert f"IMGKIT_RUN_DIR={Path.cwd()}/runs/mn5-7; " in out
    assert "--nodelist=n2 " in call("shell", "--job", "7", "--node", "n2", "--dry-run")[1]


@pytest.mark.parametrize("options", [(), ("-v",)])
def test_shell_in_a_job_shows_its_command_on_request(program, options):
    keep_job(7, shell_line="exec singularity shell a.sif")
    program("squeue", "echo '7  p RUNNING,'")
    program("srun", "echo inside; exit 5")
    argv = (sys.executable, "-m", "imgkit_builder", "shell", "--job", "7", *options)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (5, "inside\n"), result.stderr
    described, *command = result.stderr.splitlines()
    assert described == f"imgkit: {systems.NEW_CONTAINER}"
    assert [row.startswith("imgkit: srun --jobid=7 ") for row in command] == [True] * len(options)


def test_shell_in_a_pod_is_in_the_job_s_container():
    def shell_command(node: str = "", **fields: Any) -> str:
        queued = queued_job(name="a", **fields)
        return " ".join(systems.get_system(queued.system).shell_command(queued, "", node).argv)

    assert shell_command(system="runai", id="a", queue="p") == "runai bash a --project p"
    assert shell_command("a-worker-0", system="runai", id="a") == "runai bash a --pod a-worker-0"
    later = shell_command(system="runai", id="a", kind="training pytorch", queue="p")
    assert later == "runai training pytorch bash a --project p"
    torch = shell_command(system="kubeflow", id="pytorchjob.a", queue="p")
    assert torch == "kubectl exec --namespace=runai-p --stdin --tty a-master-0 -- bash"
    assert "job/a-node-0 -- bash" in shell_command(system="kubeflow", id="trainjob.a")


@pytest.mark.parametrize(
    ("job_id", "message"),
    [
        ("2.s", "PBS starts no shell in a running job from outside"),
        ("3", "3 is an array job"),
        ("4", "the job 4 waits"),
        ("5", "the job 5 has ended"),
        ("6", "no shell opens in 6: imgkit starts a second container in a job only by"),
    ],
)
def test_shell_that_cannot_be_opened_says_why(call, program, job_id, message):
    keep_job(2, id="2.s", system="pbs", shell_line="exec singularity shell a.sif")
    keep_job(3, array=True)
    keep_job(4)
    keep_job(5, state="succeeded")
    keep_job(6)  # its record has no line for a shell, as with pyxis
    program("squeue", "case $* in *=6*) echo '6  p RUNNING,' ;; *) echo '4  p PENDING,' ;; esac")
    code, out, err = call("shell", "--job", job_id)
    assert (code, out) == (2, "")
    assert message in err
    if job_id == "2.s":
        assert "ssh -t NODE" in err
        assert "exec singularity shell a.sif" in err


@pytest.fixture
def polls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imgkit_builder.jobs.job_status.POLL_S", (0.01,))


@pytest.mark.parametrize(
    ("history", "code", "data"),
    [
        ("COMPLETED 0:0", 0, {"state": "succeeded", "exit_code": 0}),
        ("FAILED 7:0", 1, {"state": "failed", "exit_code": 7}),
        ("CANCELLED by 1000 0:15", 1, {"state": "cancelled", "exit_code": 0}),
    ],
)
@pytest.mark.usefixtures("polls_at_once")
def test_wait_ends_with_the_job(call, history, code, data, program):
    keep_job()
    running = f"{RUNNING}; mv asked asked-twice 2> /dev/null || touch asked"
    program("squeue", f"[ -e asked-twice ] && {{ {SLURM_FORGOT}; }}; {running}")
    program("sacct", f"echo 'JobID State ExitCode'; echo '1     {history}'")
    actual, out, _ = call("wait", "1", "--json")
    assert (actual, data.items() <= json.loads(out).items()) == (code, True)
    assert records.find_record("1").state == data["state"]
    assert call("wait", "1")[0] == code


WAITS = "echo '1  gpu PENDING, 1 nodes, elapsed 0:00, start 2026-11-28T22:40:07  (Priority)'"
STUCK = r"printf '1  gpu PENDING, 1 nodes, elapsed 0:00, start N/A  (PartitionTimeLimit)\n'"
HOSTILE = r"printf '1  gpu PENDING, 1 nodes, elapsed 0:00, start N/A  (\033[2Jok\rx)\n'"


@pytest.mark.parametrize("verb", ["wait", "logs"])
@pytest.mark.usefixtures("polls_at_once")
def test_following_says_what_is_waited_for(call, program, verb):
    keep_job()
    answers = (WAITS, WAITS, HOSTILE, STUCK, RUNNING, SLURM_FORGOT)
    cases = "".join(f"{number}) {answer} ;; " for number, answer in enumerate(answers, 1))
    program("squeue", f"echo >> calls; case $(wc -l < calls) in {cases} *) {SLURM_FORGOT} ;; esac")
    program("sacct", "echo 'JobID State ExitCode'; echo '1     COMPLETED 0:0'")
    code, _, err = call(verb, "1")
    assert code == 0, err
    lines = [line for line in err.splitlines() if "waiting" in line or "running" in line]
    assert lines == [
        "imgkit: waiting: Priority; expected start 2026-11-28T22:40",
        r"imgkit: waiting: \x1b[2Jok\rx",
        "imgkit: waiting: PartitionTimeLimit; the job will not start: imgkit cancel 1, and submit it with "
        "a shorter --time or another --queue",
        "imgkit: running",
    ]


def test_status_says_why_a_job_waits(call, program):
    keep_job()
    program("squeue", WAITS)
    assert call("status", "1")[1].endswith("\nwaiting: Priority; expected start 2026-11-28T22:40\n")
    answer = json.loads(call("status", "1", "--json")[1])
    fields = [answer[name] for name in ("state", "reason", "expected_start")]
    assert fields == ["waiting", "Priority", "2026-11-28T22:40"]
    program("squeue", RUNNING)
    answer = json.loads(call("status", "1", "--json")[1])
    assert (answer["reason"], answer["expected_start"]) == (None, None)


@pytest.mark.parametrize("system", ["slurm", "runai"])
def test_cancelled_job_is_listed_as_cancelled_at_once(call, program, system):
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    keep_job(system=system, queue="p", state="running" if system == "slurm" else "", submitted=now)
    for name in ("scancel", "runai"):
        program(name, "exit 0")
    program("squeue", "echo '1  gpu COMPLETING, 1 nodes'")
    assert call("cancel", "1")[0] == 0
    assert json.loads(call("runs", "--json")[1])["runs"][0]["state"] == "cancelled"
    # The scheduler has the last word on a job that needs a moment to end; RunAI is never asked.
    listed = [row["state"] for row in json.loads(call("status", "--json")[1])["jobs"]]
    assert listed == (["running"] if system == "slurm" else [])


def test_wait_gives_up_with_another_exit_code(call, program):
    keep_job()
    program("squeue", WAITS)
    code, out, err = call("wait", "1", "--timeout", "1s", "--json")
    assert (code, "1 has not ended after 1s" in err, "waiting" in err) == (4, True, False)
    assert json.loads(out)["error"]["exit_code"] == 4  # one object, as of any other error


def test_job_of_which_nobody_can_see_the_end_is_not_waited_for(call, program):
    keep_job(1, system="runai")
    keep_job(2)
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    code, _, err = call("wait", "1")
    assert (code, "cannot ask runai whether a job has ended" in err) == (2, True)
    assert call("wait", "2")[0] == 4
