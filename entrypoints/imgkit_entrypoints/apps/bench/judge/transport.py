"""The transports that NCCL's log names, as sentences."""

from __future__ import annotations

from collections.abc import Iterable


def sentences(transports: Iterable[str]) -> tuple[str, ...]:
    """Sum up the `transports` of all ranks' logs, as ``nccl_log.found`` returns them."""
    words = sorted(set(transports))
    if not words:
        return ()
    result = [f"NCCL's log: {', '.join(words)}."]
    if any(word.startswith("via NET/IB without") for word in words):
        result.append(
            "Some data passes through host memory, without GPUDirect RDMA. Run dist-doctor to see why."
        )
    return tuple(result)
