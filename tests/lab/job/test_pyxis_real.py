"""Jobs of a real Slurm with a real pyxis and enroot, which nothing here installs: see `labkit.PYXIS`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import (
    PYXIS,
    SlurmSite,
    docker,
    expect_success,
    imgkit_as,
    imgkit_json,
    output,
    public_folder,
    run,
    slurm_marks,
    until,
)

RECIPE = """\
image:
  base: imgkit.local/standin:24.03
  platform: amd64
  env: {GREETING: image, QUOTED: '"a b"', BACK: \\a\\, HOST: $HOME}
system: {scheduler: slurm, runtime: {kind: pyxis}, node: {gpus: 0, cpus: 2}}
"""
HOOK = """\
#!/bin/sh
printf '%s\\n' MASTER_ADDR=elsewhere MASTER_PORT=1 WORLD_SIZE=7 RANK=5 NODE_RANK=3 GROUP_RANK=3 \\
    >> "$ENROOT_ENVIRON"
"""
"""enroot's 50-slurm-pytorch.sh sets such variables, for the job. These are of no job."""
SET_UP = """
mount -t overlay overlay /usr/local/bin -o "lowerdir=$1/bin:/usr/local/bin"
echo "required $1/lib/slurm/spank_pyxis.so $2" > /etc/slurm/plugstack.conf
mkdir -p /run/pyxis /run/enroot "$3" "$4/.local/share/enroot"
chown --recursive --reference="$4" /run/enroot "$3" "$4"
mount --bind "$3" "$4/.local/share/enroot"
"""
"""Gives a node enroot and pyxis: $1 the prefix, $2 options, $3 the node's containers, $4 the user's home."""
ONE = ("--device", "cpu", "--nproc", "1")
TRAIN = ("dist-train", *ONE, "--steps", "6000", "--save-every", "500")
WAIT = "import os, time; print('waits', os.environ['RANK'], os.getpid(), flush=True); time.sleep(600)"

