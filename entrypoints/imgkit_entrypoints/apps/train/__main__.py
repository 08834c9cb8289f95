"""One worker of dist-train, read from top to bottom."""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.train import data
from imgkit_entrypoints.apps.train.options import add_arguments


def main() -> None:
    """Train; exit 1 where the loss is not a number any more."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    with ranks.opened() as here:
        model = DistributedDataParallel(torch.nn.Linear(data.FEATURES, 1).to(here.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
        first = last = math.nan
        began = time.perf_counter()
        for step in range(1, options.steps + 1):
            inputs, targets = data.batch(
                step,
                seed=options.seed,
                rank=here.rank,
                world_size=here.world_size,
                batch_size=options.batch_size,
            )
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(model(inputs.to(here.device)), targets.to(here.device))
            loss.backward()
            optimizer.step()
            if step == 1 or step == options.steps or step % options.log_every == 0:
                last = _mean(loss, here)
                first = last if step == 1 else first
                if here.rank == 0:
                    print(
                        f"step {step:>{len(str(options.steps))}}/{options.steps}  loss {last:.6f}", flush=True
                    )
                if not math.isfinite(last):
                    sys.exit("dist-train: the loss is not finite any more; try a smaller --lr")
        if here.rank == 0:
            rate = options.steps * options.batch_size * here.world_size / (time.perf_counter() - began)
            print(
                f"loss {first:.6f} -> {last:.6f}, {here.world_size} ranks, {rate:.0f} samples/s", flush=True
            )


def _mean(loss: torch.Tensor, here: ranks.Ranks) -> float:
    """Mean over ranks: one rank's own loss would say little of the global batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total.item()) / here.world_size


if __name__ == "__main__":
    ranks.run_worker(main)
