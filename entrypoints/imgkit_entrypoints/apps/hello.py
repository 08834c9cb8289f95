"""Every rank says where it runs, in rank order, and one all_reduce shows that they are connected."""

from __future__ import annotations

import argparse
import platform


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """It has none."""


def main() -> None:
    """Run as one worker."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps import ranks

    with ranks.opened() as here:
        places: list[str | None] = [None] * here.world_size
        dist.all_gather_object(places, f"{platform.node()}, local rank {here.local_rank}, {here.device}")
        total = torch.ones(1, device=here.device)
        dist.all_reduce(total)
        if here.rank == 0:
            for rank, place in enumerate(places):
                print(f"rank {rank} of {here.world_size}: {place}")
            print(f"all_reduce of ones: {total.item():.0f}", flush=True)


if __name__ == "__main__":
    main()
