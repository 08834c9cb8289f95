"""The smallest message passing: rank 0 sends a text to every rank, gets an answer and times round trips."""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    import torch

    from imgkit_entrypoints.run.ranks import Ranks

TEXT_BYTES = 256
"""Length of every text on the network: the receiver of a tensor must know its size."""
WARM_UP, ROUND_TRIPS = 3, 20
"""Round trips to each rank that do not count, and those that do."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add nothing: dist-hello has the options of the launch alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank, as rank 0 sees it."""

    rank: int
    host: str
    device: str
    seconds: float | None = None
    """Half the median round trip of 8 bytes; None for rank 0 itself."""


def packed(text: str) -> bytes:
    """Encode `text` at the fixed length; a longer text is cut."""
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def unpacked(data: bytes) -> str:
    """Decode a text that `packed` encoded."""
    return data.rstrip(b"\0").decode(errors="replace")


def table(peers: Sequence[Peer]) -> list[str]:
    """Aligned plain text with rank, host, device and latency."""
    rows = [("rank", "host", "device", "latency")]
    for peer in peers:
        way = "-" if peer.seconds is None else f"{peer.seconds * 1e6:.1f} us"
        rows.append((str(peer.rank), peer.host, peer.device, way))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{row[0]:>{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]:>10}" for row in rows
    ]


def main() -> None:
    """Run one worker."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps import ranks as workers

    with workers.opened() as ranks:
        if ranks.rank == 0:
            peers = [Peer(rank=0, host=platform.node(), device=_device(ranks))]
            peers += [_call(peer, ranks) for peer in range(1, ranks.world_size)]
            footer = f"latency: half the median of {ROUND_TRIPS} round trips of 8 bytes, {dist.get_backend()}"
            terminal.out(*table(peers), footer)
        else:
            _answer(ranks)
        total = torch.ones(1, device=ranks.device)
        dist.all_reduce(total)
        if ranks.rank == 0:
            terminal.out(f"all_reduce of ones: {total.item():.0f}")
    if total.item() != ranks.world_size:
        wrong = f"rank {ranks.rank}: all_reduce of {ranks.world_size} ones gave {total.item():.0f}"
        sys.exit(terminal.shown(wrong))


def _call(peer: int, ranks: Ranks) -> Peer:
    """Rank 0's side of the exchange with `peer`."""
    import torch
    import torch.distributed as dist

    _send_text(f"hello rank {peer}, who are you?", peer, ranks)
    host, _, device = _receive_text(peer, ranks).partition("\n")
    latencies = []
    number = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    for turn in range(WARM_UP + ROUND_TRIPS):
        number.fill_(turn)
        ranks.synchronize()
        start = time.perf_counter()
        dist.send(number, peer)
        dist.recv(number, peer)
        ranks.synchronize()
        latencies.append(time.perf_counter() - start)
        if number.item() != turn + peer:
            wrong = f"rank {peer} on {host} answered {number.item()} to {turn}; {turn + peer} is right"
            sys.exit(terminal.shown(wrong))
    return Peer(rank=peer, host=host, device=device, seconds=statistics.median(latencies[WARM_UP:]) / 2)


def _answer(ranks: Ranks) -> None:
    """The other side: name host and device, then send every number back with this rank added."""
    import torch
    import torch.distributed as dist

    _receive_text(0, ranks)
    _send_text(f"{platform.node()}\n{_device(ranks)}", 0, ranks)
    number = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    for _ in range(WARM_UP + ROUND_TRIPS):
        dist.recv(number, 0)
        number += ranks.rank
        dist.send(number, 0)


def _device(ranks: Ranks) -> str:
    import torch

    if ranks.device.type == "cuda":
        return f"{ranks.device}, {torch.cuda.get_device_name(ranks.device)}"
    return f"{ranks.device}, {torch.get_num_threads()} threads"


def _send_text(text: str, peer: int, ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor(list(packed(text)), dtype=torch.uint8, device=ranks.device), peer)


def _receive_text(peer: int, ranks: Ranks) -> str:
    import torch
    import torch.distributed as dist

    data: torch.Tensor = torch.empty(TEXT_BYTES, dtype=torch.uint8, device=ranks.device)
    dist.recv(data, peer)
    return unpacked(bytes(data.tolist()))


if __name__ == "__main__":
    from imgkit_entrypoints.apps.ranks import run_worker

    run_worker(main)
