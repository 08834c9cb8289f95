"""``imgkit run mn5`` on a real Slurm of three nodes: run, requeue, cancel, allocate, lose a node."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_image
from file_tree import write_files
from labkit import (
    IMGKIT,
    LOOK,
    LOOKED,
    ROOT,
    SLURMS,
    TOKEN,
    SlurmSite,
    expect_success,
    output,
    slurm_marks,
    soak,
    split_line,
    until,
)

from imgkit_builder.recipe.load import load
from imgkit_entrypoints import system

SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m")
SUBMIT = ("--submit", "-A", "bsc98", "--time", "10m")
CPU = ("--device", "cpu", "--nproc", "2")
ONE = ("--device", "cpu", "--nproc", "1")  # a worker a node: several are tested without Slurm, too
COUNT = ("dist-run", *ONE, "--grace", "20", "save_and_resume.py")

pytestmark = [*slurm_marks, pytest.mark.xdist_group("submit")]


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and three nodes; the folder has a blank in its name."""

    def cluster(self, *args, typed=""):
        # The function is what a site's login shell hands on to jobs.
        env = {"XDG_STATE_HOME": str(self.state / "state"), "BASH_FUNC_module%%": '() { echo "module $*"; }'}
        env["TOKEN"] = TOKEN
        env["SHELL"] = "/bin/bash"  # `script` starts it; dash would lose the function
        return self(*args, env=env, stdin=typed)

    def imgkit(self, *args):
        """Run imgkit on the login node, in the jobs' folder."""
        return self.cluster("exec login --cwd", self.folder, "--", *IMGKIT, *split_line(*args))

    def submit(self, *args):
        result = expect_success(self.imgkit("run --detach mn5", *SITE, *split_line(*args)))
        return result.stdout.strip()

    def record(self, job):
        """Return what Slurm knows of a job."""
        return self.cluster("scontrol show job", job).stdout

    def requeue(self, job):
        """Requeue a job by hand, and wait for its next end."""
        self.cluster("scontrol requeue", job)
        self.start_again(job)
        self.wait_for_end(job)

    def run_to_end(self, *args):
        """Return all that a job prints."""
        return self.wait_for_end(self.submit(*args))

    def processes(self, *nodes):
        """Processes of a run, on these nodes."""
        lines = self.ps("args", *nodes)
        return [line for line in lines if re.search(r"imgkit_entrypoints|torch|save_and", line)]


@pytest.fixture(scope="module", params=SLURMS)
def site(mn5_sif, request):
    cluster = Site(
        state=Path(f"/tmp/imgkit-submit-{os.getpid()}"), folder=Path(f"/tmp/imgkit jobs {os.getpid()}")
    )
    for folder in (cluster.folder, cluster.folder / "runs"):  # jobs of root and of the ordinary user run here
        folder.mkdir()
        folder.chmod(0o777)
    (cluster.folder / "mn5.sif").symlink_to(mn5_sif)
    shutil.copy(ROOT / "examples/save_and_resume.py", cluster.folder)
    try:
        cluster.up(3, "--cpus", "80", release=request.param)
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(cluster.folder)


@pytest.mark.parametrize(
    ("command", "result"),
    [
        (("dist-hello", *CPU), "all_reduce of ones: 4"),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in (
                (("dist-pi", *ONE), "error [0-9.]+e-1[2-9], 100000000 intervals, 2 ranks"),
                (("dist-train", *ONE, "--steps", "100"), r"loss 2\d\.\d+ -> 0\.00\d+, 2 ranks"),
                (("dist-bench", *ONE, "--max", "64K", "--iters", "5"), r"all_reduce \w+ sum, 2 ranks, gloo"),
                (("dist-bench", *CPU), r"all_reduce \w+ sum, 4 ranks, gloo"),  # as it is by default
            )
        ),
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else "",
)
def test_submitted_command_runs_on_two_nodes(site, command, result):
    job_output = site.run_to_end("--nodes 2 --", *command)
    assert job_output.startswith("module load singularity\n")
    assert "no secret is set: any program" not in job_output
    assert re.search(result, job_output), job_output


