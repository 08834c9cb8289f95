"""``imgkit run --on`` over a real sshd to a STAND-IN for PBS (``ci/lab/pbs-standin``), as a plain user."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from labkit import Cluster, cluster_marks, expect_success, pbs_standin, run, split_line, until
from remotekit import FarSite, far_host, far_marks

BASE = "imgkit.local/standin:24.03-notorch"
RECIPE = f"""\
image:
  base: {BASE}
  platform: amd64
system:
  title: the virtual PBS
  scheduler: pbs
  runtime: {{kind: singularity, command: singularity}}
  node: {{gpus: 0, cpus: 2}}
  queue: {{options: [-l, place=scatter]}}
"""

pytestmark = [*cluster_marks, *far_marks, pytest.mark.soak, pytest.mark.xdist_group("far-pbs")]


class Site(FarSite):
    """A person's folder here, and a login node of PBS."""

    def run(self, *args):
        line = f"run --on far --base {BASE} --time 5m --pbs-start pbsdsh"
        return self.imgkit(line, *split_line(*args))


@pytest.fixture(scope="module")
def site(standin_notorch):
    folder, name = Path(f"/tmp/imgkit-qsub-{os.getpid()}"), f"qsub{os.getpid()}"
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        folder.chmod(0o711)
        cluster.up(2, "--no-slurm")
        try:
            with pbs_standin(cluster):
                store = cluster.state / "home/researcher/my store"
                site = Site(far=far, cluster=cluster, folder=folder / "here", store=store)
                site.add_remote(RECIPE, name, "researcher")
                yield site
                far.disconnect()
        finally:
            cluster.down()
            run("docker", "rmi", "--force", f"{name}:latest")


def test_pbs_job_is_followed_to_its_end_and_fetched(site):
    make = 'echo "$(hostname) has [$1]"; cd "$IMGKIT_RUN_DIR" && echo 1 > "of $(hostname)"'
    result = expect_success(site.run("--nodes 2 -- sh -c", make, "x", "a  b'c"))
    assert {"node1 has [a  b'c]", "node2 has [a  b'c]"} <= set(result.stdout.splitlines())
    match = re.search(r"job (\d+\.standin@far);", result.stderr)
    assert match, result.stderr
    expect_success(site.imgkit("fetch", match[1]))
    (folder,) = site.folder.glob("runs/*.standin")
    names = {path.name for path in folder.iterdir()}
    assert {"of node1", "of node2"} <= names
    assert any(".o" in name for name in names)
    assert site.imgkit("logs", match[1]).stdout == result.stdout
    assert (site.store / "jobs" / match[1].partition("@")[0]).read_text().startswith("pbs\n")


def test_pbs_job_is_seen_kept_and_cancelled(site):
    result = expect_success(site.run("--detach -- sleep 500"))
    job = result.stdout.strip()
    status = expect_success(site.imgkit("status", job))
    assert " R\n" in status.stdout
    for path in (*(site.store / "images").iterdir(), *(site.store / "jobs").iterdir()):
        os.utime(path, (1e9, 1e9))
    assert "nothing is unused" in site.imgkit("remote gc far").stdout
    assert site.imgkit("cancel", job).returncode == 0
    until(lambda: f"{job} was cancelled" in site.imgkit("status", job).stdout)
    assert site.imgkit("logs", job).returncode == 1


def test_task_of_an_array_is_followed_and_fetched(site):
    make = 'echo "task $PBS_ARRAY_INDEX"; echo "$PBS_ARRAY_INDEX" > "$IMGKIT_RUN_DIR/index"'
    result = expect_success(site.run("--option=-J --option=0-1 -- sh -c", make))
    array = result.stdout.strip()
    number = array.partition("[")[0]
    assert array == f"{number}[].standin@far"
    assert array in site.imgkit("status").stdout
    followed = site.imgkit("logs", f"{number}[1]@far")
    assert (followed.returncode, "task 1\n" in followed.stdout) == (0, True), followed.stderr
    expect_success(site.imgkit("fetch", f"{number}[1]"))
    (folder,) = (path for path in (site.folder / "runs").iterdir() if f"-{number}[1].standin" in path.name)
    assert (folder / "index").read_text() == "1\n"
    assert f"{array} completed" in site.imgkit("status", array).stdout


def test_doctor_names_qsub(site):
    result = site.imgkit("doctor --on far")
    assert re.search(r"scheduler +pbs", result.stdout), result.stdout


def test_failed_pbs_job_fails_the_command(site):
    result = site.run("-- sh -c", "echo told; exit 3")
    assert "told" in result.stdout.splitlines()
    assert re.search(
        r"\d\.standin@far failed with exit code 3; imgkit resume .*; imgkit fetch", result.stderr
    )
    assert result.returncode == 1
