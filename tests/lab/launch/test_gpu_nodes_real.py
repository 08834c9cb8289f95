"""dist-run with a real torchrun on a node with GPUs, of which there are copies of /sys and /proc alone.

NUMA is not emulated: each of the two nodes in the copy has one of this machine's processors. nvidia-smi is a
fake.
"""

from __future__ import annotations

import os

import pytest
from fake_nvidia_smi import TRAINING, write_fake_nvidia_smi
from gpu_nodes import write_gpu_node
from labkit import in_image

from imgkit_entrypoints.launch import gpu_use
from imgkit_entrypoints.launch.stop_protocol import GPU_USE

pytestmark = pytest.mark.docker
PROGRAM = """
import os
cpus = sorted(os.sched_getaffinity(0))
print("rank", os.environ["RANK"], "on", *cpus, "threads", os.environ["OMP_NUM_THREADS"], flush=True)
"""
WAITS = """
import pathlib, time
while not pathlib.Path("/fake/printed").exists():
    time.sleep(0.1)
"""
RUN = """
cat > /tmp/program.py
unset OMP_NUM_THREADS
export IMGKIT_ROOT=/node IMGKIT_RUN_DIR=/run-dir PATH=/fake:$PATH
python3 -I -m imgkit_entrypoints dist-run "$@" /tmp/program.py
"""


def dist_run(standin, folder, program, *options):
    """Run `program` on two GPUs, each on a NUMA node of its own."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    numa_cpus = {0: str(first), 1: str(second)}
    gpus = {"0000:9d:00.0": 1, "0000:1b:00.0": 0}  # by address, the first GPU is on node 0
    node = write_gpu_node(folder / "node", gpus, numa_cpus, f"{first},{second}")
    mounts = (
        "--volume",
        f"{node}:/node:ro",
        "--volume",
        f"{folder}/fake:/fake",
        "--volume",
        f"{folder}:/run-dir",
    )
    result = in_image(standin, "bash", "-c", RUN, "run", *options, options=mounts, stdin=program)
    assert result.returncode == 0, result.stderr
    return result


def outputs(standin, folder, *options):
    """Return what the ranks have printed about their processors, sorted."""
    result = dist_run(standin, folder, PROGRAM, *options)
    lines = [line.partition("]: ")[2] for line in result.stdout.splitlines() if "]: rank " in line]
    assert ("IMGKIT_CPUS=" in result.stderr) == ("-v" in options)
    return sorted(lines)


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_each_worker_runs_beside_its_gpu(standin, tmp_path, start):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    expected = [f"rank 0 on {first} threads 1", f"rank 1 on {second} threads 1"]
    assert outputs(standin, tmp_path, "-v", "--start", start) == expected


def test_workers_keep_all_processors_on_request(standin, tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    expected = [f"rank {rank} on {first} {second} threads 1" for rank in range(2)]
    assert outputs(standin, tmp_path, "--no-cpu-binding") == expected


def test_use_of_the_gpus_is_in_the_run_folder(standin, tmp_path):
    write_fake_nvidia_smi(tmp_path / "fake", TRAINING)
    result = dist_run(standin, tmp_path, WAITS)
    assert result.stderr.splitlines()[-1] == "imgkit: GPUs 63 % in use on average, at most 59.8 GiB of memory"
    assert gpu_use.parse((tmp_path / GPU_USE).read_text()) is not None
    assert "--id=0000:1b:00.0,0000:9d:00.0" in (tmp_path / "fake/arguments").read_text()