OWN = """\
image: {base: "python:3.12-slim"}
system:
  extends: mn5
  runtime:
    binds: ["%s/system.json:/opt/imgkit/system.json:ro"]
  partitions:
    debug: {gpus: 2, interfaces: [eth0]}
  fabric: {head_suffix: i}
  queue:
    name: debug
    srun: [--label, --cpu-bind=none]  # sbatch has no --label
    output: separate
"""


def test_system_of_ones_own_reaches_srun_and_the_nodes(site):
    (site.folder / "own.yaml").write_text(OWN % site.folder)
    facts = load(site.folder / "own.yaml").system
    (site.folder / "system.json").write_text(system.to_json(facts))  # over that of the image
    for node in ("node1", "node2", "node3"):
        hosts = "sed 's/ node1$/ node1i/; t; d' /etc/hosts > /tmp/$$; cat /tmp/$$ >> /etc/hosts; rm /tmp/$$"
        site.cluster("exec", node, "--", "sh", "-c", hosts)
    args = ("run", "--detach", "./own.yaml", *SITE, "--image", "mn5.sif", "--nodes", "2", "--name", "own")

    def run_to_end(*command):
        result = expect_success(site.imgkit(*args, *command))
        job = result.stdout.strip()
        site.wait_for_end(job)
        output_text, wrong = ((site.folder / f"own-{job}.{end}").read_text() for end in ("out", "err"))
        logs = site.imgkit("logs", job).stdout
        assert output_text in logs
        assert wrong in logs
        return output_text + wrong

    plan = run_to_end("--env", "IMGKIT_DRY_RUN=1", "--", "dist-hello", *CPU)
    # Each line begins with srun's label; sbatch would refuse that option.
    heads = re.findall(r"^([01]): head +(\S+) +(.+)$", plan, re.MULTILINE)
    source = "SLURM_STEP_NODELIST, with the system's fabric.head_suffix 'i'"
    assert sorted(heads) == [("0", "node1i", source), ("1", "node1i", source)], plan
    interfaces = re.findall(
        r"^[01]: NCCL_SOCKET_IFNAME +eth0 .*SLURM_JOB_PARTITION=debug", plan, re.MULTILINE
    )
    assert len(interfaces) == 2, plan
    job_output = run_to_end("--", "dist-hello", *CPU)
    assert re.search(r"^[01]: .*all_reduce of ones: 4", job_output, re.MULTILINE), job_output


UNEQUAL = ("sh", "-c", 'IMGKIT_NPROC=$((SLURM_NODEID + 1)) exec "$@"', "sh")
"""A command that starts one worker on the first node, and two on the second."""


@pytest.mark.soak
def test_nodes_with_different_numbers_of_workers_train(site):
    job_output = site.run_to_end(
        *("--nodes", "2", "--", *UNEQUAL, "dist-train", "--device", "cpu", "--steps", "20")
    )
    assert re.search(r"loss 2\d\.\d+ -> \d+\.\d+, 3 ranks", job_output), job_output
    assert (
        "the nodes differ in workers per node 1 on node 1 of 2 (node1), 2 on node 2 of 2 (node2)"
        in job_output
    )


def test_job_whose_id_a_site_hides_is_named_by_the_scheduler(site):
    wrapper = site.folder / "bin/sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\n/usr/bin/sbatch "$@" && echo Thank you\n')
    wrapper.chmod(0o755)
    path = f"PATH={wrapper.parent}:{os.environ['PATH']}"
    args = ("run", "--detach", "mn5", *SITE, "--name", "hidden", "--option=--hold", "--", "dist-hello")
    result = site.cluster("exec login --cwd", site.folder, "--", "env", path, *IMGKIT, *args)
    try:
        assert (result.returncode, result.stdout) == (4, "")
        match = re.search(r"(unknown-\w+): .* slurm printed '(\d+)\\nThank you'\n", result.stderr)
        assert match, result.stderr
        assert "squeue --me shows the job hidden with its id" in result.stderr
        queued = site.cluster("squeue --me --noheader", "--format=%A %j").stdout
        assert f"{match[2]} hidden\n" in queued
        assert site.imgkit("cancel", match[1]).returncode == 4
        assert match[1] in site.imgkit("runs").stdout
    finally:
        site.cluster("scancel --name hidden")


