"""Jobs for PBS on two nodes of the virtual cluster, under a STAND-IN for PBS: ``ci/lab/pbs-standin``.

Real are the nodes, sshd, the .sif and torchrun; what the stand-in keeps of PBS is in its first lines.
"""

from __future__ import annotations

import os
import re
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
    TOKEN,
    Cluster,
    cluster_marks,
    expect_success,
    pbs_standin,
    run,
    soak,
    split_line,
    until,
)

STARTS = ("pals", "pbsdsh", "ssh")
RECIPE = """
extends: olivia-eap
image: {platform: amd64}
system:
  runtime: {command: singularity, host_libs: [STATE/libs]}
  queue: {sif: [-l, "select=1:ncpus=1"]}
"""

pytestmark = [*cluster_marks, pytest.mark.xdist_group("pbs")]


@dataclass(frozen=True, kw_only=True)
class Pbs(Cluster):
    """A cluster of two nodes under the stand-in."""

    sif: Path

    @property
    def work(self):
        return self.state / "my work"

    def run(self, *args, text=None):
        """A command of the submitter."""
        path = f"{self.state}/pbs/bin:{os.environ['PATH']}"
        env = {"PATH": path, "XDG_STATE_HOME": str(self.state / "submitter")}
        return run(*args, folder=self.work, env=env, stdin=text or "")

    def imgkit(self, *args):
        return expect_success(self.run(*IMGKIT, *split_line(*args))).stdout.strip()

    def submit(
        self,
        *args,
        nodes=2,
        nproc=2,
        start="pals",
        recipe="eap.yaml",
    ):
        """The id of a job that runs `words` on the nodes' processors."""
        options = f"--gpus 0 --nproc {nproc} --time 5m --nodes {nodes} --pbs-start {start}".split()
        image = () if "--image" in args else ("--image", self.sif)
        return self.imgkit("run --detach", self.state / recipe, *options, *image, *split_line(*args))

    def end(self, job):
        """Exit code and output of a job, when it has ended."""
        file = self.state / "pbs/jobs" / job
        until(file.exists)
        streams = sorted(self.work.glob(f"*.[eo]{job.partition('.')[0]}"))
        return int(file.read_text()), "".join(file.read_text() for file in streams)

    def output_of(self, job, code=0):
        """Return the output of a job, which must end with `code`."""
        actual_code, output = self.end(job)
        assert actual_code == code, output
        return output

    def script(self, *lines, code=0):
        """Submit a script as it is, and return the output of its job, which must end with `code`."""
        result = expect_success(self.run("qsub", text="\n".join(("#!/bin/bash", *lines, ""))))
        return self.output_of(result.stdout.strip(), code)

    def processes(self):
        """Processes of the jobs' user, on all nodes."""
        lines = self.ps("user:16,args", "node1", "node2")
        return [line for line in lines if line.startswith("researcher ")]


@pytest.fixture(scope="module")
def pbs(mn5_sif):
    cluster = Pbs(state=Path(f"/tmp/imgkit-test-pbs-{os.getpid()}"), sif=mn5_sif)
    cluster.up(2, "--no-slurm")
    try:
        with pbs_standin(cluster):
            cluster.work.mkdir()
            cluster.work.chmod(0o1777)
            recipe = RECIPE.replace("STATE", str(cluster.state))
            write_files(cluster.state, {"libs/libnccl-net.so": "the host's", "eap.yaml": recipe})
            with (cluster.state / "home/researcher/.profile").open("a") as profile:
                profile.write('module() { echo "$(hostname): module $*"; }\n')
            yield cluster
    finally:
        cluster.down()


def ranks(output):
    return re.findall(r": +(\d)  (node\d)  cpu, [12] threads ", output)


FOUR = [("0", "node1"), ("1", "node1"), ("2", "node2"), ("3", "node2")]
TWO = [("0", "node1"), ("1", "node2")]


@pytest.mark.parametrize("start", STARTS)
def test_every_start_connects_all_ranks(pbs, start):
    nproc = 2 if start == "pals" else 1
    output = pbs.output_of(pbs.submit("-- dist-hello", start=start, nproc=nproc))
    assert f"all_reduce of ones: {2 * nproc}" in output, output
    assert ranks(output) == (FOUR if nproc == 2 else TWO)
    assert "no secret is set: any program" not in output


@pytest.mark.parametrize("start", ["pals", *soak(*STARTS[1:])])
def test_no_text_of_a_job_holds_its_secrets(pbs, start):
    shutil.copy(LOOK, pbs.work)
    home = pbs.state / "home/researcher"  # the jobs' user
    file = home / "tokens"
    file.write_text(f"TOKEN={TOKEN}\n# a note\nexport X=$(touch executed)\n")
    file.chmod(0o600)
    os.chown(file, home.stat().st_uid, home.stat().st_gid)
    options = ("--env-file", file, "--require-secret")
    output = pbs.output_of(pbs.submit(*options, "--", "dist-run", LOOK.name, start=start, nproc=1))
    assert LOOKED.findall(output) == [("['0600 32']", "[]")] * 2, output
    assert not list(pbs.work.glob("runs/*/.imgkit-secret*"))
    assert not (pbs.work / "executed").exists()


