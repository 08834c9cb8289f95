"""What a uv project locks, in a real base: its wheels from a server, hashed; conflicts; uv's own locks."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
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

PYPROJECT = """
[project]
name = "my-project"
version = "1.0"
requires-python = ">=3.10"
dependencies = ["imgkit-test-upper"]

[[tool.uv.index]]
url = "INDEX"
default = true
"""
RECIPE = "image:\n  base: registry.invalid/base:1\n  uv: {project: .}\n  args: {PIP_TRUSTED_HOST: HOST}\n"
OWN = """
[[package]]
name = "my-project"
version = "1.0"
source = { virtual = "." }
dependencies = [{ name = "imgkit-test-upper" }]

[package.metadata]
requires-dist = [{ name = "imgkit-test-upper" }]
"""


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
    """An index of the two packages: its address as containers and this machine see it."""
    address = host_address()
    folder = tmp_path_factory.mktemp("index")
    for name, needs in PACKAGES.items():
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


def lock(index: str, folder: Path, **digests: str) -> str:
    """A lock of both packages, with other digests for those of `digests`."""
    text = 'version = 1\nrevision = 3\nrequires-python = ">=3.10"\n' + OWN
    for name, needs in PACKAGES.items():
        file = wheel(folder, name, needs)
        digest = digests.get(name.rpartition("-")[2]) or sha256(file)
        text += f'\n[[package]]\nname = "{name}"\nversion = "1.5"\nsource = {{ registry = "{index}" }}\n'
        wanted = ", ".join(f'{{ name = "{one}" }}' for one in needs)
        text += f"dependencies = [{wanted}]\n"
        text += f'wheels = [{{ url = "{index}/{name}/{file.name}", hash = "sha256:{digest}" }}]\n'
    return text


def project(folder: Path, index: str, lock: str) -> Path:
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("INDEX", index))
    (folder / "uv.lock").write_text(lock)
    file = folder / f"{NAME}.yaml"
    file.write_text(RECIPE.replace("HOST", host_address()))
    return file


def installed() -> dict[str, str]:
    command = ["--entrypoint", "python3", TAG, "-m", "pip", "list", "--format=json"]
    listed = json.loads(docker("run", "--rm", *command).splitlines()[-1])
    return {one["name"]: one["version"] for one in listed}


@pytest.mark.soak
def test_locked_packages_are_in_the_base(index: str, standin_notorch: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index, lock(index, tmp_path))
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
    text = lock(index, tmp_path, lower="0" * 64)
    torch = (
        f'\n[[package]]\nname = "torch"\nversion = "2.0.1"\nsource = {{ registry = "{index}" }}\n'
        f'wheels = [{{ url = "{index}/torch-2.0.1-py3-none-any.whl", hash = "sha256:{"0" * 64}" }}]\n'
    )
    wanting = text.replace('[{ name = "imgkit-test-lower" }]', '[{ name = "torch" }]') + torch
    done = imgkit("build", project(tmp_path, index, wanting), "--base", standin, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:3: step " in done.stderr
    assert "torch: uv.lock has 2.0.1, but the base has 2." in done.stderr
    assert "uv lock --upgrade-package 'torch==2." in done.stderr
    done = imgkit("build", project(tmp_path, index, text), "--base", standin, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:3: step " in done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.soak
def test_lock_of_the_real_uv(index: str, standin_notorch: str, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert uv, "uv is not installed; pip install -e '.[dev]'"
    recipe = project(tmp_path, index, "")
    (tmp_path / "uv.lock").unlink()
    env = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON_DOWNLOADS": "never"}
    output(uv, "lock", "--directory", tmp_path, env=env)
    try:
        imgkit_json("build", recipe, "--base", standin_notorch)
        assert set(PACKAGES) <= installed().keys()
        pyproject = tmp_path / "pyproject.toml"
        pyproject.write_text(pyproject.read_text().replace("-upper", "-upper>=1.5"))
        done = imgkit("check", recipe)
        assert done.returncode == 2
        assert "uv.lock is not up to date" in done.stderr
    finally:
        docker("image", "rm", "--force", TAG)


@pytest.mark.soak
def test_lock_has_the_wheels_of_a_uv_project(index: str, standin_notorch: str, tmp_path: Path) -> None:
    recipe = project(tmp_path, index, lock(index, tmp_path))
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