def test_values_arrive_as_they_were_typed(site):
    (site.folder / "show me.py").write_text("import os, sys\nprint(os.environ['NOTE'], sys.argv[1:])\n")
    note = """$(touch pwned) "and" 'more'"""
    job_output = site.run_to_end(
        "--env", f"NOTE={note}", "--", "dist-run", *CPU, "show me.py", "$(id)", "a b"
    )
    assert f"{note} ['$(id)', 'a b']" in job_output, job_output
    assert not (site.folder / "pwned").exists()


def test_no_text_of_a_job_holds_its_secrets(site):
    shutil.copy(LOOK, site.folder)
    job = site.submit("--nodes 2 --env TOKEN --require-secret -- dist-run", *ONE, LOOK.name)
    job_output = site.wait_for_end(job)
    assert LOOKED.findall(job_output) == [("['0600 32']", "[]")] * 2, job_output
    assert list((site.folder / f"runs/mn5-{job}").glob(".imgkit-secret*")) == []
    slurm_texts = [
        site.cluster(*argv).stdout
        for argv in (
            ("scontrol", "show", "job", "--details", job),
            ("scontrol", "write", "batch_script", job, "-"),
            ("squeue", "--states=all", "--format=%all"),
        )
    ]
    assert all(slurm_texts)
    records = [path.read_text() for path in (site.state / "state").rglob("*.json")]
    assert records
    assert not any(TOKEN in text for text in (*slurm_texts, *records, job_output))


def stopped_and_requeued(site, job):
    """Ask `job` to stop, as Slurm does before its time is over, and have it start again; the step saved."""
    site.cluster("scancel --batch --signal=USR1", job)  # as --signal=B:USR1@120 does
    site.wait_for_text(job, "requeued")
    step = saved_step(site, job)
    site.start_again(job)
    return step


def saved_step(site, job, message=r"state saved at step (\d+)"):
    match = re.search(message, site.output_of(job))
    assert match, site.output_of(job)
    return match[1]


def test_job_asked_to_stop_is_requeued_and_finishes(site):
    # As an ordinary user: there a process of the step serves the image's files, and must not be signalled.
    cluster = site.imgkit("run --dry-run mn5", *SITE, "--nodes", "2", "--", *COUNT, "400")
    (site.folder / "job.sh").write_text(cluster.stdout)
    submitted = expect_success(site.cluster("--user sbatch --parsable", site.folder / "job.sh"))
    job = submitted.stdout.strip()
    site.wait_for_text(job, "starts at 0")
    saved = stopped_and_requeued(site, job)
    site.wait_for_end(job)
    assert f"starts at {saved}\n" in site.output_of(job)
    assert "finished at 400" in site.output_of(job)
    assert (site.folder / f"runs/mn5-{job}/result").read_text() == f"{job}.0 0\n"


@pytest.mark.soak
def test_file_of_a_person_keeps_the_job_from_going_on(site):
    job = site.submit("--nodes 2 --", *COUNT, "200")
    stop = site.folder / f"runs/mn5-{job}/stop"
    site.wait_for_text(job, "starts at 0")
    stop.touch()
    site.wait_for_end(job)
    saved = saved_step(site, job)
    assert "ExitCode=0:0" in site.record(job)
    assert "requeued" not in site.output_of(job)
    assert stop.exists()

    site.requeue(job)
    assert f"{stop}: this file prevents the run from starting" in site.output_of(job)
    assert f"rm '{stop}'" in site.output_of(job)
    assert "JobState=FAILED" in site.record(job), site.record(job)
    assert site.output_of(job).count("starts at") == 1

    stop.unlink()
    site.requeue(job)
    assert f"starts at {saved}\n" in site.output_of(job)
    assert "finished at 200" in site.output_of(job)


