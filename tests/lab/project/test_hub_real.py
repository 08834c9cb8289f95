"""A model of the hub in runs of this machine: two runs at once, and a disk that is full."""

from __future__ import annotations

import os
import threading

import pytest
from file_tree import write_files
from hub_server import serve_hub
from labkit import IMGKIT, Done, expect_success, output, run

LOOK = "cat hf/hub/models--me--tiny/snapshots/*/weights.bin | wc -c"
MB = 1 << 20


@pytest.fixture
def hub():
    with serve_hub() as server:
        server.add("me/tiny", {f"{name}.bin": os.urandom(MB) for name in ("weights", "a", "b", "c")})
        yield server


@pytest.fixture
def project(tmp_path):
    toml = f'recipe = "cpu"\ncode = "."\ndata = ["hf://me/tiny"]\ncommand = ["sh", "-c", "{LOOK}"]\n'
    return write_files(tmp_path / "project", {"imgkit.toml": toml})


def run_job(project, hub, hf_home):
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(hf_home)}
    return run(*IMGKIT, "run", "--runtime", "host", folder=project, env=env)


def test_two_runs_at_once_share_one_download(project, hub, tmp_path):
    results: list[Done] = []
    threads = [
        threading.Thread(target=lambda: results.append(run_job(project, hub, tmp_path / "hf")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert expect_success(result).stdout.strip() == str(MB)
    downloads = [request for request in hub.requests if request.startswith("GET /me/tiny/resolve/")]
    assert len(downloads) == 4
    folders = [path.name for path in (tmp_path / "hf/imgkit/models--me--tiny").iterdir()]
    assert folders == list(hub.repos["me/tiny"].commits)


def test_full_disk_is_named_and_a_larger_one_is_enough(project, hub, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    output("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk)
    try:
        result = run_job(project, hub, disk / "hf")
        assert result.returncode == 1, result.stderr
        message = f"imgkit: {disk}/hf/hub: hf://me/tiny cannot be written: [Errno 28] No space left on device"
        assert message in result.stderr
        assert result.stderr.endswith("\n  -> another folder: export HF_HOME=/FOLDER\n")
        assert not (project / "hf.lock").exists()
        output("mount", "-o", "remount,size=20m", disk)
        assert expect_success(run_job(project, hub, disk / "hf")).stdout.strip() == str(MB)
    finally:
        output("umount", disk)
