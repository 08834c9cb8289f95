"""The stand-in bases of ``ci/lab/base-image`` and the emulator of ``ci/lab/binfmt``, for real."""

from __future__ import annotations

import os
import sys

import pytest
from labkit import LAB, inspect_image, output, run

pytestmark = pytest.mark.docker


def test_standin_says_what_it_is(standin):
    image = inspect_image(standin)
    assert image["Config"]["Labels"]["imgkit.standin"] == "1"
    text = output("docker", "run", "--rm", "--network", "none", standin, "cat", "/etc/imgkit-standin")
    assert "no NVIDIA software" in text


def test_second_run_changes_nothing(standin):
    before = inspect_image(standin)["Id"]
    assert "up to date" in run(LAB / "base-image").stderr
    assert inspect_image(standin)["Id"] == before


def test_standin_has_a_working_torch(standin):
    code = "import torch; print(torch.distributed.is_gloo_available(), torch.cuda.is_available())"
    result = run("docker", "run", "--rm", "--network", "none", standin, "python3", "-c", code)
    assert result.stdout.split() == ["True", "False"]


def test_small_standin_has_no_torch(standin_notorch):
    result = run(
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
    assert result.returncode == 1
    assert "No module named 'torch'" in result.stderr


def test_pip_works_in_a_build_where_it_works_here(standin_notorch, tmp_path):
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
def test_arm64_standin_runs_here(standin_arm64_notorch):
    assert inspect_image(standin_arm64_notorch)["Architecture"] == "arm64"
    code = "import platform; print(platform.machine())"
    result = run("docker", "run", "--rm", "--network", "none", standin_arm64_notorch, "python3", "-c", code)
    assert result.stdout.strip() == "aarch64"
