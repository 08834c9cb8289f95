"""The preflight with real measurements: two launchers in a container, and faults of a virtual cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import PACKAGE, PLACE, Cluster, in_image, slurm_marks

TWO = """
mkdir /run/shared
echo 'import os; print("rank", os.environ["RANK"], "runs", flush=True)' > /program.py
for rank in 0 1; do
  IMGKIT_RUN_DIR=/run/shared python3 -I -m imgkit_entrypoints dist-run --preflight --device cpu --nnodes 2 \\
    --head 127.0.0.1 --port 15555 --node-rank $rank /program.py & nodes="$nodes $!"
done
for node in $nodes; do wait $node || exit; done
cat /run/shared/preflight.json >&3
"""


@pytest.mark.docker
@pytest.mark.quiet
def test_two_nodes_are_measured_and_start(standin):
    result = in_image(standin, "bash", "-c", f"exec 3>&1 >&2\n{TWO}")
    assert result.returncode == 0, result.stderr
    assert "rank 0 runs" in result.stderr
    assert "rank 1 runs" in result.stderr
    report = json.loads(result.stdout)
    assert report["passed"], report
    (link,) = report["links"]
    assert (link["GBps"] or 0) > 0, report
    for node in report["nodes"]:
        assert (node["matmul_TFLOPs"] or 0) > 0, report
        assert not node["left_out"]


@dataclass(frozen=True, kw_only=True)
class Site(Cluster):
    """Four nodes, and the image that they run."""

    sif: Path

    def start(self, *options):
        image = ("singularity", "exec", "--bind", f"{PACKAGE}:{PLACE}:ro", str(self.sif))
        program = ("dist-run", "--device", "cpu", "--preflight", *options, "-m", "platform")
        variables = ("env", f"IMGKIT_RUN_DIR={self.state}/run")
        argv = self.argv("srun", "-N4", f"--chdir={self.state}", *variables, *image, *program)
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self, run):
        """The exit code, the output, and what was measured."""
        output, _ = run.communicate(timeout=240)
        document = json.loads((self.state / "run/preflight.json").read_text())
        assert document["seconds"] < 60, output
        return run.returncode, output, document

    def worst(self, run):
        """The exit code, the output, and the worst outlier."""
        code, output, document = self.end(run)
        outliers = [node for node in document["nodes"] if node["outlier"]]
        return code, output, min(outliers, key=lambda node: node["matmul_TFLOPs"] or 0.0)


@pytest.fixture(scope="module")
def site(mn5_sif):
    cluster = Site(state=Path(f"/tmp/imgkit-preflight-{os.getpid()}"), sif=mn5_sif)
    cluster.up(4)
    (cluster.state / "run").mkdir()
    try:
        yield cluster
    finally:
        cluster.down()


def on_nodes(test):
    """A test on four nodes with two processors: a good node may be named too, but never as the worst."""
    for mark in (*slurm_marks, pytest.mark.soak, pytest.mark.xdist_group("preflight")):
        test = mark(test)
    return test


@on_nodes
def test_slow_wire_is_reported_and_leaves_nobody_out(site):
    site("fault", "rate", "node3", 20_000)
    _, output, document = site.end(site.start())
    site("fault", "heal", "node3")
    (node,) = (node for node in document["nodes"] if node["host"] == "node3")
    assert not node["outlier"], output
    assert any("node3" in link for link in document["slow_links"]), output


@pytest.fixture
def quota():
    """A control group that gets a tenth of one processor."""
    group = Path(f"/sys/fs/cgroup/cpu/imgkit-preflight-{os.getpid()}")
    if not group.parent.is_dir():
        pytest.skip("this machine has no cpu controller of version 1 in /sys/fs/cgroup/cpu")
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("10000")
    (group / "cpu.cfs_period_us").write_text("100000")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


@on_nodes
def test_processor_quota_names_its_node(site, quota):
    moved = site("exec", "node4", "--", "sh", "-c", f"pgrep slurmd > {quota}/cgroup.procs")
    assert moved.returncode == 0, moved.stderr
    code, output, worst = site.worst(site.start())
    assert (code, worst["host"]) == (1, "node4"), output


@on_nodes
def test_stage_that_hangs_takes_its_node_out(site):
    measuring = r"^[^ ]+ -I -m imgkit_entrypoints.apps.preflight"  # not its guard, which names it too
    run = site.start("--nnodes", "3+1")
    while site("exec", "node2", "--", "pkill", "-STOP", "-f", measuring).returncode:
        assert run.poll() is None
        time.sleep(0.1)
    code, output, worst = site.worst(run)
    assert worst["host"] == "node2", output
    assert "hangs" in str(worst["reasons"])
    if worst["left_out"]:  # no other node was slow
        assert code == 0, output
        assert "the run starts without it" in output
        assert output.count("Linux") == 3
