"""README's first command, as a newcomer gives it: from elsewhere, in a checkout with a space in its path."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

import pytest
from labkit import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("quickstart")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout without what was made in it."""
    copy = tmp_path_factory.mktemp("quick start") / "imgkit"
    patterns = (".git", ".venv*", "build", "dist", ".*_cache", "__pycache__", ".hypothesis", "*.sif", "*.tar")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*patterns), symlinks=True)
    yield copy
    shutil.rmtree(copy)


def has_image(name):
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode == 0


def test_interrupt_ends_it_cleanly(checkout, tmp_path):
    process = subprocess.Popen(
        [checkout / "ci/quickstart"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = iter(process.stdout.readline, "")
    assert any("ci/lab/venv" in line for line in lines)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "interrupted" in output


def test_quickstart_trains_to_a_falling_loss(checkout, tmp_path, standin):
    had_image = has_image("mn5")
    try:
        result = subprocess.run(
            [checkout / "ci/quickstart"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
    finally:
        if not had_image:
            subprocess.run(["docker", "image", "rm", "mn5"], capture_output=True)
    assert result.returncode == 0, result.stdout[-6000:]
    assert f"+ imgkit build mn5 --base {standin}" in result.stdout
    fell = re.search(r"the loss fell from ([0-9.]+) to ([0-9.]+)", result.stdout)
    assert fell is not None
    assert float(fell[2]) < float(fell[1])
    assert list(tmp_path.iterdir()) == []
    assert (checkout / "build/quickstart/mn5.sif").is_file()
