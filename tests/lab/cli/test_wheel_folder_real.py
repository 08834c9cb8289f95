"""docs/guides/no-docker.md: a folder of wheels installs imgkit where no network is."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from labkit import ROOT, output, run

OLDEST = (3, 10)
NO_ROUTE = 'test -z "$(tail -n +2 /proc/net/route)" && exec "$@"'
WITHOUT_ROUTE = ("unshare", "--net", "--", "sh", "-c", NO_ROUTE, "sh")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare (util-linux)"),
]


def other_python():
    """The oldest Python here that imgkit supports, but not the version that runs this test."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders += sorted(Path.home().glob(".pyenv/versions/*/bin"))
    pythons: dict[tuple[int, int], Path] = {}
    for path in (path for folder in folders for path in folder.glob("python3.*")):
        match = re.fullmatch(r"python3\.(\d+)", path.name)
        version = (3, int(match[1])) if match else OLDEST
        if match is None or version < OLDEST or version == sys.version_info[:2] or version in pythons:
            continue
        # A shim of pyenv stands for versions that are not chosen, too, and then fails.
        if run(path, "-c", "import ensurepip").returncode == 0:
            pythons[version] = path
    return pythons[min(pythons)] if pythons else Path("/usr/bin/python3")


def test_folder_of_wheels_installs_without_a_network(tmp_path):
    python = other_python()
    version = output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    output(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
    (wheel,) = wheels.iterdir()
    target = ("--python-version", version, "--platform", f"manylinux2014_{platform.machine()}")
    output(*pip, "download", "-d", wheels, "--only-binary=:all:", *target, wheel, "tomli")
    output(python, "-m", "venv", venv)
    install = ("install", "--no-index", "--find-links", wheels, "imgkit-hpc")
    output(*WITHOUT_ROUTE, venv / "bin/python", "-m", "pip", *install)
    assert output(*WITHOUT_ROUTE, venv / "bin/imgkit", "--version").startswith("imgkit ")
    assert "\nmn5 " in output(*WITHOUT_ROUTE, venv / "bin/imgkit", "list", folder="/")
    compiled = [*venv.rglob("*.so")]  # a node with another processor finds none that it can load
    assert compiled
    for path in compiled:
        path.unlink()
    assert "Usage: imgkit" in output(*WITHOUT_ROUTE, venv / "bin/imgkit", "--help", folder="/")
    verified = run(*WITHOUT_ROUTE, venv / "bin/imgkit", "verify", wheel, folder="/")
    assert verified.returncode in (1, 2)  # it is no image
    assert "ImportError" not in verified.stderr