STUCK = """
import os, time
from pathlib import Path
stop = Path(os.environ["IMGKIT_STOP_DIR"])
print("waits", flush=True)
while not (stop / "stop").exists():
    time.sleep(0.1)
(stop / "state-saved").write_text(os.environ["IMGKIT_JOB_ID"] + " 7")
"""
"""A STUB of a training that never gets beyond its step."""


def test_job_without_progress_is_not_requeued_again(site):
    (site.folder / "stuck.py").write_text(STUCK)
    job = site.submit("--nodes 2 -- dist-run", *ONE, "stuck.py")
    site.wait_for_text(job, "waits", 2)
    assert stopped_and_requeued(site, job) == "7"
    site.wait_for_text(job, "waits", 4)
    site.cluster("scancel --batch --signal=USR1", job)
    site.wait_for_end(job)
    message = f"state saved ({job}.0 7) where it was at the last start: not requeued"
    assert site.output_of(job).count(message) == 1, site.output_of(job)
    assert "ExitCode=85:0" in site.record(job)


BY_TORCHRUN = (
    'exec torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$SLURM_NODEID" --master-addr node1 "$0"',
    "library.py",
)
LIBRARY = """
import time
import torch
from imgkit_entrypoints.run import Run
torch.distributed.init_process_group("gloo")
with Run.start() as run:
    run.track(model=torch.nn.Linear(1, 1))
    run.restore()
    print(f"starts at {run.step}", flush=True)
    for _ in run.steps(range(200)):
        time.sleep(0.05)
print(f"finished at {run.step}")
"""


@pytest.mark.soak
def test_job_of_plain_torchrun_is_requeued_by_the_library(site):
    (site.folder / "library.py").write_text(LIBRARY)
    job = site.submit("--nodes 2 --gpus 0 -- sh -c", *BY_TORCHRUN)
    site.wait_for_text(job, "starts at 0")
    site.cluster("scancel --batch --signal=USR1", job)
    site.wait_for_text(job, "requeued")
    saved = saved_step(site, job, r"the state of step (\d+) is saved")
    site.start_again(job)
    site.wait_for_end(job)
    assert f"starts at {saved}\n" in site.output_of(job)
    assert "finished at 200" in site.output_of(job)
    assert "ExitCode=0:0" in site.record(job)


@pytest.mark.soak
def test_job_that_slurm_ends_at_its_limit_is_not_requeued(site):
    job = site.submit("--nodes 2 --time 1m -- dist-run", *ONE, "--grace", "60", "stuck.py")
    site.wait_for_text(job, "waits", 2)
    until(lambda: not site.is_queued(job), within_s=240, describe=lambda: site.output_of(job))
    assert "JobState=TIMEOUT" in site.record(job), site.record(job)
    assert "requeued" not in site.output_of(job)


def test_folder_that_another_user_planted_is_refused(site):
    job = site.submit("--option=--hold -- dist-hello", *ONE)
    planted = site.folder / f"runs/mn5-{job}"
    planted.mkdir()
    os.chown(planted, 12345, 12345)
    site.cluster("scontrol release", job)
    assert f"imgkit: {planted} is a link or another user's folder\n" in site.wait_for_end(job)
    assert "ExitCode=2:0" in site.record(job)
    assert list(planted.iterdir()) == []


def test_cancelled_job_is_not_requeued(site):
    job = site.submit("--nodes 2 --", *COUNT, "6000")
    site.wait_for_text(job, "starts at 0")
    status = site.imgkit("status", job)
    assert "RUNNING" in status.stdout
    assert f"imgkit: squeue --noheader --jobs={job}" in status.stderr
    assert site.imgkit("cancel", job).returncode == 0
    site.wait_for_end(job)
    until(
        lambda: not site.processes("node1", "node2"), describe=lambda: str(site.processes("node1", "node2"))
    )
    assert "requeued" not in site.output_of(job)


