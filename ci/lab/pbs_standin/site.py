"""The virtual cluster on which the stand-in's jobs run, and the stand-in's folders there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from virtual_cluster.programs import ClusterError
from virtual_cluster.state import LOGIN, Cluster, cluster_argv, read_cluster

COMMAND = Path(__file__).resolve().parent.parent / "pbs-standin"
SUBFOLDERS = ("bin", "spool", "sessions", "jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster that is up, as ``ci/lab/cluster`` made it."""

    state: Path
    """The folder of the cluster."""
    home: Path
    """The home folder of the cluster's user."""
    nodes: tuple[str, ...]
    """All nodes but the login node."""

    @property
    def folder(self) -> Path:
        """Return the folder of the stand-in. The cluster removes it with its own."""
        return self.state / "pbs"

    def is_up(self, node: str) -> bool:
        """Return True if the cluster's keeper takes the node to be alive."""
        return node in _read_cluster(self.state).nodes

    def cluster_argv(self, *args: object) -> list[str]:
        """Return the command line of a command of ``ci/lab/cluster`` on this cluster."""
        return cluster_argv(self.state, *args)


def open_site(state: Path) -> Site:
    """Return the cluster in a folder, after making the stand-in's folders in it."""
    cluster = _read_cluster(state)
    nodes = tuple(name for name in cluster.nodes if name != LOGIN)
    site = Site(state=state, home=state / "home" / cluster.config.user, nodes=nodes)
    for name in SUBFOLDERS:
        (site.folder / name).mkdir(parents=True)
    (site.folder / "sessions").chmod(0o1777)  # tasks of the user write there
    return site


def _read_cluster(state: Path) -> Cluster:
    """Return the description of a cluster."""
    cluster = read_cluster(state)
    if cluster is None:
        raise ClusterError(f"no cluster is up at {state}")
    return cluster
