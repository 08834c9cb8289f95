"""The virtual cluster, for real: it comes up with Slurm, runs jobs on two nodes and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[3] / "ci/lab/cluster"

pytestmark = pytest.mark.cluster


def cluster(
    state: Path, *words: str | int, timeout_s: float = 90, check: bool = True
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(CLUSTER), "--state", str(state), *map(str, words)]
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=check
    )


def keepers(state: Path) -> list[str]:
    """Processes that still name this cluster's folder on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if folder.name.isdigit() and int(folder.name) != os.getpid() and str(state) in words:
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def up() -> Iterator[Path]:
    # Not under pytest's base folder: that is closed (mode 0700) to the cluster's ordinary user.
    state = Path(f"/tmp/imgkit-test-cluster-{os.getpid()}")
    cluster(state, "up", 2, "--die-with", os.getpid())
    yield state
    cluster(state, "down", check=False)


def test_job_runs_on_two_nodes(up: Path) -> None:
    names = cluster(up, "srun", "-N2", "hostname").stdout.split()
    assert sorted(names) == ["node1", "node2"]


def test_ordinary_user_gets_gpus(up: Path) -> None:
    done = cluster(up, "--user", "srun", "-N1", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES", "USER")
    assert done.stdout.split() == ["0,1", "researcher"]


def test_nodes_reach_each_other_by_ssh(up: Path) -> None:
    assert cluster(up, "exec", "node1", "--", "ssh", "node2", "hostname").stdout.strip() == "node2"


def test_unknown_node_is_refused(up: Path) -> None:
    done = cluster(up, "exec", "node9", "--", "true", check=False)
    assert done.returncode == 1
    assert "node9 is not up" in done.stderr


def test_down_leaves_nothing(tmp_path: Path) -> None:
    state = Path(f"/tmp/imgkit-test-cluster-down-{os.getpid()}")
    cluster(state, "up", 1, "--no-slurm", "--no-ssh")
    assert keepers(state)
    cluster(state, "down")
    assert not keepers(state)
    assert not state.exists()
    assert cluster(state, "exec", "node1", "--", "true", check=False).returncode == 1
