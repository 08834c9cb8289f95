"""The virtual cluster, for real: it comes up with Slurm, runs jobs on two nodes and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from labkit import LAB, SLURMS, Cluster, run

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("cluster")]


def keepers(state):
    """Processes that still name this cluster's folder on their command line."""
    command_lines = []
    for folder in Path("/proc").iterdir():
        try:
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if folder.name.isdigit() and int(folder.name) != os.getpid() and str(state) in argv:
            command_lines.append(" ".join(argv))
    return command_lines


@pytest.fixture(scope="module", params=SLURMS)
def up(request):
    cluster = Cluster(state=Path(f"/tmp/imgkit-test-cluster-{os.getpid()}"))
    cluster.up(2, release=request.param)
    yield cluster
    cluster.down()


def test_job_runs_on_two_nodes(up):
    names = up("srun", "-N2", "hostname").stdout.split()
    assert sorted(names) == ["node1", "node2"]


def test_ordinary_user_gets_gpus(up):
    result = up("--user", "srun", "-N1", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES", "USER")
    assert result.stdout.split() == ["0,1", "researcher"]


def test_nodes_reach_each_other_by_ssh(up):
    assert up("exec", "node1", "--", "ssh", "node2", "hostname").stdout.strip() == "node2"


def test_unknown_node_is_refused(up):
    result = up("exec", "node9", "--", "true")
    assert result.returncode == 1
    assert "node9 is not up" in result.stderr


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (("unshare", "--net"), "mmdebstrap failed for Debian nosuch's slurmctld"),
        (("setpriv", "--reuid", "65534", "--clear-groups"), "not unpacked here; as root: "),
    ],
    ids=["no network", "not root"],
)
def test_release_that_cannot_be_fetched_is_a_reason(start, reason):
    result = run(*start, "/usr/bin/python3", LAB / "cluster", "fetch", "nosuch")
    if "can't open file" in result.stderr:
        pytest.skip("an ordinary user cannot read this checkout")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("cluster: Debian nosuch's slurm is not here: ")
    assert reason in result.stderr.splitlines()[-1]
    assert not list(Path("/var/cache/imgkit-lab").glob("*nosuch*"))


def test_down_leaves_nothing():
    cluster = Cluster(state=Path(f"/tmp/imgkit-test-cluster-down-{os.getpid()}"))
    cluster.up(1, "--no-slurm", "--no-ssh")
    assert keepers(cluster.state)
    assert cluster("down").returncode == 0
    assert not keepers(cluster.state)
    assert not cluster.state.exists()
    assert cluster("exec", "node1", "--", "true").returncode == 1
