"""The roll call's test of the network, on virtual nodes whose network really loses packets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import ROOT, Cluster

NODE = ROOT / "tests/unit/entrypoints/launch/node.py"
FIRST, SECOND = "10.42.0.11", "10.42.0.12"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("probe")]


@pytest.fixture(scope="module")
def bare():
    """Two nodes without services."""
    cluster = Cluster(state=Path(f"/tmp/imgkit-test-probe-{os.getpid()}"))
    cluster.up(2, "--no-slurm", "--no-ssh")
    yield cluster
    cluster.down()


@pytest.fixture
def nodes(bare):
    yield bare
    for node in ("node1", "node2"):
        assert bare("fault", "heal", node).returncode == 0


def meet(nodes, step_s=0.8):
    """Exit code and output of a launcher on each node, whose command does nothing."""
    options = {"nnodes": 2, "hosts": ["node1", "node2"], "head": FIRST, "step_s": step_s, "interface": "eth0"}
    started = [
        subprocess.Popen(
            nodes.argv(
                "exec", f"node{rank + 1}", "--", sys.executable, NODE,
                json.dumps({**options, "rank": rank, "address": address}), "true",
            ),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, address in enumerate((FIRST, SECOND))
    ]  # fmt: skip
    texts = [process.communicate(timeout=60)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


def test_good_network_starts(nodes):
    assert [code for code, _ in meet(nodes)] == [0, 0]


def test_path_mtu_black_hole_is_refused(nodes):
    assert nodes("fault", "hole", "node2", 1400).returncode == 0
    for code, text in meet(nodes):
        assert code == 5, text
        assert "cannot send 1400 B at once to" in text
        assert "1200 B arrive, 1400 B do not" in text
        assert "ping -c 3 -M do -s 1424 10.42.0.1" in text


@pytest.mark.parametrize(("fault", "reason"), [("block", "no answer within 0.8 s"), ("refuse", "refused")])
def test_firewalled_ports_are_refused(nodes, fault, reason):
    assert nodes("fault", fault, "node2", "32768-60999").returncode == 0
    for code, text in meet(nodes):
        assert code == 5, text
        assert "node 1 of 2 (host0) cannot connect to node 2 of 2 (host1) on port " in text
        assert reason in text
        assert f"sudo ufw allow from {FIRST}" in text


@pytest.mark.soak
def test_lossy_network_is_not_refused(nodes):
    assert nodes("fault", "loss", "node2", 2).returncode == 0
    for _ in range(10):
        assert [code for code, _ in meet(nodes, step_s=3.5)] == [0, 0]
