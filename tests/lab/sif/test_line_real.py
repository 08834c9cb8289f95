"""The whole line as users type it: a shipped recipe, its image, both ways to a .sif, and what runs in it."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import expect_failure, expect_success, imgkit, imgkit_json, output, public_folder, run

TAG_ARM64 = f"imgkit-test-line-arm64-{os.getpid()}:latest"

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("line")]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The archive and the .sif files of recipe mn5 on the stand-in."""

    archive: Path
    default: Path
    fast: Path


@pytest.fixture(scope="module")
def line(mn5_image, mn5_sif):
    folder = public_folder("line")
    line = Line(archive=folder / "mn5.tar", default=folder / "mn5.sif", fast=mn5_sif)
    try:
        imgkit_json("save", mn5_image, "-o", line.archive)
        imgkit_json("sif", line.archive, "-o", line.default)
        yield line
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["default", "fast"])
def sif(line, request):
    path: Path = getattr(line, request.param)
    return path


def as_user(user, *argv):
    prefix = ("runuser", "-u", user, "--", "env", f"HOME=/home/{user}") if os.geteuid() == 0 else ()
    return run(*prefix, *argv, folder="/")


def inside(sif, *args):
    return output("singularity", "exec", sif, *args)


def losses(text):
    return [float(loss) for loss in re.findall(r"step +\d+/\d+ +loss (\S+)", text)]


@pytest.mark.soak
def test_ordinary_user_trains(sif, user):
    argv = ("dist-train", "--device", "cpu", "--nproc", "2", "--steps", "60")
    result = expect_success(as_user(user, "singularity", "exec", sif, *argv))
    values = losses(result.stdout)
    assert values[-1] < values[0] / 100
    assert "2 ranks" in result.stdout


def test_ordinary_user_runs_the_fast_file(line, user):
    result = expect_success(as_user(user, "singularity", "exec", line.fast, "dist-env", "--json"))
    assert json.loads(result.stdout)["system"]["scheduler"] == "slurm"


def test_torchrun_is_there(line):
    # Not --version: torchrun of torch 2.13 has no such option and exits with 2.
    inside(line.default, "torchrun", "--help")


def test_files_verify_and_pass_the_smoke_test(sif):
    imgkit("verify", sif)
    assert json.loads(imgkit("test", sif, "--json").stdout)["passed"] is True


def test_standin_is_told_everywhere(line, mn5_image):
    assert "STAND-IN" in imgkit("show", mn5_image).stdout.upper()
    manifest = inside(line.default, "cat", "/opt/imgkit/manifest.json")
    assert json.loads(manifest)["base"]["standin"] is True


def test_missing_gpus_are_told_inside(line):
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs")
    expect_failure(run("singularity", "exec", line.default, "dist-train", "--steps", "1"), 5, "--nv")


def test_root_file_system_is_read_only(line):
    result = run("singularity", "exec", line.default, "touch", "/opt/imgkit/x")
    assert result.returncode != 0
    assert "Read-only" in result.stderr


def olivia_sif(base, folder):
    """Build the recipe olivia, and return its .sif."""
    sif = folder / "olivia.sif"
    try:
        built = imgkit_json("build olivia --base", base, "--tag", TAG_ARM64)
        assert built["platform"] == "linux/arm64"
        imgkit_json("sif", TAG_ARM64, "-o", sif)
    finally:
        run("docker", "rmi", "--force", TAG_ARM64)
    return sif


@pytest.mark.qemu
@pytest.mark.soak
def test_olivia_is_built_for_arm64(standin_arm64_notorch, tmp_path):
    facts = json.loads(inside(olivia_sif(standin_arm64_notorch, tmp_path), "dist-env", "--json"))
    assert facts["host"]["arch"] == "aarch64"


@pytest.mark.qemu
@pytest.mark.torch_arm64
def test_olivia_trains_under_the_emulator(standin_arm64, tmp_path):
    argv = ("dist-train", "--device", "cpu", "--steps", "20")
    values = losses(inside(olivia_sif(standin_arm64, tmp_path), *argv))
    assert values[-1] < values[0]


@pytest.mark.qemu
def test_wrong_architecture_is_refused_before_the_build(standin_notorch):
    expect_failure(imgkit("build", "olivia", "--base", standin_notorch, "--tag", TAG_ARM64), 2, "arm64")
    assert run("docker", "image", "inspect", TAG_ARM64).returncode != 0