def test_array_tasks_have_their_own_folder_output_and_end(site):
    write_files(site.folder / "tasks", {"log": "sent"})
    work = 'echo "task $SLURM_ARRAY_TASK_ID" | tee -a log; exit "$SLURM_ARRAY_TASK_ID"'
    array = site.submit("--gpus 0 --code tasks --option=--array=0-1 -- sh -c", work)
    listed = site.imgkit("status")
    assert re.search(rf"^{array} +mn5 ", listed.stdout, re.MULTILINE), listed.stdout
    assert site.imgkit("logs", array).returncode == 2
    followed = site.imgkit("logs", f"{array}_0")  # until it ends
    assert "\ntask 0\n" in followed.stdout, followed.stdout
    site.wait_for_end(array)
    logs = [site.folder / f"runs/mn5-{array}_{task}/workspace/log" for task in (0, 1)]
    assert [log.read_text() for log in logs] == ["sent\ntask 0\n", "sent\ntask 1\n"]
    states = {job_id: site.imgkit("status", job_id) for job_id in (f"{array}_0", f"{array}_1", array)}
    ends = [
        (result.returncode, result.stdout.splitlines()[-1].split()[1].strip(";"))
        for result in states.values()
    ]
    assert ends == [(0, "completed"), (0, "failed"), (0, "failed")]
    assert "ArrayTaskId=1 JobState=FAILED" in states[f"{array}_1"].stdout
    assert "task 1\n" in site.imgkit("logs", f"{array}_1").stdout


WRITES = """\
cd "a b"; echo start >> log; [ "$SLURM_RESTART_COUNT" ] && exec cat ../edited log
i=0; while [ $i -lt 2000 ]; do : > "f $i"; i=$((i + 1)); done; echo ready; sleep 600
"""


def test_requeued_job_goes_on_in_its_copy_of_the_code(site):
    source = site.folder / "my code"
    (source / "a b").mkdir(parents=True)
    (source / "a b/log").write_text("sent\n")
    (source / "edited").write_text("before\n")
    os.chown(source, site.folder.stat().st_uid, site.folder.stat().st_gid)
    job = site.submit("--gpus 0 --code", "my code", "--", "sh", "-c", WRITES.replace("\n", ";"))
    (source / "edited").write_text("after\n")  # the job waits, or runs
    site.wait_for_text(job, "ready")
    site.requeue(job)
    assert site.output_of(job).endswith("before\nsent\nstart\nstart\n")
    assert len(list((site.folder / f"runs/mn5-{job}/workspace/a b").iterdir())) == 2001
    (stored,) = (site.folder / ".imgkit-code").glob("*/workspace/a b/log")
    assert stored.read_text() == "sent\n"


def test_shell_in_a_running_job_has_its_container(site):
    job = site.submit("--nodes 2 --gpus 0 --env", "WORD=a  b", "--", "sleep", "100")
    site.until(lambda: (site.folder / f"runs/mn5-{job}").is_dir(), job)
    seen = "$(hostname) [$WORD] $APPTAINER_NAME $IMGKIT_RUN_DIR $(cat /proc/*/comm | grep -c sleep)"
    typed = f'echo "at {seen}"; exit 7\n'

    def shell(*args):
        line = shlex.join(map(str, (*IMGKIT, "shell", "--job", *args)))
        terminal = ("script", "-qec", line, "/dev/null")
        return site.cluster("exec login --cwd", site.folder, "--", *terminal, typed=typed)

    for node in ("node1", "node2"):
        result = shell(job, "--node", node)
        assert re.search(rf"at {node} \[a  b\] mn5.sif {site.folder}/runs/mn5-{job} [1-9]", result.stdout), (
            result.stdout
        )
        assert result.returncode == 7
    assert "a new container on a node of the job" in result.stdout
    site.imgkit("cancel", job)
    site.wait_for_end(job)
    assert f"the job {job} has ended" in shell(job).stdout


SPARED = ("dist-run", *ONE, "--lost-after", "4", "--grace", "20")
STUB = """
import os, socket, time
attempt = os.environ["IMGKIT_ATTEMPT"]
# One text: torchrun may read between the writes of a line, and puts its prefix there.
print(f"attempt {attempt} rank {os.environ['RANK']} {socket.gethostname()}", flush=True)
while attempt == "1" or not os.path.exists("go"):
    time.sleep(0.1)
"""
"""A STUB of a training, without torch: only its second attempt ends, when there is a file `go`."""


