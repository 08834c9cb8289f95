"""The stand-in bases of ``ci/lab/base-image`` and the emulator of ``ci/lab/binfmt``, for real."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from labkit import LAB, output, run

pytestmark = pytest.mark.docker


def config(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output("docker", "image", "inspect", image))[0]
    return found


def test_standin_says_what_it_is(standin: str) -> None:
    found = config(standin)
    assert found["Config"]["Labels"]["imgkit.standin"] == "1"
    text = output("docker", "run", "--rm", "--network", "none", standin, "cat", "/etc/imgkit-standin")
    assert "no NVIDIA software" in text


def test_second_run_changes_nothing(standin: str) -> None:
    before = config(standin)["Id"]
    assert "up to date" in run(LAB / "base-image").stderr
    assert config(standin)["Id"] == before


def test_standin_has_a_working_torch(standin: str) -> None:
    code = "import torch; print(torch.distributed.is_gloo_available(), torch.cuda.is_available())"
    done = run("docker", "run", "--rm", "--network", "none", standin, "python3", "-c", code)
    assert done.stdout.split() == ["True", "False"]


def test_small_standin_has_no_torch(standin_notorch: str) -> None:
    done = run(
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        standin_notorch,
        "python3",
        "-c",
        "import torch",
    )
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr


def test_pip_works_in_a_build_where_it_works_here(standin_notorch: str, tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
    if run(*download, "-d", tmp_path / "wheels", "six").returncode != 0:
        pytest.skip("no package index is reached from this machine")
    # The index has a certificate of a private authority on some networks: PIP_CERT in the base covers it.
    (tmp_path / "Dockerfile").write_text(
        f"FROM {standin_notorch}\nRUN python3 -m pip install --no-cache-dir six && python3 -c 'import six'\n"
    )
    tag = f"imgkit-test-pip:{os.getpid()}"
    try:
        output("docker", "build", "--no-cache", "--force-rm", "-t", tag, tmp_path)
    finally:
        run("docker", "image", "rm", "-f", tag)


@pytest.mark.qemu
def test_arm64_standin_runs_here(standin_arm64_notorch: str) -> None:
    assert config(standin_arm64_notorch)["Architecture"] == "arm64"
    code = "import platform; print(platform.machine())"
    done = run("docker", "run", "--rm", "--network", "none", standin_arm64_notorch, "python3", "-c", code)
    assert done.stdout.strip() == "aarch64"
