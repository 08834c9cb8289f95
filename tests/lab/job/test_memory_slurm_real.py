"""Memory of jobs on a real Slurm for which it is a consumable resource."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from labkit import IMGKIT, SLURMS, SlurmSite

pytestmark = [pytest.mark.cluster, pytest.mark.slurm, pytest.mark.xdist_group("memory")]

RECIPE = """\
image: {base: "python:3.12-slim"}
system:
  title: lab
  scheduler: slurm
  node: {gpus: 4, memory_GB: 62, default_memory_GB: 2}
  partitions:
    debug: {memory_per_gpu_GB: 1}
  queue: {name: batch, time: "00:05:00"}
"""
SHOW = ("sh", "-c", 'scontrol show job "$SLURM_JOB_ID"')
HOLD = (
    *(sys.executable, "-c"),
    "import time; held = b'1' * (700 << 20); time.sleep(60); print('it was not killed')",
)


@pytest.fixture(scope="module", params=SLURMS)
def site(request):
    state, folder = Path(f"/tmp/imgkit-memory-{os.getpid()}"), Path(f"/tmp/imgkit-memory-jobs-{os.getpid()}")
    cluster = SlurmSite(state=state, folder=folder)
    folder.mkdir()
    (folder / "lab.yaml").write_text(RECIPE)
    try:
        cluster.up(1, "--limit-memory", "--no-ssh", release=request.param)
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder)


def run(site, *args):
    argv = (*IMGKIT, "run", "./lab.yaml", "--runtime", "host", *args)
    env = {"XDG_STATE_HOME": str(site.state / "state")}
    return site("exec", "login", "--cwd", site.folder, "--", *argv, env=env)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (("--mem", "512M"), "512M"),
        (("--mem", "62GB"), "62G"),
        (("--mem-per-gpu", "300M", "--gpus", "2"), "600M"),
        ((), "2G"),
        (("--queue", "debug", "--gpus", "3"), "3G"),
    ],
)
def test_job_gets_its_memory(site, args, size):
    result = run(site, *args, "--", *SHOW)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"AllocTRES=.*\bmem=(\w+)", result.stdout) == [size]


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (("--mem", "256M"), "--mem 256M"),
        (("--mem-per-gpu", "64M"), "--mem-per-gpu 64M"),
    ],
)
def test_job_over_its_memory_is_explained(site, args, option):
    result = run(site, *args, "--", *HOLD)
    assert result.returncode == 1
    assert "it was not killed" not in result.stdout
    assert result.stderr.splitlines()[-1] == (
        f"imgkit: the job ran out of memory: it had {option}; request more, or use fewer data workers"
    )


def test_memory_above_a_node_is_not_submitted(site):
    result = run(site, "--mem", "63G", "--", *SHOW)
    assert (result.returncode, result.stdout) == (2, "")
    assert "imgkit: lab.yaml:5: --mem 63G, but a node has 62G\n" in result.stderr
    assert "  -> --mem 62G with more --nodes" in result.stderr
