"""The loop of dist-train and hand-written loops, in turn in the same processes; bench.py starts it.

The run of dist-train is real. Only its batch iterator is wrapped, to let the other loops run in between.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import loops
import torch.distributed as dist

from imgkit_entrypoints.apps.train import __main__ as app
from imgkit_entrypoints.run.ranks import Ranks

WARM_UP = 2
"""Turns that are not counted."""


def against(sides: list[str], count: int, turns: int) -> None:
    """Run `turns` of `count` steps for each side, print the CPU and wall seconds of each, and end."""

    def alternating(steps: Iterable[Any], _config: object, ranks: Ranks) -> Iterator[Any]:
        loops_of = {side: loops.training(side, count) for side in sides}
        spent: dict[str, list[tuple[float, float]]] = {side: [] for side in ("dist-train", *sides)}
        start_clocks = clocks()
        for number, step in enumerate(steps):
            if number % count == 0:
                spent["dist-train"].append(since(start_clocks))
                turn = number // count
                for side in loops_of if turn % 2 else reversed(loops_of):
                    start_clocks = clocks()
                    next(loops_of[side])
                    spent[side].append(since(start_clocks))
                if turn == turns + WARM_UP:
                    end({side: each[-turns:] for side, each in spent.items()}, ranks)
                start_clocks = clocks()
            yield step

    app.trace_steps = alternating
    data = ("--batch-size", str(loops.BATCH), "--samples", str(loops.SAMPLES))
    sys.argv = ["dist-train", "--model", "linear", "--steps", str(10**9), *data]
    app.main()


def clocks() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, time.perf_counter()


def since(start_clocks: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - start_clocks[0], now[1] - start_clocks[1]


def end(spent: dict[str, list[tuple[float, float]]], ranks: Ranks) -> None:
    dist.barrier()
    if ranks.rank == 0:
        print(f"\n{json.dumps(spent)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    sides, count, turns = sys.argv[1:]
    against(sides.split(","), int(count), int(turns))