def kill_launcher(site, node):
    started = re.compile(r"(\d+) (?:\S*/)?python3 -I -m imgkit_entrypoints dist-run")
    (launcher,) = filter(None, map(started.search, site.ps("pid=,args=", node)))
    site.cluster("exec", node, "--", "kill", "-KILL", launcher[1])


def with_a_spare(site, *command, works="starts at 0", options=()):
    """A job of 2+1 nodes whose program has printed `works`."""
    job = site.submit("--nodes 2+1", *options, "--", *SPARED, *command)
    site.wait_for_text(job, works)
    return job


@pytest.mark.parametrize("how", ["kill", *soak("cut", "crash")])
def test_spare_takes_over_from_a_lost_node(site, how):
    write_files(site.folder / "spared code", {"attempts.py": STUB})
    code = ("--code", "spared code")
    job = with_a_spare(site, "attempts.py", works="attempt 1 rank 1 node2", options=code)
    if how == "kill":
        kill_launcher(site, "node2")
    else:
        site.cluster("fault", how, "node2")
        # Not earlier: it is now that Slurm ends other jobs.
        nodes = ("squeue", "--noheader", f"--jobs={job}", "--format=%D")
        site.until(lambda: site.cluster(*nodes).stdout.strip() in ("2", ""), job)
    (site.folder / f"runs/mn5-{job}/workspace/go").touch()
    site.wait_for_end(job)
    job_output = site.output_of(job)
    assert "attempt 2 rank 0 node1" in job_output
    assert "attempt 2 rank 1 node3" in job_output, job_output
    assert (site.folder / f"runs/mn5-{job}/result").read_text() == f"{job}.0 0\n"
    assert "ExitCode=0:0" in site.record(job), job_output
    if how != "kill":
        whole_again(site, "node2")


def whole_again(site, node):
    """A node without its fault, which Slurm takes for a healthy one."""
    site.cluster("fault heal", node)
    site.cluster("fault crash", node)
    site.cluster("fault boot", node)
    until(lambda: set(site.cluster("sinfo -h -N -o %t").stdout.split()) == {"idle"})


@pytest.mark.soak
def test_job_that_loses_its_first_node_is_requeued_by_another(site):
    job = with_a_spare(site, "save_and_resume.py", "60")
    site.cluster("fault crash node1")
    site.until(lambda: " PD " in site.cluster("squeue", f"--jobs={job}").stdout, job)
    assert "Restarts=1" in site.record(job)
    site.cluster("fault boot node1")
    site.start_again(job)
    site.wait_for_end(job)
    assert "finished at 60" in site.output_of(job)
    assert "ExitCode=0:0" in site.record(job), site.output_of(job)


@pytest.mark.soak
def test_job_saves_and_is_requeued_after_its_spare_took_over(site):
    job = with_a_spare(site, "save_and_resume.py", "200")
    kill_launcher(site, "node2")
    site.wait_for_text(job, "starts at 0", 2)
    saved = stopped_and_requeued(site, job)
    site.wait_for_end(job)
    assert f"starts at {saved}\n" in site.output_of(job)
    assert "finished at 200" in site.output_of(job)


@pytest.mark.soak
def test_job_cancelled_during_a_restart_leaves_nothing(site):
    job = with_a_spare(site, "save_and_resume.py", "6000")
    kill_launcher(site, "node2")
    site.wait_for_text(job, "attempt 2 starts")
    assert site.imgkit("cancel", job).returncode == 0
    site.wait_for_end(job)
    nodes = ("node1", "node2", "node3")
    until(lambda: not site.processes(*nodes), describe=lambda: str(site.processes(*nodes)))
    assert "JobState=CANCELLED" in site.record(job)
    assert "requeued" not in site.output_of(job)


@pytest.mark.soak
def test_result_of_a_failed_program_is_the_job_s(site):
    (site.folder / "fails.py").write_text("raise SystemExit(3)\n")
    job = site.submit("--nodes 2+1 -- dist-run", *ONE, "fails.py")
    site.wait_for_end(job)
    result = (site.folder / f"runs/mn5-{job}/result").read_text()
    assert f"ExitCode={result.split()[1]}:0" in site.record(job), site.output_of(job)
    assert not result.endswith(" 0\n")


