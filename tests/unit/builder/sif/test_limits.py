"""Processors and memory come from affinity and control groups of both versions."""

from __future__ import annotations

import os

import pytest
from file_tree import write_files

from imgkit_builder.sif.mksquashfs import Limits, gather_limits


@pytest.fixture(autouse=True)
def _many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def test_no_groups_no_limits(tmp_path):
    assert gather_limits(tmp_path) == Limits(processors=64, memory_bytes=None)


def test_v2_limits_of_parents_count(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max": str(32 << 30),
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/cpu.max": "max 100000",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/cpu.max": "450000 100000",
            "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max",
        },
    )
    limits = gather_limits(root)
    assert limits == Limits(processors=4, memory_bytes=32 << 30)
    assert limits.mksquashfs_options() == ("-processors", "4", "-mem", "512M")


def test_v1_limits_read(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/slurm/uid_1/job_7\n3:cpu,cpuacct:/slurm\n1:name=systemd:/x",
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": str(4 << 30),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
        },
    )
    assert gather_limits(root) == Limits(processors=2, memory_bytes=4 << 30)


def test_inside_a_container_the_mount_root_counts(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod1",
            "sys/fs/cgroup/memory.max": str(2 << 30),
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    assert gather_limits(root) == Limits(processors=1, memory_bytes=2 << 30)


@pytest.mark.parametrize("text", ["", "max", "-1 100000", "x y", "100 0", "1 2 3"])
def test_odd_quota_is_no_limit(tmp_path, text):
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text})
    assert gather_limits(root).processors == 64


@pytest.mark.parametrize(("memory_bytes", "option"), [(None, "512M"), (1 << 30, "256M"), (100 << 20, "128M")])
def test_mksquashfs_gets_a_quarter_of_the_memory_within_bounds(memory_bytes, option):
    assert Limits(processors=1, memory_bytes=memory_bytes).mksquashfs_options()[-1] == option


def test_affinity_counts_without_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert gather_limits(tmp_path).processors == 2
