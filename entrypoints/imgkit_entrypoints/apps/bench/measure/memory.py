"""Free memory per rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from imgkit_entrypoints.facts import Reader, root_of

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks

BY_DEFAULT = 0.5
"""Share of the free memory that the default sizes may use: libraries need buffers too."""
ROTATED = 0.1
"""Share of the free memory through which batches may rotate."""
AT_MOST = 0.9
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


def free_bytes(here: Ranks, ranks_on_node: int) -> int | None:
    """Memory that one rank may use: the GPU's free memory, or its share of the node's."""
    import torch

    if here.device.type == "cuda":
        free: int = torch.cuda.mem_get_info(here.device)[0]
        return free
    node = node_bytes(Reader(root=root_of(os.environ)))
    return None if node is None else node // ranks_on_node