@pytest.mark.soak
def test_spare_takes_over_without_a_scheduler(site):
    folder = site.folder / "runs/by ssh"
    folder.mkdir()
    image = ("--runtime", "singularity", "--image", "mn5.sif", "--gpus", "0", "--nproc", "1")
    hosts = "run --detach lambda --mpi-start ssh --hosts node1,node2,node3 --nodes 2+1 --env"
    job = (*hosts.split(), f"IMGKIT_RUN_DIR={folder}", *image, "--", *SPARED, "save_and_resume.py", "60")
    output = site.folder / "by-ssh.out"

    def read_output():
        return output.read_text()

    with (
        output.open("w") as stream,
        subprocess.Popen(
            site.argv("exec login --cwd", site.folder, "--", *IMGKIT, *job),
            stdout=stream,
            stderr=stream,
        ) as run,
    ):
        until(lambda: "starts at 0" in read_output(), describe=read_output)
        kill_launcher(site, "node2")
        assert run.wait(120) == 0, read_output()
    assert "node2: its command ended with exit code" in read_output()
    assert "finished at 60" in read_output()


@pytest.mark.soak
@pytest.mark.docker
def test_recipe_is_built_on_a_node(site, standin_notorch):
    output("docker", "save", "-o", site.folder / "base.tar", standin_notorch)
    recipe = f"image:\n  base: {standin_notorch}\n  run: [echo made > /made]\nsystem: {{scheduler: slurm}}\n"
    (site.folder / "mine.yaml").write_text(recipe)
    build = ("build", "./mine.yaml", "--with", "apptainer", "--base-from", "base.tar")
    result = expect_success(site.imgkit(*build, *SUBMIT, "--system", "mn5"))
    assert "smoke test" in result.stdout
    assert (site.folder / "mine.sif").is_file(), result.stdout
    assert output("singularity", "exec", site.folder / "mine.sif", "cat", "/made") == "made\n"


@pytest.mark.programs("mksquashfs")
def test_archive_is_converted_on_a_node(site):
    tiny_image.write(site.folder / "tiny.tar", "tiny:1")
    result = expect_success(site.imgkit("sif tiny.tar --no-test", *SUBMIT, "--system", "mn5"))
    assert f"{site.folder}/tiny.sif  " in result.stdout
    assert (site.folder / "tiny.sif").is_file()
    (job,) = re.findall(r"imgkit: job (\d+);", result.stderr)
    assert f"imgkit: {job} completed\n" in result.stderr
    assert f"{job} completed\n" in expect_success(site.imgkit("wait", job)).stdout
    record = site.record(job)
    assert "NumNodes=1" in record
    assert "gres/gpu" not in record


def test_waiting_conversion_is_cancelled_by_its_id(site):
    tiny_image.write(site.folder / "held.tar", "tiny:1")
    options = ("--detach", "--option=--hold", "--system", "mn5")
    job = expect_success(site.imgkit("sif held.tar", *SUBMIT, *options)).stdout.strip()
    assert f"{job}  " in expect_success(site.imgkit("status", job)).stdout
    assert site.imgkit("cancel", job).returncode == 0
    result = site.imgkit("wait", job)
    assert (result.returncode, result.stdout) == (1, f"{job} was cancelled\n")
    assert not (site.folder / "held.sif").exists()


def test_allocation_by_hand_runs_the_command(site):
    result = expect_success(site.imgkit("run mn5", *SITE, "--nodes", "2", "-i", "--", "dist-hello", *ONE))
    assert "all_reduce of ones: 2" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--image", "no.sif", "--", "dist-hello"), "no image"),
        (("--option=--no-such-option", "--", "dist-hello"), "sbatch failed with exit code"),
        (("--gpus", "8", "--", "dist-hello"), "a node has 4"),
    ],
)
def test_refused_job_says_why(site, args, message):
    result = site.imgkit("run --detach mn5", *SITE, *args)
    assert result.returncode in (2, 4)
    assert message in result.stderr
    assert result.stdout == ""
