"""What ``imgkit run`` prints about a job that waits, with a real Slurm of one node."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import IMGKIT, SLURMS, SlurmSite, expect_success, until

RECIPE = """\
image: {base: "example.org/base:1"}
system:
  scheduler: slurm
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 0, cpus: 2}
"""
HOPELESS = "; the job will not start: imgkit cancel {id}, and submit it with "

pytestmark = [pytest.mark.cluster, pytest.mark.slurm, pytest.mark.xdist_group("waiting")]


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and a node that other work fills."""

    full: str
    """The job that fills the node."""
    failed: str
    """A job that has failed."""

    def imgkit(self, *args):
        """Run imgkit on the login node."""
        return self(*self._on_login(*args), env=self._env())

    @contextlib.contextmanager
    def follow(self, *options):
        """Start ``imgkit run``, and yield the job's id; the job and its follower end with the block."""
        argv = self._on_login("run", "./own.yaml", "--time", "10m", *options, "--", "true")
        file = self.folder / "messages"
        with file.open("wb") as messages:
            started = subprocess.Popen(self.argv(*argv), stderr=messages, env={**os.environ, **self._env()})
        try:
            until(lambda: re.search(r"job \d+;", self.messages()), describe=self.messages)
            yield re.findall(r"job (\d+);", self.messages())[0]
        finally:
            self("scancel", "--state=PENDING")
            assert started.wait() == 1, self.messages()

    def messages(self):
        """Return what ``imgkit run`` has printed so far."""
        return (self.folder / "messages").read_text()

    def _on_login(self, *args):
        return ("exec", "login", "--cwd", self.folder, "--", *IMGKIT, *args)

    def _env(self):
        return {"XDG_STATE_HOME": str(self.folder / "state")}


@pytest.fixture(scope="module", params=SLURMS)
def site(request):
    folder = Path(f"/tmp/imgkit-waiting-{os.getpid()}")
    cluster = SlurmSite(state=Path(f"{folder}-cluster"), folder=folder)
    folder.mkdir()
    (folder / "own.yaml").write_text(RECIPE)
    (folder / "own.sif").mkdir()  # a sandbox: imgkit does not look inside
    try:
        cluster.up(1, release=request.param)
        expect_success(cluster("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=1"))
        batch = ("sbatch", "--parsable", f"--chdir={folder}", "--time=30", "--exclusive")
        failed = expect_success(cluster(*batch, "--wrap=exit 1")).stdout.strip()
        cluster.wait_for_end(failed)
        full = expect_success(cluster(*batch, "--wrap=sleep 1000")).stdout.strip()
        yield Site(state=cluster.state, folder=folder, full=full, failed=failed)
    finally:
        cluster.down()
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-q", "short"), f"PartitionTimeLimit{HOPELESS}a shorter --time or another --queue"),
        (
            ("--option=--dependency=afterok:{failed}",),
            f"DependencyNeverSatisfied{HOPELESS}another --option=--dependency=...",
        ),
        (("--option=--hold",), "JobHeldUser; scontrol release {id} lets it start"),
        ((), "Resources; expected start TIME"),
    ],
)
def test_run_says_what_is_waited_for(site, options, reason):
    with site.follow(*(option.format(failed=site.failed) for option in options)) as job:
        line = re.escape(f"imgkit: waiting: {reason.format(id=job)}\n").replace("TIME", r"[0-9T:-]{16}")
        until(lambda: re.search(line, site.messages()), describe=site.messages)
        status = expect_success(site.imgkit("status", job)).stdout
        assert re.search(line.removeprefix("imgkit:\\ "), status), status
        expect_success(site.imgkit("cancel", job))
        assert re.search(rf"^{job} .* cancelled ", site.imgkit("runs").stdout, re.MULTILINE)
    assert f"imgkit: {job} was cancelled" in site.messages()
    lines = site.messages().splitlines()
    assert len(lines) == len(set(lines)), site.messages()
