"""Facts about the machine of a run: the node of every rank, the free memory, and versions of software."""

from __future__ import annotations

import collections
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints import __version__, fabric, facts
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.facts import Reader, root_of

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNode:
    """The node of one rank."""

    number: str
    """The number that torchrun gives to the node; empty if torchrun was not used."""
    host: str


def gather_nodes(ranks: Ranks) -> tuple[RankNode, ...]:
    """Return the node of every rank, in the order of the ranks. All ranks must call this function."""
    node = RankNode(number=os.environ.get("GROUP_RANK", ""), host=platform.node())
    return tuple(ranks.gather(node))


def node_names(rank_nodes: Sequence[RankNode]) -> tuple[str, ...]:
    """Return the name of the node on which each rank runs, in the order of the ranks.

    The name is the host name. If several nodes have the same host name, their number is added: ``as01 (node
    1)``.
    """
    nodes = list(dict.fromkeys(rank_nodes))
    nodes_of_host = collections.Counter(node.host for node in nodes)
    names = {}
    for node_index, node in enumerate(nodes):
        names[node] = node.host
        if nodes_of_host[node.host] > 1:
            names[node] += f" (node {node_index})"
    return tuple(names[node] for node in rank_nodes)


def ranks_per_node(names: Sequence[str]) -> int:
    """Return the number of ranks on each node, which must be the same on all nodes.

    Parameters
    ----------
    names : name of each rank's node, from `node_names`.

    Raises
    ------
    UsageError : the nodes have different numbers of ranks, so there is no common line rate per rank.
    """
    counts = collections.Counter(names)
    first, count = next(iter(counts.items()))
    for name, ranks in counts.items():
        if ranks != count:
            raise UsageError(
                f"the nodes have different numbers of ranks: {count} on {first}, {ranks} on {name}",
                where="--nproc",
                hint=f"--nproc {min(counts.values())} starts the same number on each node",
            )
    return count


# Share of the free memory that buffers of the default sizes may use. Libraries need the rest for their
# buffers.
DEFAULT_SHARE = 0.5
# Share of the free memory for the copies of buffers that batches use in turn.
ROTATED_SHARE = 0.1
# Largest share of the free memory. Larger sizes are refused, because the kernel would kill the process
# silently.
MAX_SHARE = 0.9


def free_node_bytes(reader: Reader) -> int | None:
    """Return the memory in bytes that processes on this node can still use, or None if it is unknown.

    The job may be in a cgroup (a group of processes) with its own limit of memory. The lower of the node's
    free memory and the cgroup's free memory counts.
    """
    free_bytes = []
    for line in (reader.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            free_bytes.append(int(rest.split()[0]) * 1024)  # "MemAvailable:  527902004 kB"
    # The job's cgroup may allow less than the node has. Without a limit, the file contains "max", which is no
    # number.
    limit = reader.number("/sys/fs/cgroup/memory.max")
    used = reader.number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free_bytes.append(max(0, limit - used))
    return min(free_bytes, default=None)


def free_memory_bytes(ranks: Ranks, ranks_on_node: int) -> int | None:
    """Return the memory in bytes that one rank may use, or None if it is unknown.

    With a GPU, this is the free memory of the GPU. Otherwise, it is an equal share of the node's free memory.
    """
    import torch

    if ranks.device.type == "cuda":
        free_bytes: int
        free_bytes, _ = torch.cuda.mem_get_info(ranks.device)
        return free_bytes
    node_bytes = free_node_bytes(Reader(root=root_of(os.environ)))
    if node_bytes is None:
        return None
    return node_bytes // ranks_on_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts about this node that are saved with the results of a benchmark."""

    fingerprint: Mapping[str, str]
    """Versions and names of hardware and software. The environment is left out, as it may have secrets."""
    line_rate_Gbps: float | None = None


def read_machine(
    env: Mapping[str, str], nodes: int, ranks_on_node: int, software: Mapping[str, str]
) -> Machine:
    """Read the facts about this node. If they cannot be read, return only the versions of software.

    Parameters
    ----------
    env : the environment of this process.
    nodes : number of nodes of the run.
    ranks_on_node : number of ranks on each node.
    software : versions of torch and its libraries, by name.
    """
    versions = {"imgkit": __version__, **software}
    try:
        host = facts.gather(env=env)
        system = facts.system_facts(env=env)
        network = fabric.choose_fabric(host, system, env, nnodes=nodes, head=env.get("MASTER_ADDR", ""))
    except ImgkitError:
        # A measurement does not need these facts, so a wrong variable or file must not end it.
        return Machine(fingerprint=versions)
    models = {gpu.model for gpu in host.gpu_devices}
    image = ""
    if system is not None:
        image = system.title or system.scheduler
    values = {
        **versions,
        "driver": host.driver,
        "gpu": ", ".join(sorted(models)),
        "image": image,
        "fabric": network.kind,
        "fabric_devices": ",".join(network.devices),
        "arch": host.arch,
        "python": platform.python_version(),
        "cpus_per_rank": str(max(1, host.cpus // ranks_on_node)),
        "omp_num_threads": env.get("OMP_NUM_THREADS", ""),
    }
    return Machine(
        fingerprint={name: value for name, value in values.items() if value},
        line_rate_Gbps=network.line_rate_Gbps,
    )
