"""How much a run uses its GPUs: what nvidia-smi prints, what the head writes, and what is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nvidia_smi import TRAINING, write_fake_nvidia_smi
from file_tree import write_program
from gpu_nodes import mare_nostrum

from imgkit_entrypoints import facts
from imgkit_entrypoints.launch import gpu_use
from imgkit_entrypoints.launch.gpu_use import GpuMonitor
from imgkit_entrypoints.launch.stop_protocol import GPU_USE
from imgkit_entrypoints.rollcall.messages import GpuUse

from .conftest import stub, until

USE = GpuUse(readings=6, gpu_percent=380 / 6, memory_MiB=61240.0)
"""The use that `TRAINING` shows."""
WAITS = """
import os, pathlib, time
while not pathlib.Path(os.environ["FAKE_FOLDER"], "printed").exists():
    time.sleep(0.02)
"""


def read_all(program: Path, *options: str) -> GpuUse | None:
    """Return what a monitor has read once `program` has printed everything."""
    monitor = GpuMonitor([str(program), *options])
    monitor.start()
    assert until((program.parent / "printed").exists)
    use = monitor.read_use()
    monitor.close()
    return use


def test_readings_of_all_gpus_are_one_mean_and_one_peak(tmp_path):
    assert read_all(write_fake_nvidia_smi(tmp_path)) == USE


def test_query_names_the_gpus_of_the_job(tmp_path):
    host = facts.gather(mare_nostrum(tmp_path / "node"), {"CUDA_VISIBLE_DEVICES": "2,1"})
    program = write_fake_nvidia_smi(tmp_path)
    name, *options = gpu_use.query_argv(host.worker_gpus)
    assert name == program.name
    assert read_all(program, *options) == USE
    options = (tmp_path / "arguments").read_text().split()
    assert options == [
        "--query-gpu=utilization.gpu,memory.used",
        "--format=csv,noheader,nounits",
        "--id=0000:9d:00.0,0000:2c:00.0",
        "--loop=10",
    ]
    assert not any(option.startswith("--id") for option in gpu_use.query_argv(()))


@pytest.mark.parametrize(
    "lines",
    [
        ["[N/A], 61234"],
        ["Failed to initialize NVML: Driver/library version mismatch"],
        ["No devices were found"],
        ["[Unknown Error], [Unknown Error]"],
        ["87, 61234, 1", "101, 2", "-1, 2", "87"],
    ],
    ids=["MIG", "driver", "no device", "lost GPU", "other output"],
)
@pytest.mark.parametrize("ends", [False, True])
def test_other_lines_are_no_readings(tmp_path, lines, ends):
    assert read_all(write_fake_nvidia_smi(tmp_path, lines, ends=ends)) is None


def test_half_a_line_waits_for_its_other_half(tmp_path):
    script = "printf 8; touch begun; until [ -e continue ]; do sleep 0.02; done; echo '7, 5'; touch printed"
    program = write_program(tmp_path / "fake-nvidia-smi", f"cd '{tmp_path}'; {script}")
    monitor = GpuMonitor([str(program)])
    monitor.start()
    assert until((tmp_path / "begun").exists)
    assert monitor.read_use() is None
    (tmp_path / "continue").touch()
    assert until((tmp_path / "printed").exists)
    assert monitor.read_use() == GpuUse(readings=1, gpu_percent=87.0, memory_MiB=5.0)
    monitor.close()


@pytest.mark.parametrize("argv", [[], ["/none/nvidia-smi"]], ids=["CPUs", "no nvidia-smi"])
def test_node_without_readings_has_no_use(argv):
    monitor = GpuMonitor(argv)
    monitor.start()
    assert monitor.read_use() is None
    monitor.close()
    assert gpu_use.combine_uses([]) is None


def test_nvidia_smi_is_started_once(tmp_path):
    program = tmp_path / "nvidia-smi"
    monitor = GpuMonitor([str(program)])
    monitor.start()
    write_fake_nvidia_smi(tmp_path)
    monitor.start()  # the node agent calls it each second
    assert not until((tmp_path / "printed").exists, within_s=0.5)
    monitor.close()


def test_node_with_more_readings_counts_more():
    other = GpuUse(readings=2, gpu_percent=100.0, memory_MiB=9.0)
    assert gpu_use.combine_uses([USE, other]) == GpuUse(readings=8, gpu_percent=580 / 8, memory_MiB=61240.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cat: runs/mn5-1/gpu-use.json: No such file",
        "[]",
        '{"readings": 0, "gpu_percent": 1.0, "memory_MiB": 1.0}',
        '{"readings": 1, "gpu_percent": 101.0, "memory_MiB": 1.0}',
        '{"readings": 1}',
    ],
)
def test_other_text_is_no_use(text):
    assert gpu_use.parse(text) is None


def test_head_writes_the_use_of_all_nodes(nodes, tmp_path):
    for rank, lines in enumerate((TRAINING, ("100, 61250", "100, 61250"))):
        program = write_fake_nvidia_smi(tmp_path / f"node {rank}", lines)
        options = {"gpu_query": [str(program)], "env": {"FAKE_FOLDER": str(program.parent)}}
        nodes.start(stub(WAITS, 1), rank=rank, nnodes=2, hosts=["host0", "host1"], **options)
    assert nodes.codes() == [0, 0]  # and no nvidia-smi is left
    use = gpu_use.parse((tmp_path / "run" / GPU_USE).read_text())
    assert use == gpu_use.combine_uses([USE, GpuUse(readings=2, gpu_percent=100.0, memory_MiB=61250.0)])
    assert "<GPUs 72 % in use on average, at most 59.8 GiB of memory>" in nodes.output()
