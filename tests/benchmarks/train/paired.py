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


def against(name: str, sides: list[str], count: int, turns: int) -> None:
    """Run `turns` of `count` steps for each side, print the CPU and wall seconds of each, and end."""

    def alternating(steps: Iterable[Any], _config: object, ranks: Ranks) -> Iterator[Any]:
        loops_of = {side: loops.training(side, name, count) for side in sides}
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
    start(name, "--batch-size", str(loops.BATCH[name]), "--samples", str(loops.SAMPLES[name]))


def saving(name: str, size: int, count: int, turns: int, folder: str) -> None:
    """Run `count` steps with a checkpoint and as many without, in turn."""
    from imgkit_entrypoints.run import run_checkpoints as library

    keepers = []

    def tracked_writer(*args: Any) -> Any:
        keepers.append(original_writer(*args))
        return keepers[0]

    def timed(steps: Iterable[Any], _config: object, ranks: Ranks) -> Iterator[Any]:
        spent: list[tuple[float, float]] = []
        start_clocks = clocks()
        for number, step in enumerate(steps, start=1):
            if number % count == 0:  # the next step ends with a checkpoint, or not
                spent.append(since(start_clocks))
                if len(spent) == 2 * (turns + WARM_UP) + 1:
                    longest = (0.0, keepers[0].longest_stall_s)
                    saving_steps, plain_steps = spent[-1:0:-2][:turns], spent[-2:0:-2][:turns]
                    end({"saving": saving_steps, "plain": plain_steps, "stall": [longest]}, ranks)
                start_clocks = clocks()
            yield step

    original_writer = library.CheckpointWriter
    app.trace_steps, library.CheckpointWriter = timed, tracked_writer  # type: ignore[misc, assignment]
    start(name, "--batch-size", str(size), "--save-every", str(2 * count), "--run-dir", folder)


def in_turn(name: str, size: int, count: int, turns: int, hear: str, tell: str) -> None:
    """Run `count` steps whenever a byte comes from the FIFO `hear`, and pass one on to the FIFO `tell`.

    So the trainers of two versions of imgkit, each with ranks of its own, take turns.
    """

    def waiting(steps: Iterable[Any], _config: object, ranks: Ranks) -> Iterator[Any]:
        spent: list[tuple[float, float]] = []
        start_clocks = (0.0, 0.0)
        ends = [os.open(path, os.O_RDWR) for path in (hear, tell)] if ranks.rank == 0 else []
        for number, step in enumerate(steps):
            if number % count == 0:
                dist.barrier()
                if number:
                    spent.append(since(start_clocks))
                if ends and number:
                    os.write(ends[1], b".")
                if len(spent) == turns + WARM_UP:
                    end({"spent": spent[WARM_UP:]}, ranks)
                if ends:
                    os.read(ends[0], 1)
                dist.barrier()
                start_clocks = clocks()
            yield step

    app.trace_steps = app.traced = waiting  # type: ignore[attr-defined]  # its name in older versions
    start(name, "--batch-size", str(size), "--samples", "65536")


def start(name: str, *args: str) -> None:
    sys.argv = ["dist-train", "--model", name, "--steps", str(10**9), *args]
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
    mode, model, *rest = sys.argv[1:]
    if mode == "in-turn":
        in_turn(model, *map(int, rest[:3]), hear=rest[3], tell=rest[4])
    elif mode == "saving":
        saving(model, *map(int, rest[:3]), folder=rest[3])
    else:
        against(model, rest[0].split(","), *map(int, rest[1:]))
