"""Jobs on the OpenPBS that this machine has, on two nodes of the virtual cluster, and what breaks them.

No script of the project builds OpenPBS; ``ci/check`` takes ``ci/lab/pbs-standin`` in its place.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import Cluster, cluster_marks, expect_success, until

SERVER = shutil.which("pbs_server", path=f"{os.environ['PATH']}:/usr/sbin:/opt/pbs/sbin:/usr/local/sbin")
PREFIX = Path(SERVER or "/opt/pbs/sbin/pbs_server").resolve().parents[1]
RECIPE = """
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system:
  scheduler: pbs
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 4, cpus: 2}
  queue: {options: [-l, place=scatter]}
"""
# Its database is PostgreSQL of the user postgres, whose socket is in /run/postgresql. A mom that starts again
# removes what it finds of jobs in its temporary folder, and the virtual nodes share /var/tmp.
START = """
home=/run/pbs server=0 mom=1
if [ "$(hostname)" = login ]; then server=1 mom=0; fi
cat >/etc/pbs.conf <<END
PBS_SERVER=login
PBS_START_SERVER=$server
PBS_START_SCHED=$server
PBS_START_COMM=$server
PBS_START_MOM=$mom
PBS_EXEC=$1
PBS_HOME=$home
PBS_SCP=/usr/bin/scp
END
mkdir -p $home /run/postgresql
chown postgres /run/postgresql
"$1/libexec/pbs_habitat" &&
printf '$usecp *:/ /\\n$tmpdir /run/local\\n' >>$home/mom_priv/config && "$1/libexec/pbs_init.d" start
"""
SETTINGS = (
    *(f"create node node{number} resources_available.ncpus=8" for number in (1, 2)),
    *("set server job_history_enable=True", "set server flatuid=True", "set server scheduler_iteration=5"),
)
WAITS = """
import os, time
print("waits", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
"""

pytestmark = [
    *cluster_marks,
    pytest.mark.soak,
    pytest.mark.xdist_group("openpbs"),
    pytest.mark.skipif(
        SERVER is None, reason="pbs_server is not installed, and no script here builds OpenPBS"
    ),
]


@dataclass(frozen=True, kw_only=True)
class OpenPbs(Cluster):
    """Two nodes with a mom each, and the server on the login node."""

    sif: Path
    program: Path
    """imgkit for the ordinary user, who cannot enter every checkout."""

    @property
    def work(self):
        return self.state / "work"

    def run(self, *args):
        """A command of the ordinary user on the login node."""
        path = ("env", f"PATH={PREFIX}/bin:{os.environ['PATH']}")
        return self("exec", "--user", "login", "--cwd", self.work, "--", *path, *args)

    def imgkit(self, *args):
        return self.run(self.program, *args)

    def submit(self, *command, start="pbsdsh", time="5m"):
        options = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--time", time, "--pbs-start", start)
        result = expect_success(
            self.imgkit(
                "run", "--detach", self.work / "site.yaml", *options, "--image", self.sif, "--", *command
            )
        )
        return result.stdout.strip()

    def record_of(self, job):
        return self.run("qstat", "-x", "-f", job).stdout

    def end(self, job):
        """Exit status and output of a job, when it has ended."""
        until(lambda: "job_state = F" in self.record_of(job), describe=lambda: self.record_of(job))
        (code,) = re.findall(r"Exit_status = (-?\d+)", self.record_of(job))
        files = self.work.glob(f"*.[oe]{job.partition('.')[0]}")
        return int(code), "".join(file.read_text() for file in sorted(files))

    def waiting(self, start):
        """A job whose two workers wait for the file ``go``."""
        (self.work / "go").unlink(missing_ok=True)
        (self.work / "waits.py").write_text(WAITS)
        job = self.submit("dist-run", "--grace", "2", "waits.py", start=start)
        until(lambda: len(self.workers()) >= 2 or "job_state = F" in self.record_of(job))
        assert "job_state = R" in self.record_of(job), self.end(job)
        return job

    def workers(self):
        return [line for line in self.processes() if line.endswith("waits.py") and "dist-run" not in line]

    def processes(self):
        """Processes of the jobs' user, on both nodes."""
        lines = self.ps("user:16,args", "node1", "node2")
        return [line for line in lines if line.startswith("researcher ")]

    def emptied(self):
        until(lambda: not self.processes(), describe=lambda: "\n".join(self.processes()))


@pytest.fixture(scope="module")
def pbs(mn5_sif, public_imgkit):
    cluster = OpenPbs(state=Path(f"/tmp/imgkit-openpbs-{os.getpid()}"), sif=mn5_sif, program=public_imgkit)
    cluster.up(2, "--no-slurm")
    try:
        cluster.work.mkdir()
        cluster.work.chmod(0o1777)
        (cluster.work / "site.yaml").write_text(RECIPE)
        for node in ("login", "node1", "node2"):
            expect_success(cluster("exec", node, "--", "sh", "-c", START, "sh", PREFIX))
        for setting in SETTINGS:
            expect_success(cluster("exec", "login", "--", PREFIX / "bin/qmgr", "-c", setting))
        profile = cluster.state / "home/researcher/.profile"
        profile.write_text(f"PATH={PREFIX}/bin:{os.environ['PATH']}\n")
        yield cluster
    finally:
        cluster.down()


@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
def test_every_start_connects_all_ranks(pbs, start):
    job = pbs.submit("dist-hello", start=start)
    code, output = pbs.end(job)
    assert "all_reduce of ones: 2" in output, output
    assert re.findall(r": +(\d)  (node\d)  cpu", output) == [("0", "node1"), ("1", "node2")]
    assert code == 0
    status = pbs.run("qstat", job)
    assert status.returncode == 35
    assert "Job has finished, use -x" in status.stderr
    assert "completed" in pbs.imgkit("status", job).stdout
    pbs.emptied()


@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
def test_cancelled_job_leaves_no_process(pbs, start):
    job = pbs.waiting(start)
    assert pbs.imgkit("cancel", job).returncode == 0
    assert pbs.end(job)[0] == 271  # 256 and SIGTERM
    pbs.emptied()


def test_walltime_ends_a_job(pbs):
    job = pbs.submit("sleep", "600", time="1m")
    assert pbs.run("qalter", "-l", "walltime=00:00:10", job).returncode == 0
    assert pbs.end(job)[0] in (-29, 271)
    pbs.emptied()


@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
def test_killed_launcher_ends_the_job(pbs, start):
    job = pbs.waiting(start)
    expect_success(pbs("exec", "node2", "--", "pkill", "-KILL", "-f", "imgkit_entrypoints dist-run"))
    code, output = pbs.end(job)
    assert code not in (0, 271), output
    assert "Traceback" not in output
    pbs.emptied()


def test_killed_mom_ends_a_job_only_when_it_starts_again(pbs):
    job = pbs.waiting("pbsdsh")
    assert pbs("exec", "node2", "--", "pkill", "-KILL", "-x", "pbs_mom").returncode == 0
    assert "job_state = R" in pbs.record_of(job)
    assert len(pbs.workers()) >= 2
    expect_success(pbs("exec", "node2", "--", PREFIX / "libexec/pbs_init.d", "start"))
    code, output = pbs.end(job)  # "requested job die"
    assert code == 271, output


def test_job_ends_when_a_host_is_cut_off(pbs):
    job = pbs.waiting("pbsdsh")
    try:
        pbs("fault", "cut", "node2")
        code, output = pbs.end(job)
        assert code not in (0, 271), output
        assert "lost node 2 of 2 (node2)" in output, output
        assert "Traceback" not in output
    finally:
        pbs("fault", "heal", "node2")
    pbs.emptied()