pytestmark = [
    *slurm_marks,
    pytest.mark.soak,
    pytest.mark.xdist_group("pyxis"),
    pytest.mark.skipif(not PYXIS, reason="IMGKIT_PYXIS names no folder with enroot and pyxis"),
]


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and two nodes, for the jobs of an ordinary user."""

    mounts: bool
    """Whether pyxis mounts images by squashfuse instead of unpacking them."""

    def imgkit(self, *args, env=None, typed=""):
        user = {"HOME": str(self.state / "home/researcher"), "USER": "researcher", "SHELL": "/bin/bash"}
        as_user = self.argv("exec", "--user", "login", "--cwd", self.folder, "--")
        argv = (*imgkit_as(as_user, {**user, **(env or {})})[len(as_user) :], *map(str, args))
        if typed:  # typed at a terminal
            argv = ("script", "-qec", shlex.join(argv), "/dev/null")
        return run(*as_user, *argv, stdin=typed, folder="/")

    def submit(self, *args, env=None):
        result = expect_success(self.imgkit("run", "--detach", *args, env=env))
        return result.stdout.strip()

    def run_to_end(self, *args, env=None):
        return self.wait_for_end(self.submit(*args, env=env))

    def end_of(self, job):
        """State and exit code of a job."""
        record = self("scontrol", "show", "job", job).stdout
        return " ".join(re.findall(r"\b(?:JobState|ExitCode)=(\S+)", record))

    def processes(self):
        """Processes of the user on the nodes."""
        return [row for row in self.ps("user:16,args", "node1", "node2") if row.startswith("researcher ")]


@pytest.fixture(scope="module")
def folder(standin):
    """A folder that every user can enter, with the recipe and its .sqsh."""
    shared, tag = public_folder("pyxis"), f"imgkit-test-pyxis-{os.getpid()}:1"
    (shared / "site.yaml").write_text(RECIPE)
    (shared / "wait.py").write_text(WAIT)
    try:
        imgkit_json("build", shared / "site.yaml", "--base", standin, "--tag", tag, "--no-test")
        imgkit_json("sif", tag, "-o", shared / "site.sqsh")
        yield shared
    finally:
        docker("rmi", "--force", tag)
        shutil.rmtree(shared)


@pytest.fixture(scope="module", params=[False, True], ids=["unpacked", "squashfuse"])
def site(folder, request):
    state = Path(f"/tmp/imgkit-pyxis-lab-{os.getpid()}")
    jobs = folder / f"mounts-{request.param}"  # the next cluster counts its jobs from 1 again
    jobs.mkdir()
    jobs.chmod(0o777)
    for name in ("site.yaml", "site.sqsh", "wait.py"):
        (jobs / name).hardlink_to(folder / name)
    cluster = Site(state=state, folder=jobs, mounts=request.param)
    home = cluster.state / "home/researcher"
    try:
        cluster.up(2, release="own")  # pyxis loads into the Slurm that it was compiled for
        (hooks := home / ".config/enroot/hooks.d").mkdir(parents=True)
        (hooks / "60-ranks.sh").write_text(HOOK)
        (hooks / "60-ranks.sh").chmod(0o755)
        for node in ("login", "node1", "node2"):
            containers = cluster.state / f"enroot-{node}"
            option = f"use_squashfuse={cluster.mounts:d}"
            args = ("bash", "-euc", SET_UP, "bash", PYXIS, option, containers, home)
            expect_success(cluster("exec", node, "--", *args))
        yield cluster
    finally:
        cluster.down()


TWO = ("site.yaml", "--nodes", "2", "--time", "15m")


def test_both_nodes_meet_whatever_a_hook_has_set(site):
    job_output = site.run_to_end(*TWO, "--", "dist-hello", *ONE)
    assert "all_reduce of ones: 2" in job_output, job_output
    assert "imgkit: roll call: 2/2 present" in job_output
    plan = site.run_to_end(*TWO, "--", "dist-hello", *ONE, "--dry-run")
    assert sorted(re.findall(r"^node_rank +(\d)", plan, re.MULTILINE)) == ["0", "1"], plan


def losses(output):
    return dict(re.findall(r"step +(\d+)/\d+ +loss (\S+)", output))


def test_requeued_job_goes_on_with_the_same_losses(site):
    expected = losses(site.run_to_end(*TWO, "--", *TRAIN))
    job = site.submit(*TWO, "--", *TRAIN)
    site.until(lambda: bool(losses(site.output_of(job))), job)
    site("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
    site.until(lambda: "requeued" in site.output_of(job), job)
    saved = re.search(r"state saved at step (\d+)", site.output_of(job))
    assert saved, site.output_of(job)
    for node in ("node1", "node2"):  # as of a clean-up that Slurm has killed
        remains = site.state / f"enroot-{node}/pyxis_{job}.1/etc"
        site("exec", "--user", node, "--", "mkdir", "-p", remains)
    site.start_again(job)
    job_output = site.wait_for_end(job)
    assert f"resumes after step {saved[1]}" in job_output, job_output
    again = losses(job_output)
    assert "6000" in again
    assert [step for step in again if step in expected and again[step] != expected[step]] == []


@pytest.mark.parametrize("how", ["worker", "cancel"])
def test_no_process_is_left_of_a_job_that_ends_early(site, how):
    job = site.submit(*TWO, "--", "dist-run", *ONE, "--grace", "2", "wait.py")
    site.until(lambda: site.output_of(job).count("waits") == 2, job)
    if how == "worker":
        worker = re.search(r"waits 1 (\d+)", site.output_of(job))
        assert worker
        site("exec", "node2", "--", "kill", "-KILL", worker[1])
        assert "rank 1 on node 2 of 2 (node2) failed, killed by SIGKILL" in site.wait_for_end(job)
        assert site.end_of(job).startswith("FAILED")
    else:
        assert site.imgkit("cancel", job).returncode == 0
        site.wait_for_end(job)
    until(lambda: not site.processes(), describe=lambda: str(site.processes()))


NAMES = ("GREETING", "LANG", "TEXT", "HIDDEN", "FILED", "QUOTED", "BACK", "HOST", "PATH", "PWD")
SHOW = f'printf "<%s>\\n" {" ".join(f""""${name}" """ for name in NAMES)}; ls; touch "of $SLURM_NODEID"'


def test_values_and_code_arrive(site):
    (site.folder / "env").write_text("FILED=of a file\n")
    (site.folder / "env").chmod(0o600)
    os.chown(site.folder / "env", 20777, 20777)
    code = site.folder / "code"
    code.mkdir(exist_ok=True)
    (code / "mine.txt").touch()
    variables = ("--env", "GREETING=mine", "--env", "LANG", "--env", "TEXT=it's $(id)", "--env", "HIDDEN")
    args = (*variables, "--env-file", "env", "--code", "code")
    job_output = site.run_to_end(
        *TWO, *args, "--", "sh", "-c", SHOW, env={"HIDDEN": "of the shell", "LANG": "POSIX"}
    )
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    image = ('"a b"', "\\a\\", "$HOME")
    values = ("mine", "POSIX", "it's $(id)", "of the shell", "of a file", *image, path, "/workspace")
    assert job_output.count("".join(f"<{value}>\n" for value in values)) == 2, job_output
    assert job_output.count("mine.txt\n") == 2
    assert len(list(site.folder.glob("runs/*/workspace/of ?"))) == 2


def test_workdir_is_a_folder_of_the_image(site):
    job_output = site.run_to_end(
        *TWO, "--workdir", "/opt/imgkit", "--", "sh", "-c", "echo $(pwd) $(ls system.json)"
    )
    assert job_output.count("/opt/imgkit system.json\n") == 2, job_output


def test_shell_opens_in_the_container(site):
    args = ("run", *TWO, "--interactive", "--env", "WORD=a  b")
    typed = 'echo "at $(hostname) [$WORD] $GREETING $PWD"; exit 7\n'
    result = site.imgkit(*args, typed=typed)
    assert f"at node1 [a  b] image {site.folder}" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 7


def test_sqsh_runs_on_the_system_in_it(site):
    job_output = site.run_to_end("site.sqsh", "--nodes", "2", "--time", "5m", "--", "dist-hello", *ONE)
    assert "all_reduce of ones: 2" in job_output, job_output


def test_enroot_alone_starts_it(site):
    env = ("NVIDIA_VISIBLE_DEVICES=void", "XDG_CONFIG_HOME=/none")
    enroot = ("exec", "--user", "login", "--", "env", *env, "enroot")
    result = expect_success(site(*enroot, "create", "--name", "mine", site.folder / "site.sqsh"))
    result = expect_success(site(*enroot, "start", "mine", "dist-env"))
    assert "system     slurm" in result.stdout, result.stdout


@pytest.fixture(scope="module")
def foreign(folder, standin):
    """A .sqsh that imgkit did not write, without devices, as `enroot import` leaves them out."""
    image = folder / "foreign.sqsh"
    container = output("docker", "create", standin, "true").strip()
    export = 'docker export "$1" | tar --delete --wildcards -f - \'dev/*\' | mksquashfs - "$2" -tar -quiet'
    quick = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-noappend")
    try:
        output("bash", "-o", "pipefail", "-c", f"{export} {' '.join(quick)}", "bash", container, image)
    finally:
        output("docker", "rm", container)
    return image


def test_sqsh_of_another_program_runs(site, foreign):
    args = (*TWO, "--image", foreign, "--activate", "export ACTIVATED=1", "--require-secret")
    job_output = site.run_to_end(*args, "--", "dist-hello", *ONE)
    assert "all_reduce of ones: 2" in job_output, job_output