@pytest.mark.parametrize("start", STARTS)
def test_failure_of_one_node_is_the_job_s(pbs, start):
    program = 'echo "$0 on $(hostname)"; test "$(hostname)" = node1 || exit 3'
    output = pbs.output_of(pbs.submit("-- sh -c", program, "it's $me", start=start), 3)
    assert sorted(re.findall(r"it's \$me on (\w+)", output)) == ["node1", "node2"]


def test_one_node_needs_no_start(pbs):
    output = pbs.output_of(pbs.submit("-- dist-hello", nodes=1))
    assert ranks(output) == FOUR[:2], output
    assert "INFO:" not in output


@pytest.mark.programs("mksquashfs")
def test_archive_is_converted_on_a_node(pbs, public_imgkit):
    tiny_image.write(pbs.work / "tiny.tar", "tiny:1")
    # A job of PBS has the PATH of a login shell.
    with (pbs.state / "home/researcher/.profile").open("a") as profile:
        profile.write(f'PATH="{public_imgkit.parent}:$PATH"\n')
    options = ("--no-test", "--submit", "--detach", "--time", "5m", "--system", pbs.state / "eap.yaml")
    output = pbs.output_of(pbs.imgkit("sif tiny.tar", *options))
    assert f"{pbs.work}/tiny.sif  " in output
    assert (pbs.work / "tiny.sif").is_file()


@pytest.mark.parametrize("start", STARTS)
def test_cancelled_job_leaves_no_process(pbs, start):
    job = pbs.submit("-- sleep 600", start=start)
    until(lambda: sum("sleep 600" in line for line in pbs.processes()) >= 2)
    assert "job_state = R" in pbs.imgkit("status", job)
    pbs.imgkit("cancel", job)
    assert pbs.end(job)[0] != 0
    until(lambda: not pbs.processes())


@pytest.mark.soak
@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
def test_job_ends_when_a_host_is_lost(pbs, start):
    (pbs.work / "wait.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    job = pbs.submit("-- dist-run wait.py", start=start)
    spool = pbs.state / f"pbs/spool/{job}.OU"
    until(lambda: spool.read_text().count("waits") == 4, describe=spool.read_text)
    try:
        pbs("fault crash node2")
        code, output = pbs.end(job)
        assert code not in (0, 256 + 9), output
        assert "lost node 2 of 2 (node2)" in output
        assert f"imgkit: {start} does not return from node2: ended\n" in output
        assert "Traceback" not in output
    finally:
        pbs("fault boot node2")
        by_ssh = ("ssh", "-o", "BatchMode=yes", "node2", "true")
        until(lambda: pbs("exec --user node1 --", *by_ssh).returncode == 0)
    until(lambda: not pbs.processes())


def test_walltime_ends_a_job_and_its_history_says_so(pbs):
    job = pbs.run("qsub", text="#!/bin/bash\n#PBS -l walltime=00:00:01\nsleep 600\n").stdout.strip()
    assert pbs.end(job)[0] == -29
    plain = pbs.run("qstat", job)
    assert plain.returncode == 35
    assert "Job has finished, use -x" in plain.stderr
    assert "Exit_status = -29" in pbs.run("qstat", "-x", "-f", job).stdout
    until(lambda: not pbs.processes())


def test_array_without_a_range_is_refused(pbs):
    refused = pbs.run("qsub", "-J", "3", text="#!/bin/bash\ntrue\n")
    assert refused.returncode != 0
    assert "illegal -J value" in refused.stderr


def test_killed_script_ends_what_ssh_started(pbs):
    job = pbs.submit("-- sleep 600", start="ssh")
    until(lambda: sum("sleep 600" in line for line in pbs.processes()) >= 2)
    pbs("exec node1 -- pkill -KILL -f", f"{job}.SC")
    pbs.end(job)
    until(lambda: not pbs.processes())


def test_own_libraries_come_before_the_image_s(pbs):
    program = 'echo "path=$LD_LIBRARY_PATH"; cat "${LD_LIBRARY_PATH%%:*}/libnccl-net.so"'
    output = pbs.output_of(pbs.submit("-- sh -c", program, nodes=1))
    assert f"path={pbs.state}/libs:" in output
    assert "the host's\n" in output


def new_environment(folder):
    """Make an environment without torch, which a plan does not import."""
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder], check=True)
    return folder


