"""``inside.py`` with a real pip: this Python stands for the image, and a folder of wheels for the index."""

from __future__ import annotations

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files
from package_index import write_wheel

from imgkit_builder import packages
from imgkit_builder.recipe.requirements import PROTECTED

UV = Path(sys.executable).with_name("uv")
Add = Callable[..., dict[str, Any]]
NVIDIA_TORCH = "2.3.0a0+40ec155e58.nv24.3"


def write_installed(site: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Write the metadata of a package that the image has."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n\nVersion: 9\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of an image with NVIDIA's torch, which pins triton, and with numpy."""
    site = tmp_path / "site"
    write_installed(site, "torch", NVIDIA_TORCH, ("triton==3.0.0", "numpy>=1"))
    write_installed(site, "triton", "3.0.0")
    write_installed(site, "numpy", "1.24.4")
    write_installed(site, "old_debian", "1.0-ubuntu-unknown")
    return site


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """What the index has."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "modern", "1.0", requires=["torch>=2.3", "numpy"])
    write_wheel(wheels, "stale", "1.0", requires=["torch<2.3"])
    write_wheel(wheels, "young", "1.0", requires=["numpy>=2"])
    write_wheel(wheels, "numpy", "2.1.0")
    write_wheel(wheels, "torch", "2.2.0")
    return wheels


@pytest.fixture
def add(tmp_path: Path, site: Path, wheels: Path) -> Add:
    """``add("modern")`` returns the answer for these requirements."""

    def run(
        *requirements: str, replace: tuple[str, ...] = (), python: str | Path = sys.executable
    ) -> dict[str, Any]:
        request = {
            "requirements": requirements,
            "options": ["--no-index", "--find-links", str(wheels)],
            "replace": replace,
            "protected": PROTECTED,
        }
        folder = write_files(tmp_path / "add", {"request.json": json.dumps(request)})
        program = shutil.copy(Path(packages.__file__).with_name("inside.py"), folder)
        env = {**os.environ, "PYTHONPATH": str(site)}
        subprocess.run([python, "-s", program], env=env, check=True, stdout=subprocess.DEVNULL)
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        return answer

    return run


def test_local_prerelease_counts_as_its_release(tmp_path, add):
    answer = add("modern")
    assert [(item["name"], item["version"]) for item in answer["packages"]] == [("modern", "1.0")]
    assert len(answer["packages"][0]["sha256"]) == 64
    assert answer["modules"] == ["modern"]
    assert (tmp_path / "add/root/modern.py").exists()


def test_torch_of_the_image_is_not_replaced(tmp_path, add):
    answer = add("stale")
    assert answer["failure"] == "pip"
    assert "stale 1.0 depends on torch<2.3" in answer["output"]
    assert answer["image"]["torch"] == NVIDIA_TORCH
    assert not (tmp_path / "add/root").exists()


def test_other_package_is_replaced_by_name(add):
    assert {item["name"] for item in add("young", replace=("NumPy",))["packages"]} == {"numpy", "young"}


def test_package_of_the_image_is_a_constraint(add):
    assert "(constraint) numpy==1.24.4" in add("young")["output"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_nothing_replaces_torch_and_its_pins(add, name):
    answer = add("modern", replace=(name,))
    assert (answer["failure"], answer["output"]) == ("protected", name)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without pip."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin/python3"


@pytest.mark.skipif(not UV.exists(), reason="uv is not beside this Python")
def test_uv_fetches_pip_where_the_image_has_none(tmp_path, wheels, add, bare_python, monkeypatch):
    monkeypatch.setenv("PATH", str(UV.parent), prepend=os.pathsep)
    # Debian's ensurepip takes its wheels from a folder of the distribution.
    bundled = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.__file__).parent / "_bundled"
    (pip,) = Path(bundled).glob("pip-*.whl")
    shutil.copy(pip, wheels)
    answer = add("modern", python=bare_python)
    assert [item["name"] for item in answer["packages"]] == ["modern"]
    assert [path.name for path in (tmp_path / "add/root").iterdir() if path.name.startswith("pip")] == []


def test_image_without_pip_and_uv_has_none(add, bare_python, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert add("modern", python=bare_python)["failure"] == "no pip"
