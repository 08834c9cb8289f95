"""The virtual cluster of the lab: what can be told without root of its command line, files and faults."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_cluster import command
from virtual_cluster.execution import shell_status
from virtual_cluster.faults import is_victim
from virtual_cluster.lifecycle import bring_up, parse_node_states
from virtual_cluster.node import format_hosts
from virtual_cluster.programs import ClusterError, identify
from virtual_cluster.shared_files import format_gres_conf, format_slurm_conf
from virtual_cluster.state import (
    Cluster,
    ClusterConfig,
    SlurmConfig,
    find_cluster,
    read_cluster,
    write_cluster,
)
from virtual_cluster.wire import DelayQueue

SLURM = SlurmConfig(
    gpus=2, cpus=16, memory_mib=64000, limit_memory=False, partitions=("batch", "debug"), node_timeout_s=10
)
CONFIG = ClusterConfig(
    state=Path("/state"), nodes=2, prefix="node", user="me", uid=20777, private=("/tmp",), slurm=SLURM
)


@pytest.mark.parametrize(
    ("line", "args", "node_command"),
    [
        ("exec node1 -- sh -c up", "exec node1", "sh -c up"),
        ("--user srun -N2 hostname", "exec --user login", "srun -N2 hostname"),
        ("--state /s sbatch a -- b", "--state /s exec login", "sbatch a -- b"),
        ("fault kill node1 srun", "fault kill node1 srun", ""),
    ],
)
def test_command_of_a_node_is_split_off(line, args, node_command):
    assert command.split_command(line.split()) == (args.split(), node_command.split())


def test_command_is_required(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["exec", "node1"])
    assert stopped.value.code == 2
    assert "no command: cluster exec NODE -- CMD" in capsys.readouterr().err


def test_cluster_is_found_while_its_keeper_lives(tmp_path):
    keeper = identify(os.getpid())
    cluster = Cluster(config=replace(CONFIG, state=tmp_path), keeper=keeper, nodes={"node1": keeper})
    write_cluster(cluster)
    assert find_cluster(tmp_path) == cluster
    # The pid has another process now.
    write_cluster(replace(cluster, keeper=keeper._replace(start_ticks=keeper.start_ticks + 1)))
    assert find_cluster(tmp_path) is None
    assert read_cluster(tmp_path) is not None


def test_nodes_have_names_and_addresses():
    assert format_hosts(CONFIG).splitlines()[2:] == [
        "10.42.0.1 login",
        "10.42.0.11 node1",
        "10.42.0.12 node2",
    ]


def test_slurm_gets_the_nodes_as_ranges():
    lines = format_slurm_conf(CONFIG, SLURM).splitlines()
    assert "NodeName=node[1-2] NodeAddr=10.42.0.[11-12] Sockets=1 CoresPerSocket=16" in lines[-3]
    assert "RealMemory=64000 Gres=gpu:2 State=UNKNOWN" in lines[-3]
    assert "PartitionName=debug Nodes=ALL Default=NO" in lines[-1]
    assert format_gres_conf(Path("/state"), 2).endswith("File=/state/gpu/nvidia[0-1]\n")


def test_single_node_without_gpus_limits_memory():
    slurm = replace(SLURM, gpus=0, limit_memory=True)
    text = format_slurm_conf(replace(CONFIG, nodes=1), slurm)
    assert "NodeName=node1 NodeAddr=10.42.0.11 " in text
    assert "JobAcctGatherParams=OverMemoryKill" in text
    assert "gpu" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [({"nodes": 65}, "1 to 64 nodes"), ({"private": ("/",)}, "or the state directory lies in it")],
)
def test_impossible_cluster_is_refused(change, message, tmp_path):
    with pytest.raises(ClusterError, match=message):
        bring_up(replace(CONFIG, **{"state": tmp_path / "state", **change}))  # type: ignore[arg-type]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("argv", "text", "killed"),
    [
        ("python3\0train.py\0", "", True),
        ("/usr/sbin/sshd\0-D\0", "", False),
        ("sshd: me@notty\0", "", False),
        ("/usr/sbin/sshd\0-D\0", "sshd -D", True),
        ("python3\0train.py\0", "sshd", False),
    ],
)
def test_daemons_are_killed_by_name_alone(argv, text, killed):
    assert is_victim(argv, text) == killed


def test_wire_holds_frames_in_order():
    queue = DelayQueue(0.25)
    assert queue.seconds_to_next(0.0) == 1.0
    queue.put(1.0, to_switch=True, frame=b"first")
    queue.put(1.125, to_switch=False, frame=b"second")
    assert list(queue.take_due(1.125)) == []
    assert queue.seconds_to_next(1.125) == 0.125
    assert list(queue.take_due(1.25)) == [(True, b"first")]
    assert list(queue.take_due(2.0)) == [(False, b"second")]


def test_states_and_exit_codes_are_read():
    assert parse_node_states("node1 idle\nnode1 idle\nnode2 alloc\nslurm_load_node: error x\n") == {
        "node1": "idle",
        "node2": "alloc",
    }
    assert [shell_status(code) for code in (0, 3, -9)] == [0, 3, 137]
