"""``imgkit scaling`` on a real Slurm of three nodes, with a program of known parallel efficiency."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from labkit import IMGKIT, SLURMS, Cluster, expect_success, slurm_marks

pytestmark = [*slurm_marks, pytest.mark.xdist_group("submit")]
SITE = ("mn5", "-A", "bsc98", "--qos", "acc_debug", "--time", "10m")
PARALLEL_S, SERIAL_S = 1.0, 0.15
"""Seconds of a step that all nodes share, and that each of them takes."""
PROGRAM = f"""\
import json, os, sys, time
ranks = int(os.environ["WORLD_SIZE"])
if ranks in map(int, sys.argv[1:]):
    sys.exit(3)
for step in range(1, 9):
    start_s = time.monotonic()
    time.sleep({PARALLEL_S} / ranks + {SERIAL_S})
    line = {{"step": step, "samples_per_s": 64 / (time.monotonic() - start_s), "gpu_percent": 50}}
    if os.environ["RANK"] == "0":
        with open(os.environ["IMGKIT_RUN_DIR"] + "/metrics.jsonl", "a") as file:
            print(json.dumps(line), file=file)
"""


class Login(Cluster):
    """The login node of three nodes, in the folder of the jobs."""

    def scaling(self, folder, *args):
        env = {"XDG_STATE_HOME": str(folder / "state"), "BASH_FUNC_module%%": "() { :; }"}
        argv = ("scaling", *SITE, "--nodes", *args)
        return self("exec", "login", "--cwd", folder, "--", *IMGKIT, *argv, env=env, timeout_s=400)


@pytest.fixture(scope="module", params=SLURMS)
def login(mn5_sif, request):
    cluster, folder = (
        Login(state=Path(f"/tmp/imgkit-scaling-{os.getpid()}")),
        Path(f"/tmp/scaling {os.getpid()}"),
    )
    (folder / "state").mkdir(parents=True)
    (folder / "mn5.sif").symlink_to(mn5_sif)
    (folder / "steps.py").write_text(PROGRAM)
    try:
        cluster.up(3, "--cpus", "80", release=request.param)
        yield cluster, folder
    finally:
        cluster.down()
        shutil.rmtree(folder)


def test_efficiency_is_that_of_the_program(login):
    cluster, folder = login
    command = ("dist-run", "--device", "cpu", "--nproc", "1", "steps.py")
    result = expect_success(cluster.scaling(folder, "1,2,3", "--json", "--", *command))
    report = json.loads(result.stdout)
    for size in report["sizes"]:
        nodes = size["nodes"]
        expected = (PARALLEL_S + SERIAL_S) / (PARALLEL_S + nodes * SERIAL_S)
        assert abs(size["figures"]["efficiency"] - expected) < 0.02, report
        assert size["figures"]["ranks"] == nodes
        # The node agents start and end within the time of the job.
        assert size["figures"]["wall_s"] > 8 * (PARALLEL_S / nodes + SERIAL_S)
    assert report["compared_by"] == "samples_per_s"
    page = (folder / report["folder"] / "scaling.md").read_text()
    assert page.count("\n| ") == 5
    assert "#SBATCH --nodes=3" in page
    assert "at least 75% on up to 3 nodes" in page
    assert report["facts"]["image digest"].startswith("sha256:")


def test_table_of_dist_bench_has_its_bandwidths(login):
    cluster, folder = login
    command = ("dist-bench", "--device", "cpu", "--nproc", "2", "--max", "64K", "--iters", "5")
    result = expect_success(cluster.scaling(folder, "1,2", "--json", "--", *command))
    report = json.loads(result.stdout)
    for size in report["sizes"]:
        figures, ranks = size["figures"], 2 * size["nodes"]
        assert (figures["ranks"], figures["all_reduce size_bytes"]) == (ranks, 65536)
        factor = figures["all_reduce busbw_GBps"] / figures["all_reduce algbw_GBps"]
        assert factor == pytest.approx(2 * (ranks - 1) / ranks)
        assert "efficiency" not in figures
    assert "all_reduce busbw (GB/s)" in (folder / report["folder"] / "scaling.md").read_text()


@pytest.mark.soak
def test_failed_size_is_shown_and_others_are_compared(login):
    cluster, folder = login
    command = ("dist-run", "--device", "cpu", "--nproc", "1", "steps.py", "2")
    started = expect_success(cluster.scaling(folder, "1,2", "--detach", "--", *command))
    name = started.stdout.strip()
    env = {"XDG_STATE_HOME": str(folder / "state")}
    result = cluster("exec", "login", "--cwd", folder, "--", *IMGKIT, "scaling", "--continue", name, env=env)
    assert result.returncode == 1, result.stderr
    first, two = result.stdout.splitlines()[1:3]
    assert first.split()[-1] == "succeeded"
    assert "100.0%" in first
    assert two.split()[-1] == "failed"
    assert "%" not in two
    assert "2 nodes: failed" in result.stdout


@pytest.mark.parametrize("limit", ["UNLIMITED", "2"])
def test_size_beyond_the_partition_is_refused_before_a_job(login, limit):
    cluster, folder = login
    nodes = "3" if limit == "2" else "4"
    reports = set(folder.glob("*-scaling-*"))
    assert cluster("scontrol", "update", "PartitionName=batch", f"MaxNodes={limit}").returncode == 0
    try:
        result = cluster.scaling(folder, f"1,{nodes}", "--", "dist-hello", "--device", "cpu")
    finally:
        cluster("scontrol", "update", "PartitionName=batch", "MaxNodes=UNLIMITED")
    assert result.returncode == 2, result.stderr
    assert f"no job starts on {nodes} nodes" in result.stderr
    assert "node configuration is not available" in result.stderr
    assert cluster("squeue", "--noheader").stdout == ""
    assert set(folder.glob("*-scaling-*")) == reports
