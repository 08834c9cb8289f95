"""Whole commands, measured from outside in alternation: a drift of the machine meets every side alike."""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution."""

    wall_s: float
    cpu_s: float
    """User and system time of the command and of every child it waited for; an engine's is not in it."""
    rss_MiB: float
    """Largest single process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to do the job: commands run one after the other, timed together."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    before: Callable[[], None] = lambda: None
    """Untimed; brings the start state back."""
    env: dict[str, str] = field(default_factory=dict)


def command_line(page: str | None, *, repeat: int) -> argparse.ArgumentParser:
    """Print the machine, and return a parser of ``--repeat``."""
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} processors, Linux {platform.release()}, Python {platform.python_version()}")
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=repeat)
    return parser


def once(side: Side) -> Run:
    """Run the side's commands to their end.

    Raises
    ------
    SystemExit : one of them failed; a benchmark of failures means nothing.
    """
    side.before()
    wall = cpu = rss = 0.0
    for command in side.commands:
        start_s = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, **side.env},
        ) as process:  # fmt: skip
            errors = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall += time.perf_counter() - start_s
        cpu += usage.ru_utime + usage.ru_stime
        rss = max(rss, usage.ru_maxrss / 1024)
        if process.returncode != 0:
            sys.exit(f"{side.name}: {' '.join(command)} failed:\n{errors.decode(errors='replace')[-2000:]}")
    return Run(wall_s=wall, cpu_s=cpu, rss_MiB=rss)


def alternate(sides: Sequence[Side], repeat: int, *, warmup: int = 1) -> dict[str, list[Run]]:
    """``repeat`` counted runs of each side, in turn: A B C A B C ..."""
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    for turn in range(warmup + repeat):
        for side in sides:
            side_run = once(side)
            if turn >= warmup:
                runs[side.name].append(side_run)
            print(f"  {side.name}: {side_run.wall_s:.2f} s", file=sys.stderr, flush=True)
    return runs


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median between the ends of its 95 % confidence interval, by order statistics."""
    ordered = sorted(values)
    below = max(0, int((len(ordered) - 1 - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[below], statistics.median(ordered), ordered[-1 - below]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratio(baseline: Sequence[float], values: Sequence[float]) -> str:
    """Median and range of the ratios turn by turn."""
    return spread([a / b for a, b in zip(baseline, values, strict=True)])
