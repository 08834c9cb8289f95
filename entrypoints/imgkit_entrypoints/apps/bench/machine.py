"""The machine of a run: the node of every rank, the groups of ranks, free memory, the node's fingerprint."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints import __version__, fabric, facts
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.facts import Reader, root_of

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """What a rank knows about its own place."""

    number: str
    """torchrun's number of the node; empty without torchrun."""
    host: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The node of one rank."""

    rank: int
    local_rank: int
    host: str
    """The node's name, with the node's number where several nodes share the name."""
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that run a collective together."""

    torch_group: Any
    """torch's process group; None for all ranks."""
    ranks: tuple[int, ...]
    rank: int
    """This process' rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


def locate_ranks(here: Ranks) -> tuple[RankLocation, ...]:
    """Locate every rank; a collective call."""
    number, host = os.environ.get("GROUP_RANK", ""), platform.node()
    return located(here.gather(RankHost(number=number, host=host, local_rank=here.local_rank), RankHost))


def located(found: Sequence[RankHost]) -> tuple[RankLocation, ...]:
    """Locations from what every rank knows, in the order of the ranks."""
    nodes: dict[tuple[str, str], int] = {}
    for one in found:
        nodes.setdefault((one.number, one.host), len(nodes))
    names = [host for _, host in nodes]
    return tuple(
        RankLocation(
            rank=rank,
            local_rank=one.local_rank,
            host=f"{one.host} (node {nodes[one.number, one.host]})"
            if names.count(one.host) > 1
            else one.host,
            node=nodes[one.number, one.host],
        )
        for rank, one in enumerate(found)
    )


def first_ranks(all_ranks: Sequence[RankLocation]) -> list[int]:
    """The first rank of each node."""
    found: dict[int, int] = {}
    for one in all_ranks:
        found.setdefault(one.node, one.rank)
    return [found[node] for node in sorted(found)]


def group_members(
    kind: str, all_ranks: Sequence[RankLocation], asked: str = ""
) -> tuple[tuple[int, ...], ...]:
    """The ranks of every group: one for all ranks, one per node, or one per local rank.

    `asked` is the option that needs the groups, for the error.

    Raises
    ------
    UsageError : the groups have different sizes, so that no figure holds for all of them.
    """
    if kind == "world":
        return (tuple(one.rank for one in all_ranks),)
    groups: dict[int, list[int]] = {}
    for one in all_ranks:
        groups.setdefault(one.node if kind == "node" else one.local_rank, []).append(one.rank)
    if len({len(ranks) for ranks in groups.values()}) > 1:
        raise UsageError(
            "the nodes have different numbers of ranks",
            where=asked or f"--group {kind}",
            hint="start with the same --nproc N on every node",
        )
    return tuple(tuple(ranks) for ranks in groups.values())


def join_groups(
    kind: str, all_ranks: Sequence[RankLocation], here: Ranks, number: int = 1
) -> tuple[RankGroup, ...]:
    """Make all groups, `number` communicators of each, and return this rank's; a collective call."""
    import torch.distributed as dist

    mine: list[RankGroup] = []
    for ranks in group_members(kind, all_ranks):
        for again in range(number):
            whole = kind == "world" and not again
            group = (
                None if whole else dist.new_group(list(ranks))
            )  # every rank must call this, members or not
            if here.rank in ranks:
                mine.append(RankGroup(torch_group=group, ranks=ranks, rank=ranks.index(here.rank)))
    return tuple(mine)


SHARE_BY_DEFAULT = 0.5
"""Share of the free memory that the default sizes may use: libraries need buffers too."""
SHARE_ROTATED = 0.1
"""Share of the free memory through which batches may rotate."""
SHARE_AT_MOST = 0.9
"""Share above which a size is refused, because the kernel would kill the process without a message."""


def node_bytes(reader: Reader) -> int | None:
    """Free memory of this node, or of this job's cgroup; None if the kernel reports neither."""
    found = []
    for line in (reader.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append(int(rest.split()[0]) * 1024)
    limit = reader.number("/sys/fs/cgroup/memory.max")
    used = reader.number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min(found) if found else None


def free_memory_bytes(here: Ranks, ranks_on_node: int) -> int | None:
    """Memory that one rank may use: the GPU's free memory, or its share of the node's."""
    import torch

    if here.device.type == "cuda":
        free: int = torch.cuda.mem_get_info(here.device)[0]
        return free
    node = node_bytes(Reader(root=root_of(os.environ)))
    return None if node is None else node // ranks_on_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts of this node that a benchmark needs."""

    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    fabric: str
    cpus: int


def read_machine(
    env: Mapping[str, str], nodes: int, ranks_per_node: int, software: Mapping[str, str]
) -> Machine:
    """Read this node. The fingerprint holds named facts only, never the environment, which holds secrets."""
    try:
        host, system = facts.gather(env=env), facts.system_facts(env=env)
        network = fabric.choose(host, system, env, nnodes=nodes, head=env.get("MASTER_ADDR", ""))
    except ImgkitError:
        return Machine(
            fingerprint={"imgkit": __version__, **software},
            line_rate_Gbps=None,
            fabric="",
            cpus=ranks_per_node,
        )
    gpus = sorted({gpu.model for gpu in host.gpu_devices})
    found = {
        "imgkit": __version__,
        **software,
        "driver": host.driver,
        "gpu": ", ".join(gpus),
        "image": system.title or system.scheduler if system else "",
        "fabric": network.kind,
        "fabric_devices": ",".join(network.devices),
        "arch": host.arch,
        "python": platform.python_version(),
        "cpus_per_rank": str(max(1, host.cpus // ranks_per_node)),
        "omp_num_threads": env.get("OMP_NUM_THREADS", ""),
    }
    return Machine(
        fingerprint={name: text for name, text in found.items() if text},
        line_rate_Gbps=network.line_rate_Gbps,
        fabric=network.kind,
        cpus=host.cpus,
    )
