"""Jobs of a real Slurm whose containers a real Podman starts, with an image that imgkit did not build."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import IMGKIT, ROOT, Done, SlurmSite, expect_success, output, slurm_marks, until

RECIPE = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: docker, command: podman}, node: {gpus: 0, cpus: 2}}
"""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{data}"
runroot = "{run}"
[storage.options]
additionalimagestores = [{stores}]
"""
# crun refuses machines with both versions of cgroups, and this machine may not let Podman raise limits.
CONTAINERS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=2000:2000"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{tmp}"
runtime = "{runtime}"
"""
LOCAL = "/run/imgkit-podman"
"""What each node has of its own: its containers. The store with the image is shared, and read only."""
COUNT = ("dist-run", "--device", "cpu", "--nproc", "1", "--grace", "10", "save_and_resume.py")

pytestmark = [*slurm_marks, pytest.mark.podman, pytest.mark.soak, pytest.mark.xdist_group("podman-slurm")]


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and two nodes."""

    image: str

    @property
    def podman(self):
        names = {"CONTAINERS_STORAGE_CONF": "storage.conf", "CONTAINERS_CONF": "containers.conf"}
        return {name: str(self.folder / file) for name, file in names.items()}

    def submit(self, *args):
        env = {**self.podman, **{f"XDG_{name}_HOME": str(self.state / name) for name in ("STATE", "CACHE")}}
        job = ("run", "--detach", "site.yaml", "--image", self.image, "--nodes", "2", "--time", "15m", *args)
        result: Done = expect_success(
            self("exec", "login", "--cwd", self.folder, "--", *IMGKIT, *job, env=env)
        )
        return result.stdout.strip()

    def processes(self):
        return [
            row for row in self.ps("args", "node1", "node2") if re.search("imgkit_entry|conmon|podman ", row)
        ]


@pytest.fixture(scope="module")
def site(standin):
    if os.geteuid() != 0 or shutil.which("crun") is None:
        pytest.skip("Podman on virtual nodes needs root and crun: apt-get install crun")
    cluster = Site(
        state=Path(f"/tmp/imgkit-podman-slurm-{os.getpid()}"),
        folder=Path(f"/tmp/imgkit-podman-jobs-{os.getpid()}"),
        image=standin,
    )
    store = cluster.folder / "store"
    cluster.folder.mkdir(mode=0o755)
    try:
        _configure(cluster.folder, data=store, run=cluster.folder / "run", stores="", runtime="runc")
        load = 'docker save "$1" | podman load'
        output("bash", "-o", "pipefail", "-c", load, "bash", standin, env=cluster.podman)
        _configure(
            cluster.folder, data=f"{LOCAL}/data", run=f"{LOCAL}/run", stores=f'"{store}"', runtime="crun"
        )
        (cluster.folder / "site.yaml").write_text(RECIPE)
        shutil.copy(ROOT / "examples/save_and_resume.py", cluster.folder)
        cluster.up(2, release="own")  # 24.11 takes the cgroups mounted below for its own
        for node in ("login", "node1", "node2"):
            assert (
                cluster("exec", node, "--", "mount", "-t", "cgroup2", "none", "/sys/fs/cgroup").returncode
                == 0
            )
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(cluster.folder)


def _configure(folder, *, data, run, stores, runtime):
    (folder / "storage.conf").write_text(STORAGE.format(data=data, run=run, stores=stores))
    (folder / "containers.conf").write_text(CONTAINERS.format(tmp=f"{run}/tmp", runtime=runtime))


def test_job_in_podman_is_stopped_and_resumes(site):
    job = site.submit("--", *COUNT, "60")
    site.until(lambda: "starts at 0" in site.output_of(job), job)
    assert list((site.folder / f"runs/site-{job}").glob(".imgkit-secret*"))
    site("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
    site.until(lambda: "requeued" in site.output_of(job), job)
    saved = re.search(r"state saved at step (\d+)", site.output_of(job))
    assert saved, site.output_of(job)
    site.start_again(job)
    job_output = site.wait_for_end(job)
    assert f"starts at {saved[1]}\n" in job_output
    assert "finished at 60" in job_output, job_output
    assert "no secret is set" not in job_output
    until(lambda: not site.processes(), describe=lambda: str(site.processes()))


def test_edit_reaches_the_next_job_and_no_job_the_stored_code(site):
    source = site.folder / "my code"
    source.mkdir()
    (source / "log").write_text("sent\n")
    (source / "edited").write_text("before\n")
    command = ("--code", "my code", "--", "sh", "-c", 'echo "$SLURM_NODEID" >> log; cat edited; pwd')
    first = site.submit(*command)
    (source / "edited").write_text("after\n")
    second = site.submit(*command)
    for job, edited in ((first, "before"), (second, "after")):
        job_output = site.wait_for_end(job)
        assert job_output.count(f"{edited}\n/workspace\n") == 2, job_output
        log = site.folder / f"runs/site-{job}/workspace/log"
        assert sorted(log.read_text().split()) == ["0", "1", "sent"]
    for stored in site.folder.glob(".imgkit-code/*/workspace/log"):
        assert stored.read_text() == "sent\n"


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_container_ends_with_its_job(site, how):
    job = site.submit("--", *COUNT, "6000")
    site.until(lambda: "starts at 0" in site.output_of(job), job)
    if how == "cancel":
        site("scancel", job)
    else:  # a node agent, in its container
        site("exec", "node2", "--", "pkill", "-KILL", "-f", "imgkit_entrypoints dist-run")
    job_output = site.wait_for_end(job)
    assert "finished" not in job_output
    until(lambda: not site.processes(), describe=lambda: str(site.processes()))


def test_container_stays_in_the_cgroup_that_slurm_ends(site):
    # A cgroup as that of a step with Slurm's proctrack/cgroup, which needs systemd.
    options = "--network=host --ipc=host --cgroups=disabled --pull=never"
    script = f"""
        step=/sys/fs/cgroup/step; mkdir "$step"
        (echo "$BASHPID" > "$step/cgroup.procs"; exec podman run --rm {options} {site.image} sleep 777) &
        until pgrep -x sleep > /dev/null; do sleep 0.1; done
        pgrep -x conmon; pgrep -x sleep; echo are in; cat "$step/cgroup.procs"
        echo 1 > "$step/cgroup.kill"; wait; while pgrep -x sleep; do sleep 0.1; done; rmdir "$step"
    """
    result = expect_success(site("exec", "node1", "--", "bash", "-c", script, env=site.podman))
    pids, within = (set(part.split()) for part in result.stdout.split("are in"))
    assert pids < within


def test_image_that_no_node_has_is_not_pulled(site):
    env = {**site.podman, "XDG_STATE_HOME": str(site.state / "STATE")}
    args = (
        "run",
        "--detach",
        "site.yaml",
        "--image",
        "imgkit.local/none:1",
        "--time",
        "5m",
        "--",
        "dist-hello",
    )
    result = expect_success(site("exec", "login", "--cwd", site.folder, "--", *IMGKIT, *args, env=env))
    assert "imgkit.local/none:1" in site.wait_for_end(result.stdout.strip())
