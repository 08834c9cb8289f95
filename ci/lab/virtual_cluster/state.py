"""What a cluster is, and its folder on disk: the description, the processes, logs and sockets."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtual_cluster.programs import ClusterError, ProcessId

COMMAND = Path(__file__).resolve().parent.parent / "cluster"
PYTHON = (sys.executable, "-I", "-S")
"""Python for `COMMAND`, which tests start thousands of times: without site-packages it starts faster."""

NETWORK = "10.42.0."
LOGIN = "login"
OWNER_MARK = ".virtual-cluster"
"""A file in every folder that `up` has made. No other folder is ever removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """What Slurm believes of the nodes."""

    gpus: int
    cpus: int
    memory_mib: int
    limit_memory: bool
    """Memory is a resource, and jobs that exceed theirs are ended."""
    partitions: tuple[str, ...]
    """The first one is the default."""
    node_timeout_s: int
    """After this time, a silent node counts as down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What `up` was asked for, and what the machine has."""

    state: Path
    """The folder of the cluster."""
    nodes: int
    """The number of compute nodes; there is a login node as well."""
    prefix: str
    user: str
    uid: int
    private: tuple[str, ...] = ()
    """Folders of which every node has an empty one of its own."""
    die_with: int = 0
    """The cluster goes down when the process with this pid ends; 0 for none."""
    release: str = ""
    """The root folder of another Debian release, whose /usr lies over the nodes'."""
    slurm: SlurmConfig | None = None
    """None for a cluster without Slurm."""
    has_ssh: bool = False

    @property
    def compute_nodes(self) -> list[str]:
        """Return the names of the compute nodes: ``node1``, ``node2``."""
        return [f"{self.prefix}{number}" for number in range(1, self.nodes + 1)]

    @property
    def node_names(self) -> list[str]:
        """Return the names of all nodes, the login node first."""
        return [LOGIN, *self.compute_nodes]

    def address(self, node: str) -> str:
        """Return the address of a node: ``10.42.0.1`` is the login node, ``10.42.0.11`` is node1."""
        number = 1 if node == LOGIN else 10 + int(node.removeprefix(self.prefix))
        return f"{NETWORK}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster as its keeper has last written it to disk."""

    config: ClusterConfig
    keeper: ProcessId
    nodes: Mapping[str, ProcessId]
    """The first process of each node that is up."""

    def first_process(self, node: str) -> ProcessId:
        """Return the first process of a node."""
        if node not in self.nodes:
            raise ClusterError(f"{node} is not up")
        return self.nodes[node]


def write_cluster(cluster: Cluster) -> None:
    """Write the description; a reader sees the old or the new one as a whole."""
    data = {
        "keeper": cluster.keeper._asdict(),
        "nodes": {name: process._asdict() for name, process in cluster.nodes.items()},
        "config": dataclasses.asdict(cluster.config),
    }
    file = _description(cluster.config.state)
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps(data, indent=1, default=str))
    scratch.rename(file)


def read_cluster(state: Path) -> Cluster | None:
    """Return the description of a cluster, which may be down; None if the folder has none."""
    try:
        data = json.loads(_description(state).read_text())
    except (OSError, ValueError):
        return None
    return Cluster(
        config=_parse_config(data["config"]),
        keeper=ProcessId(**data["keeper"]),
        nodes={name: ProcessId(**process) for name, process in data["nodes"].items()},
    )


def find_cluster(state: Path) -> Cluster | None:
    """Return the cluster of a folder if its keeper lives; else None."""
    cluster = read_cluster(state)
    if cluster is None or not cluster.keeper.is_alive():
        return None
    return cluster


def require_cluster(state: Path) -> Cluster:
    """Return the cluster of a folder, which must be up."""
    cluster = find_cluster(state)
    if cluster is None:
        raise ClusterError(f"no cluster is up at {state}")
    return cluster


def make_folder(state: Path) -> None:
    """Make the folder of a cluster. There must be none of this name."""
    state.mkdir(mode=0o755)
    (state / OWNER_MARK).touch()


def remove_folder(state: Path) -> None:
    """Remove the folder of a cluster, and no folder that `up` has not made."""
    if (state / OWNER_MARK).exists():
        shutil.rmtree(state, ignore_errors=True)


def cluster_argv(state: Path, *args: object) -> list[str]:
    """Return the command line of ``ci/lab/cluster`` for the cluster of a folder."""
    return [*PYTHON, str(COMMAND), "--state", str(state), *map(str, args)]


def _description(state: Path) -> Path:
    return state / "cluster.json"


def _parse_config(data: Mapping[str, Any]) -> ClusterConfig:
    """Return a configuration that was read from JSON, where tuples are lists."""
    slurm = data["slurm"]
    if slurm is not None:
        slurm = SlurmConfig(**{**slurm, "partitions": tuple(slurm["partitions"])})
    values = {**data, "state": Path(data["state"]), "private": tuple(data["private"]), "slurm": slurm}
    return ClusterConfig(**values)