def test_run_without_container_loads_modules_on_each_node(pbs):
    environment = new_environment(pbs.state / "environment")
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "entrypoints.pth").write_text(f"{ROOT / 'entrypoints'}\n")
    args = ("--runtime", "host", "--image", environment, "--", "dist-hello", "--dry-run", "--json")
    output = pbs.output_of(pbs.submit(*args, start="pbsdsh"))
    loaded = re.findall(r"(node\d): module load (\S+)", output)
    assert sorted(loaded) == [(node, name) for node in ("node1", "node2") for name in MODULES]
    assert output.count("NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3' (set by the user)") == 2, (
        "the recipe's system.env"
    )


@pytest.mark.parametrize("runtime", ["singularity", "host"])
def test_edit_reaches_the_next_job_and_no_job_the_stored_code(pbs, runtime):
    source = pbs.work / f"my {runtime} code"
    write_files(source, {"it's a/log": "sent", "edited": "before"})
    options: tuple[str | Path, ...] = ("--code", source)
    if runtime == "host":
        environment = new_environment(pbs.state / "code environment")
        options += ("--runtime", "host", "--image", environment)
    program = 'echo more >> "it\'s a/log"; cat "it\'s a/log" edited; pwd > place'
    command = ("--", "sh", "-c", program)
    first = pbs.submit(*options, *command, nodes=1)
    write_files(source, {"edited": "after"})
    second = pbs.submit(*options, *command, nodes=1)
    for job, edited in ((first, "before"), (second, "after")):
        output = pbs.output_of(job)
        assert output.splitlines()[-3:] == ["sent", "more", edited], output
        workspace = pbs.work / f"runs/eap-{job}/workspace"
        place = "/workspace" if runtime == "singularity" else str(workspace)
        assert (workspace / "place").read_text() == f"{place}\n"
    for stored in pbs.work.glob(".imgkit-code/*/workspace/it's a/log"):
        assert stored.read_text() == "sent\n"


def test_array_tasks_have_their_own_folder_output_and_end(pbs):
    work = 'echo "task $PBS_ARRAY_INDEX"; touch "$IMGKIT_RUN_DIR/mine"; exit "$PBS_ARRAY_INDEX"'
    array = pbs.submit("--option=-J --option=0-1 -- sh -c", work, nodes=1)
    number = array.partition("[")[0]
    assert f"{array} " in pbs.imgkit("status")
    assert pbs.run(*IMGKIT, "logs", array).returncode == 2
    followed = pbs.run(*IMGKIT, "logs", f"{number}[1]")  # until it ends
    assert (followed.returncode, followed.stdout.strip()) == (1, "task 1")
    until(lambda: f"{array} " not in pbs.imgkit("status"))
    assert all((pbs.work / f"runs/eap-{number}[{task}].standin/mine").is_file() for task in (0, 1))
    for job, state in ((f"{number}[0]", "completed"), (f"{number}[1].standin", "failed"), (array, "failed")):
        status = pbs.imgkit("status", job)
        assert "Exit_status = " in status
        assert status.splitlines()[-1].split()[1].strip(";") == state


MODULES = ("cray-python/3.11.7", "cuda/12.6")


def test_chunks_on_one_host_are_refused(pbs):
    text = (pbs.state / "eap.yaml").read_text().replace("queue: {", "queue: {options: [-l, place=pack], ")
    (pbs.state / "pack.yaml").write_text(text)
    output = pbs.output_of(pbs.submit("-- dist-hello", recipe="pack.yaml"), 2)
    assert output == "imgkit: 2 chunks, and PBS put them on node1: -l place=scatter is missing\n"


TUTORIAL = (
    "#PBS -N ddp",
    "#PBS -l select=2:ncpus=288:mpiprocs=2:sales_op=blanca,walltime=3:00:00,place=scatter",
    "#PBS -q blanca",
)
"""Timeout of the early access tutorial's job, which ends in RendezvousTimeoutError after ten minutes."""


def test_tutorial_s_start_is_refused_at_once_until_it_is_right(pbs):
    once = f"cd '{pbs.work}'; singularity exec {pbs.sif} dist-hello --device cpu --nproc 1"
    refused = pbs.script(*TUTORIAL, once, code=5)
    (exported,) = re.findall(r"export IMGKIT_NODES=.*\"(?=, and pass)", refused)
    refused = pbs.script(*TUTORIAL, exported, once, code=5)
    assert "the job has 2 hosts (node1, node2), but this is the job script's process" in refused
    (typed,) = re.findall(r"^ +(mpiexec -n 2 .*)$", refused, re.MULTILINE)
    output = pbs.script(*TUTORIAL, exported, typed)
    assert ranks(output) == TWO


def test_tutorial_s_start_without_container_is_refused(pbs):
    once = f"import sys; sys.path.insert(0, {str(ROOT / 'entrypoints')!r}); "
    once += "import imgkit_entrypoints.cli.main as m; m.main(['dist-run', 'multinode.py', '50', '10'])"
    refused = pbs.script(*TUTORIAL, f'python3 -c "{once}"', code=5)
    assert "PBS starts nothing on the others" in refused
    assert "mpiexec -n 2 --ppn 1 --cpu-bind none " in refused
