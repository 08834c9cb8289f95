"""The distribution as users get it: a wheel, installed (not editable) into a fresh environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import imgkit_entrypoints
from imgkit_entrypoints.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"imgkit_builder", "imgkit_recipes", "imgkit_entrypoints"}
BUILD = "import sys, hatchling.build as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
"""Program that calls the backend that pyproject.toml names, and prints the name of the file."""


def run(*argv, cwd=ROOT):
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SOURCE_DATE"))
    }
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def output(*argv, cwd=ROOT):
    """Return what a program prints; it must succeed."""
    result = run(*argv, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return folder / output(sys.executable, "-c", BUILD, "build_wheel", folder).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    return folder / output(sys.executable, "-c", BUILD, "build_sdist", folder).splitlines()[-1]


def install(file, folder, *options):
    """Install a wheel or sdist into a new environment in `folder`, and return its ``bin``.

    A path file lends it this environment's dependencies, so that nothing is downloaded. Python reads no
    path files in there, such as that of the editable install of this checkout.
    """
    output(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    packages = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python)
    output(*pip, "install", "--quiet", "--no-deps", "--no-index", *options, file)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the ``bin`` of an environment that holds the wheel."""
    return install(wheel, tmp_path_factory.mktemp("venv"))


def test_wheel_holds_the_packages_and_their_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    data = {
        path.relative_to(ROOT / "recipes").as_posix()
        for path in (ROOT / "recipes/imgkit_recipes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(data) > 10
    assert data - names == set()


@pytest.mark.parametrize("name", ["recipes", "builder", "entrypoints", "ci"])
def test_checkout_folders_are_no_packages(name):
    # A top-level module `entrypoints` would shadow a real package that Jupyter installs in NGC images.
    assert not (ROOT / name / "__init__.py").exists()


def test_installed_wheel_is_not_the_checkout(installed, tmp_path):
    code = "import imgkit_builder, imgkit_entrypoints; print(imgkit_builder.__file__)"
    assert str(ROOT) not in output(installed / "python", "-c", code, cwd=tmp_path)


def test_installed_wheel_and_sdist_render_as_the_checkout(installed, sdist, tmp_path_factory, tmp_path):
    from_sdist = install(sdist, tmp_path_factory.mktemp("venv"), "--no-build-isolation")
    dockerfile = output(sys.executable, "-m", "imgkit_builder", "render", "mn5", cwd=tmp_path)
    assert "FROM nvcr.io/nvidia/pytorch:24.03-py3" in dockerfile
    assert output(installed / "imgkit", "render", "mn5", cwd=tmp_path) == dockerfile
    assert output(from_sdist / "imgkit", "render", "mn5", cwd=tmp_path) == dockerfile
    assert "mn5" in output(installed / "imgkit", "list", cwd=tmp_path).split()


def test_command_named_like_the_package_is_imgkit(installed, tmp_path):
    assert output(installed / "imgkit-hpc", "render", "cpu", cwd=tmp_path).startswith("# ")
    assert run(installed / "imgkit-hpc", "render", "mn55", cwd=tmp_path).returncode == 2


def test_unknown_recipe_is_refused(installed, tmp_path):
    result = run(installed / "imgkit", "render", "mn55", cwd=tmp_path)
    assert result.returncode == 2
    assert "mn5" in result.stderr
    assert "Traceback" not in result.stderr


def test_installed_wheel_has_every_command_of_the_image(installed, tmp_path):
    assert {path.name for path in installed.glob("dist-*")} == {command.name for command in COMMANDS}
    result = run(installed / "dist-pi", "--dry-run", "--json", cwd=tmp_path)
    assert '"mode": "torchrun"' in result.stdout, result.stderr


def test_command_of_another_name_is_refused(installed, tmp_path):
    result = run(shutil.copy(installed / "dist-pi", tmp_path / "dist-tau"), cwd=tmp_path)
    assert result.returncode == 2
    assert "dist-tau: unknown command 'dist-tau'" in result.stderr


def test_package_index_would_take_wheel_and_sdist(wheel, sdist):
    twine = (sys.executable, "-m", "twine", "check", "--strict")
    assert output(*twine, wheel, sdist).count("PASSED") == 2


def test_sdist_holds_what_a_reader_of_it_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/index.md", "ci/check"} <= names
    assert [name for name in names if name.startswith((".venv", "build/", "docs/reference/generated"))] == []


def test_version_has_a_heading_in_the_changelog():
    version = re.escape(imgkit_entrypoints.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?{version}\]?", changelog, re.MULTILINE)


def copy_checkout(folder, time_s, umask):
    """Copy the tracked files, as another clone has them: other times, and modes by another umask."""
    for name in output("git", "ls-files", "-z").split("\0"):
        source, target = ROOT / name, folder / name
        if not name or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod((0o777 if os.access(source, os.X_OK) else 0o666) & ~umask)
        os.utime(target, (time_s, time_s))
    return folder


def test_two_builds_of_one_commit_are_the_same_bytes(tmp_path):
    if run("git", "rev-parse").returncode:
        pytest.skip("not a git checkout")
    builds = []
    for folder, time_s, umask in (("one", 1_600_000_000, 0o022), ("a longer/path/two", 1_700_000_000, 0o077)):
        checkout = copy_checkout(tmp_path / folder, time_s, umask)
        for target in ("build_wheel", "build_sdist"):
            output(sys.executable, "-c", BUILD, target, "out", cwd=checkout)
        builds.append({path.name: path.read_bytes() for path in (checkout / "out").iterdir()})
    assert sorted(Path(name).suffix for name in builds[0]) == [".gz", ".whl"]
    assert builds[0] == builds[1]
