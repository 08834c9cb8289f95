"""Decisions of the apps without torch: shares, weights, texts, options, the program of a forked worker."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys

import pytest

from imgkit_entrypoints.apps import hello, pi
from imgkit_entrypoints.apps.share import share

WORLD_SIZES = range(1, 9)


def plain_pi(intervals: int, world_size: int) -> float:
    """The trapezoid rule in plain Python, divided as among the workers."""
    total = 0.0
    for rank in range(world_size):
        first, end = share(intervals + 1, rank, world_size)
        total += math.fsum(4.0 / (1.0 + (i / intervals) ** 2) for i in range(first, end))
        total -= pi.excess_of_ends(first, end, intervals)
    return total / intervals


def test_import_keeps_the_garbage_collector():
    assert gc.isenabled()  # it rests in processes that run an app


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("total", [0, 1, 7, 100_000_001])
def test_no_point_is_lost_or_doubled(total, world_size):
    parts = [share(total, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("intervals", [1, 2, 3, 1000])
def test_error_is_the_trapezoid_rules(intervals, world_size):
    value = plain_pi(intervals, world_size)
    assert abs(value - math.pi) <= pi.tolerance(intervals)
    # The error is not smaller either: a loose bound would hide a rule with wrong ends.
    assert value == pytest.approx(math.pi - 1 / (6 * intervals**2), abs=0.03 / intervals**4 + 1e-12)
    assert pi.tolerance(100_000_000) < 1.1e-12  # tight at the default


def work(rank: int, seconds: float, points: int = 1000) -> pi.Work:
    return pi.Work(rank=rank, host=f"n{rank}", points=points, seconds=seconds)


def test_efficiency_compares_with_one_alone():
    lines = pi.format_report(math.pi, 2000, [work(0, 1.0), work(1, 1.25)], 1.25, work(0, 1.0))
    assert lines[0].startswith("pi = 3.14159265358979")
    assert "rank 1 on n1: 1000 terms in 1.250 s, 8.000e+02 terms/s" in lines
    assert "parallel efficiency 80% of 2 x" in lines[-1]


def test_many_ranks_are_summed_up():
    lines = pi.format_report(math.pi, 10, [work(rank, 1.0 + rank) for rank in range(64)], 64.0, work(0, 1.0))
    assert [line.split()[1] for line in lines[1:4]] == ["63", "31", "0"]
    assert len(lines) == 6


def test_rank_without_points_does_not_divide_by_zero():
    idle = work(0, 0.1, points=0)
    assert "nan" in pi.format_report(3.0, 1, [idle, work(1, 1.0)], 1.0, idle)[-1]


def test_table_shows_every_rank():
    peers = [
        hello.Peer(rank=0, host="as07r3b13", device="cuda:0, NVIDIA H100"),
        hello.Peer(rank=10, host="n", device="cpu", seconds=12.34e-6),
    ]
    assert hello.format_table(peers) == [
        "rank  host       device                  latency",
        "   0  as07r3b13  cuda:0, NVIDIA H100           -",
        "  10  n          cpu                     12.3 us",
    ]


# An interpreter whose torch is a stub, in which a program runs as in a forked worker.
STUB = """
import importlib.abc, importlib.machinery, importlib, sys, types
from unittest.mock import MagicMock

class Anything(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Anything(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
from imgkit_entrypoints.apps import torchrun

argv = (sys.executable, "-I", "-u", "-m", sys.argv[1], *sys.argv[2:])
module = torchrun._find_own_module(argv)
importlib.import_module(module)  # as run_with_forks does for all workers
torchrun._run_own_module(module, argv)
"""


def forked(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "always::RuntimeWarning", "-c", STUB, *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("app", ["pi", "doctor"])
def test_forked_worker_starts_without_a_warning(app):
    result = forked(f"imgkit_entrypoints.apps.{app}", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage:" in result.stdout


@pytest.mark.parametrize("args", [("--no-such-option",), ("--intervals", "1e8")], ids=" ".join)
def test_wrong_argument_of_a_forked_worker_is_refused(args):
    result = forked("imgkit_entrypoints.apps.pi", *args)
    assert result.returncode == 2
    assert args[0] in result.stderr
