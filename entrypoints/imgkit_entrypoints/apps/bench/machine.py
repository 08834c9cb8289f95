"""The machine of a run: the node of every rank, free memory, and this node's fingerprint."""

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
    """torchrun's number of the node; empty without torchrun."""
    host: str


def gather_nodes(ranks: Ranks) -> tuple[RankNode, ...]:
    """Return the node of every rank, in the order of the ranks; a collective call."""
    node = RankNode(number=os.environ.get("GROUP_RANK", ""), host=platform.node())
    return tuple(ranks.gather(node))


def node_names(rank_nodes: Sequence[RankNode]) -> tuple[str, ...]:
    """Return the name of every rank's node.

    It is the host, with the number of the node where several share the host: ``as01 (node 1)``.
    """
    nodes = list(dict.fromkeys(rank_nodes))
    nodes_of_host = collections.Counter(node.host for node in nodes)
    names = {}
    for number, node in enumerate(nodes):
        names[node] = node.host
        if nodes_of_host[node.host] > 1:
            names[node] += f" (node {number})"
    return tuple(names[node] for node in rank_nodes)


def ranks_per_node(names: Sequence[str]) -> int:
    """Return the number of ranks on each of the nodes that `node_names` returned.

    Raises
    ------
    UsageError : the nodes have different numbers of ranks, so no line rate would fit all of them.
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


# Share of the free memory that the default sizes may use: libraries need buffers too.
DEFAULT_SHARE = 0.5
# Share of the free memory through which batches may rotate.
ROTATED_SHARE = 0.1
# Share above which a size is refused, because the kernel would kill the process without a message.
MAX_SHARE = 0.9


def free_node_bytes(reader: Reader) -> int | None:
    """Return the free memory of this node, or of this job's cgroup (its limit of memory) if that is less.

    None means that the kernel reports neither.
    """
    values = []
    for line in (reader.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            values.append(int(rest.split()[0]) * 1024)
    # A job's cgroup may allow less than the node has.
    limit = reader.number("/sys/fs/cgroup/memory.max")
    used = reader.number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        values.append(max(0, limit - used))
    return min(values, default=None)


def free_memory_bytes(ranks: Ranks, ranks_on_node: int) -> int | None:
    """Return the memory that one rank may use: the GPU's free memory, or its share of the node's.

    None means that the kernel does not report it.
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
    """The facts of this node that a benchmark needs."""

    fingerprint: Mapping[str, str]
    """Named facts only, never the environment, which holds secrets."""
    line_rate_Gbps: float | None = None


def read_machine(
    env: Mapping[str, str], nodes: int, ranks_on_node: int, software: Mapping[str, str]
) -> Machine:
    """Read the facts of this node. If they cannot be read, return only the versions.

    Parameters
    ----------
    software : versions of torch and its libraries, by name.
    """
    versions = {"imgkit": __version__, **software}
    try:
        host = facts.gather(env=env)
        system = facts.system_facts(env=env)
        network = fabric.choose_fabric(host, system, env, nnodes=nodes, head=env.get("MASTER_ADDR", ""))
    except ImgkitError:
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
