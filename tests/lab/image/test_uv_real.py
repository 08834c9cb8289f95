"""What a uv project locks, in a real base: its wheels from a server, hashed; conflicts; uv's own locks."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from labkit import docker, expect_failure, host_address, imgkit, imgkit_json, output
from package_index import serve_folder, write_links, write_wheel

pytestmark = pytest.mark.docker

NAME = f"imgkit-test-uv-{os.getpid()}"
TAG = f"{NAME}:latest"
PACKAGES = {"imgkit-test-upper": ["imgkit-test-lower"], "imgkit-test-lower": []}
WHEELS = {**PACKAGES, "imgkit-test-torchy": ["torch"], "torch": []}

PYPROJECT = """
[project]
name = "my-project"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["PACKAGE"]

[[tool.uv.index]]
url = "INDEX"
default = true
"""
RECIPE = "image:\n  base: registry.invalid/base:1\n  uv: {project: .}\n  args: {PIP_TRUSTED_HOST: ADDRESS}\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index of `WHEELS`: its address as containers and this machine see it."""
    folder = tmp_path_factory.mktemp("index")
    for name, requires in WHEELS.items():
        (folder / name).mkdir()
        write_links(folder / name, [write_wheel(folder / name, name, "1.5", requires=requires)])
    with serve_folder(folder, host_address()) as address:
        yield f"http://{address}"


def project(folder, index, package="imgkit-test-upper"):
    """Return the recipe of a project that needs `package`, which the real uv has locked."""
    text = PYPROJECT.replace("INDEX", index).replace("PACKAGE", package)
    (folder / "pyproject.toml").write_text(text)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert uv, "uv is not installed; pip install -e '.[dev]'"
    env = {"UV_CACHE_DIR": str(folder / "cache"), "UV_PYTHON_DOWNLOADS": "never"}
    output(uv, "lock", "--directory", folder, env=env)
    file = folder / f"{NAME}.yaml"
    file.write_text(RECIPE.replace("ADDRESS", host_address()))
    return file


def installed():
    command = ["--entrypoint", "python3", TAG, "-m", "pip", "list", "--format=json"]
    packages = json.loads(docker("run", "--rm", *command).splitlines()[-1])
    return {package["name"]: package["version"] for package in packages}


@pytest.mark.soak
def test_locked_packages_are_in_the_base(index, standin_notorch, tmp_path):
    recipe = project(tmp_path, index)
    try:
        imgkit_json("build", recipe, "--base", standin_notorch, "--no-test")
        versions = installed()
        assert {name: versions[name] for name in PACKAGES} == dict.fromkeys(PACKAGES, "1.5")
        assert docker(
            "run", "--rm", "--entrypoint", "sh", TAG, "-c", "tail -n 2 /opt/imgkit/constraint.txt"
        ) == ("imgkit-test-lower==1.5\nimgkit-test-upper==1.5")
    finally:
        docker("image", "rm", "--force", TAG)


def test_conflict_and_wrong_hash_name_the_line(index, standin, tmp_path):
    recipe = project(tmp_path, index, "imgkit-test-torchy")
    expect_failure(
        imgkit("build", recipe, "--base", standin, "--no-test"),
        4,
        f"{NAME}.yaml:3: step ",
        "torch: uv.lock has 1.5, but the base has 2.",
        "uv lock --upgrade-package 'torch==2.",
    )
    recipe = project(tmp_path, index)
    lock = tmp_path / "uv.lock"
    lock.write_text(
        re.sub(r"(lower-1\.5\S+ hash = \"sha256:)[0-9a-f]{64}", rf"\g<1>{'0' * 64}", lock.read_text())
    )
    expect_failure(
        imgkit("build", recipe, "--base", standin, "--no-test"),
        4,
        f"{NAME}.yaml:3: step ",
        "THESE PACKAGES DO NOT MATCH THE HASHES",
    )


def test_changed_project_is_refused(index, tmp_path):
    recipe = project(tmp_path, index)
    assert imgkit("check", recipe).returncode == 0
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("-upper", "-upper>=2"))
    expect_failure(imgkit("check", recipe), 2, "uv.lock is not up to date")


@pytest.mark.soak
def test_lock_has_the_wheels_of_a_uv_project(index, standin_notorch, tmp_path):
    recipe = project(tmp_path, index)
    (tmp_path / "lock").mkdir()
    recipe = recipe.rename(tmp_path / "lock" / recipe.name)
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).rename(tmp_path / "lock" / name)
    imgkit_json("lock", recipe, "--base", standin_notorch, "--keep-files")
    text = recipe.with_suffix(".lock").read_text()
    assert text.count("step = -1") == 2
    # Nothing is asked: every wheel lies beside the lock.
    recipe.with_suffix(".lock").write_text(text.replace(index, "http://files.invalid"))
    try:
        imgkit_json("build", recipe, "--locked", "--base", standin_notorch, "--no-test")
        assert set(PACKAGES) <= installed().keys()
    finally:
        docker("image", "rm", "--force", TAG)
