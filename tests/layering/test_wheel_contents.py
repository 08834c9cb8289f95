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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # From this checkout's files, by the backend that pyproject.toml names.
    code = f"import hatchling.build as build; print(build.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import hatchling.build as build; print(build.build_sdist({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel."""
    return install(wheel, tmp_path_factory.mktemp("venv"))


def install(file: Path, folder: Path, *options: str) -> Path:
    """Install a wheel or sdist into a new environment in `folder`; returns its `bin`.

    A path file lends it this environment's dependencies, so that nothing is downloaded.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin/python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        *options,
    ]
    # The lending folder's own path files (among them the editable install of this
    # checkout) are not read: Python does that in site folders only.
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(place.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run([*pip, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_wheel_holds_the_three_packages_only(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_wheel_holds_recipes_and_templates(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = [
        path
        for path in (ROOT / "recipes/imgkit_recipes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert len(data) > 10
    missing = {path.relative_to(ROOT / "recipes").as_posix() for path in data} - inside
    assert missing == set()


@pytest.mark.parametrize("name", ["recipes", "builder", "entrypoints", "ci"])
def test_checkout_folders_are_no_packages(name: str) -> None:
    # A top-level module `entrypoints` would shadow a real package that Jupyter installs in NGC images.
    assert not (ROOT / name / "__init__.py").exists()


def test_installed_wheel_lists_recipes(installed: Path, tmp_path: Path) -> None:
    done = run(installed, str(installed / "imgkit"), "list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mn5" in done.stdout.split()


def test_installed_wheel_renders_as_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = run(installed, str(installed / "imgkit"), "render", "mn5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    here = run(installed, sys.executable, "-m", "imgkit_builder", "render", "mn5", cwd=tmp_path)
    assert done.stdout == here.stdout
    assert "FROM nvcr.io/nvidia/pytorch:24.03-py3" in done.stdout


def test_installed_wheel_is_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import imgkit_builder, imgkit_entrypoints; print(imgkit_builder.__file__)"
    done = run(installed, str(installed / "python"), "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_installed_wheel_has_every_command_of_the_image(installed: Path, tmp_path: Path) -> None:
    assert {path.name for path in installed.glob("dist-*")} == {command.name for command in COMMANDS}
    done = run(installed, str(installed / "dist-pi"), "--dry-run", "--json", cwd=tmp_path)
    assert '"mode": "torchrun"' in done.stdout, done.stderr


def test_command_that_the_package_has_not_is_refused(installed: Path, tmp_path: Path) -> None:
    other = shutil.copy(installed / "dist-pi", tmp_path / "dist-tau")
    done = run(installed, str(other), cwd=tmp_path)
    assert done.returncode == 2
    assert "dist-tau: unknown command 'dist-tau'" in done.stderr


def test_unknown_recipe_is_refused(installed: Path, tmp_path: Path) -> None:
    done = run(installed, str(installed / "imgkit"), "render", "mn55", cwd=tmp_path)
    assert done.returncode == 2
    assert "mn5" in done.stderr
    assert "Traceback" not in done.stderr


def test_package_index_would_take_wheel_and_sdist(wheel: Path, sdist: Path) -> None:
    words = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_package_index_would_refuse_a_broken_file(tmp_path: Path) -> None:
    file = tmp_path / "imgkit_hpc-1-py3-none-any.whl"
    file.write_bytes(b"PK")
    words = [sys.executable, "-m", "twine", "check", "--strict", str(file)]
    assert subprocess.run(words, capture_output=True, timeout=60).returncode != 0


def test_installed_sdist_renders_as_the_wheel(
    installed: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    own = install(sdist, tmp_path_factory.mktemp("venv"), "--no-build-isolation")
    done = run(own, str(own / "imgkit"), "render", "mn5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(installed, str(installed / "imgkit"), "render", "mn5", cwd=tmp_path).stdout


def test_sdist_holds_what_a_reader_of_it_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/index.md", "ci/check"} <= inside
    assert [name for name in inside if name.startswith((".venv", "build/", "docs/reference/generated"))] == []


def test_version_has_a_heading_in_the_changelog() -> None:
    version = re.escape(imgkit_entrypoints.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?{version}\]?", changelog, re.MULTILINE)


TWO_BUILDS = """
import os, sys
import hatchling.build as build
for place in sys.argv[1:]:
    os.chdir(place)
    build.build_wheel("out")
    build.build_sdist("out")
"""


def checkout(folder: Path, time_s: int, umask: int) -> Path:
    """The tracked files, as another clone has them: other times, and modes by another umask."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in os.fsdecode(names).split("\0"):
        source, target = ROOT / name, folder / name
        if not name or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod((0o777 if os.access(source, os.X_OK) else 0o666) & ~umask)
        os.utime(target, (time_s, time_s))
    return folder


def test_two_builds_of_one_commit_are_the_same_bytes(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    places = [
        checkout(tmp_path / "one", 1_600_000_000, 0o022),
        checkout(tmp_path / "a longer/path/two", 1_700_000_000, 0o077),
    ]
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run([sys.executable, "-c", TWO_BUILDS, *places], env=env, check=True, capture_output=True)
    one, two = ({path.name: path.read_bytes() for path in (place / "out").iterdir()} for place in places)
    assert sorted(name.rpartition(".")[2] for name in one) == ["gz", "whl"]
    assert one == two
