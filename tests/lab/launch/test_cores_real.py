"""Workers of a real torchrun on the processors beside their GPUs, which a copy of a node's /sys has.

A NUMA node is not emulated: each of the two in the copy has one of this machine's processors.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_nodes import write_gpu_node
from labkit import in_image

pytestmark = pytest.mark.docker
PROGRAM = """
import os
cpus = sorted(os.sched_getaffinity(0))
print("rank", os.environ["RANK"], "on", *cpus, "threads", os.environ["OMP_NUM_THREADS"], flush=True)
"""
RUN = """
cat > /tmp/program.py
export IMGKIT_ROOT=/node
python3 -I -m imgkit_entrypoints dist-run "$@" /tmp/program.py
"""


def outputs(standin: str, folder: Path, *options: str) -> list[str]:
    """Return what the ranks have printed, sorted."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    numa_cpus = {0: str(first), 1: str(second)}
    gpus = {"0000:9d:00.0": 1, "0000:1b:00.0": 0}  # by address, the first GPU is on node 0
    node = write_gpu_node(folder, gpus, numa_cpus, f"{first},{second}")
    mount = ("--volume", f"{node}:/node:ro")
    result = in_image(standin, "bash", "-c", RUN, "run", *options, options=mount, stdin=PROGRAM)
    assert result.returncode == 0, result.stderr
    lines = [line.partition("]: ")[2] for line in result.stdout.splitlines() if "]: rank " in line]
    assert ("IMGKIT_CPUS=" in result.stderr) == ("-v" in options)
    return sorted(lines)


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_each_worker_runs_beside_its_gpu(standin: str, tmp_path: Path, start: str) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    expected = [f"rank 0 on {first} threads 1", f"rank 1 on {second} threads 1"]
    assert outputs(standin, tmp_path, "-v", "--start", start) == expected


def test_workers_keep_all_processors_on_request(standin: str, tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    expected = [f"rank {rank} on {first} {second} threads 1" for rank in range(2)]
    assert outputs(standin, tmp_path, "--no-cpu-binding") == expected
