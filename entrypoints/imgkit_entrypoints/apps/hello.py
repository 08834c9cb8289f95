"""``dist-hello``, the smallest program in which ranks exchange messages.

Every rank reports its host and device, and rank 0 measures the latency to each other rank.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    from imgkit_entrypoints.run.ranks import Ranks

WARM_UP, ROUND_TRIPS = 3, 20
"""Number of round trips to each rank: first those that are not counted, then those that are."""
OPTIONS = ()
"""dist-hello has no options of its own, only those of every launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What rank 0 reports about a rank."""

    rank: int
    host: str
    device: str
    seconds: float | None = None
    """Half of the median round-trip time of 8 bytes; None for rank 0 itself."""


def format_table(peers: Sequence[Peer]) -> list[str]:
    """Return the lines of a table with aligned columns: rank, host, device and latency."""
    rows = [("rank", "host", "device", "latency")]
    for peer in peers:
        latency = "-" if peer.seconds is None else f"{peer.seconds * 1e6:.1f} us"
        rows.append((str(peer.rank), peer.host, peer.device, latency))
    ranks, hosts, devices, _ = zip(*rows, strict=True)
    rank_width = max(map(len, ranks))
    host_width = max(map(len, hosts))
    device_width = max(map(len, devices))
    lines = []
    for rank, host, device, latency in rows:
        lines.append(f"{rank:>{rank_width}}  {host:{host_width}}  {device:{device_width}}  {latency:>10}")
    return lines


def main() -> None:
    """Run one worker: gather hosts and devices, time the round trips, and verify a sum over all ranks."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps import ranks as workers

    with workers.join_group() as ranks:
        peers = _measure_peers(ranks)
        # Each rank contributes 1, so the sum must be the number of ranks.
        total = torch.ones(1, device=ranks.device)
        dist.all_reduce(total)
        if ranks.rank == 0:
            footer = f"latency: half the median of {ROUND_TRIPS} round trips of 8 bytes, {dist.get_backend()}"
            terminal.print_results(*format_table(peers), footer, f"all_reduce of ones: {total.item():.0f}")
    if total.item() != ranks.world_size:
        error = f"rank {ranks.rank}: all_reduce of {ranks.world_size} ones gave {total.item():.0f}"
        sys.exit(terminal.escape_controls(error))


def _measure_peers(ranks: Ranks) -> list[Peer]:
    """Return the host and the device of each rank and, on rank 0, the latency between rank 0 and this rank.

    All ranks must call this function.
    """
    import torch

    device = f"{ranks.device}, {torch.get_num_threads()} threads"
    if ranks.device.type == "cuda":
        device = f"{ranks.device}, {torch.cuda.get_device_name(ranks.device)}"
    hosts_and_devices = ranks.gather((platform.node(), device))
    peers = []
    for rank, (peer_host, peer_device) in enumerate(hosts_and_devices):
        latency_s = None  # rank 0 measures to every other rank, but not to itself
        if rank != 0:
            latency_s = time_round_trips(rank, peer_host, ranks)
        peers.append(Peer(rank=rank, host=peer_host, device=peer_device, seconds=latency_s))
    return peers


def time_round_trips(peer: int, host: str, ranks: Ranks) -> float | None:
    """Measure the latency between rank 0 and rank `peer`, and return it in seconds.

    All ranks call this function, and the result is None on every rank except rank 0. Rank 0 sends numbers to
    the peer, which sends them back. The latency is half of the median round-trip time. The peer adds its rank
    to each number, so that rank 0 can detect a wrong answer. In this case, rank 0 ends the run.

    Parameters
    ----------
    host : host name of the peer, for the message about a wrong answer.
    """
    import torch
    import torch.distributed as dist

    latencies_s = []
    buffer = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    for number in range(WARM_UP + ROUND_TRIPS):
        if ranks.rank == peer:
            dist.recv(buffer, 0)
            buffer += peer
            dist.send(buffer, 0)
        elif ranks.rank == 0:
            buffer.fill_(number)  # a different number each time, so that an old answer is noticed
            ranks.synchronize()  # the time must not include the work of filling the buffer
            start_s = time.perf_counter()
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
            ranks.synchronize()
            latencies_s.append(time.perf_counter() - start_s)
            _refuse_wrong_answer(int(buffer.item()), number, peer, host)
    if not latencies_s:  # only rank 0 has measured something
        return None
    return statistics.median(latencies_s[WARM_UP:]) / 2


def _refuse_wrong_answer(answer: int, number: int, peer: int, host: str) -> None:
    """End this process with an error if the answer of a peer is not `number` plus the peer's rank."""
    if answer != number + peer:
        error = f"rank {peer} on {host} answered {answer} to {number}; {number + peer} is right"
        sys.exit(terminal.escape_controls(error))


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
