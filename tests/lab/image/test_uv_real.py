"""What a uv project locks, in a real base: its wheels from a server, hashed; conflicts; uv's own locks."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import docker, host_address, imgkit, imgkit_json, output

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


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Ignore."""


def wheel(folder: Path, name: str, needs: list[str]) -> Path:
    module = name.replace("-", "_")
    file, about = folder / f"{module}-1.5-py3-none-any.whl", f"{module}-1.5.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n"
    members = {
        f"{module}.py": "",
        f"{about}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in needs),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "".join(f"{path},,\n" for path in (f"{module}.py", f"{about}/METADATA")),
    }
    with zipfile.ZipFile(file, "w") as archive:
        for member, text in members.items():
            archive.writestr(zipfile.ZipInfo(member), text)  # without a time: the same bytes each time
    return file


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index of `WHEELS`: its address as containers and this machine see it."""
    address = host_address()
    folder = tmp_path_factory.mktemp("index")
    for name, needs in WHEELS.items():
        (folder / name).mkdir()
        file = wheel(folder / name, name, needs)
        link = f'<a href="{file.name}#sha256={sha256(file)}">{file.name}</a>'
        (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    handler = functools.partial(SilentHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer((address, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{address}:{server.server_port}"
    server.shutdown()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def project(folder: Path, index: str, package: str = "imgkit-test-upper") -> Path:
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


def installed() -> dict[str, str]:
    command = ["--entrypoint", "python3", TAG, "-m", "pip", "list", "--format=json"]
    listed = json.loads(docker("run", "--rm", *command).splitlines()[-1])
    return {one["name"]: one["version"] for one in listed}


@pytest.mark.soak
def test_locked_packages_are_in_the_base(index: str, standin_notorch: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index)
    try:
        imgkit_json("build", recipe, "--base", standin_notorch, "--no-test")
        found = installed()
        assert {name: found[name] for name in PACKAGES} == dict.fromkeys(PACKAGES, "1.5")
        assert docker(
            "run", "--rm", "--entrypoint", "sh", TAG, "-c", "tail -n 2 /opt/imgkit/constraint.txt"
        ) == ("imgkit-test-lower==1.5\nimgkit-test-upper==1.5")
    finally:
        docker("image", "rm", "--force", TAG)


def test_conflict_and_wrong_hash_name_the_line(index: str, standin: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index, "imgkit-test-torchy")
    done = imgkit("build", recipe, "--base", standin, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:3: step " in done.stderr
    assert "torch: uv.lock has 1.5, but the base has 2." in done.stderr
    assert "uv lock --upgrade-package 'torch==2." in done.stderr
    recipe = project(tmp_path, index)
    lock = tmp_path / "uv.lock"
    lock.write_text(
        re.sub(r"(lower-1\.5\S+ hash = \"sha256:)[0-9a-f]{64}", rf"\g<1>{'0' * 64}", lock.read_text())
    )
    done = imgkit("build", recipe, "--base", standin, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:3: step " in done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr


def test_changed_project_is_refused(index: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index)
    assert imgkit("check", recipe).returncode == 0
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("-upper", "-upper>=2"))
    done = imgkit("check", recipe)
    assert done.returncode == 2
    assert "uv.lock is not up to date" in done.stderr


@pytest.mark.soak
def test_lock_has_the_wheels_of_a_uv_project(index: str, standin_notorch: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index)
    (tmp_path / "lock").mkdir()
    recipe = recipe.rename(tmp_path / "lock" / recipe.name)
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).rename(tmp_path / "lock" / name)
    made = imgkit("lock", recipe, "--base", standin_notorch, "--keep-files")
    assert made.returncode == 0, made.stderr
    text = recipe.with_suffix(".lock").read_text()
    assert text.count("step = -1") == 2
    # Nothing is asked: every wheel lies beside the lock.
    recipe.with_suffix(".lock").write_text(text.replace(index, "http://files.invalid"))
    try:
        imgkit_json("build", recipe, "--locked", "--base", standin_notorch, "--no-test")
        assert set(PACKAGES) <= installed().keys()
    finally:
        docker("image", "rm", "--force", TAG)
