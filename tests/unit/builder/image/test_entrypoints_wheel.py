"""The entry-point wheel: same bytes wherever it is cut, and a wheel that pip takes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import imgkit_builder
import imgkit_entrypoints
import imgkit_recipes
from imgkit_builder.image import wheel as wheels
from imgkit_builder.image.wheel import make_wheel, wheel_name
from imgkit_entrypoints.cli.commands import COMMANDS

CUT = """
import hashlib
import imgkit_entrypoints
from imgkit_builder.image.wheel import make_wheel
print(imgkit_entrypoints.__file__, hashlib.sha256(make_wheel()).hexdigest())
"""


def sources() -> list[Path]:
    return [Path(module.__file__).parent for module in (imgkit_builder, imgkit_entrypoints, imgkit_recipes)]  # type: ignore[arg-type]


def cut(path: Path) -> str:
    """The wheel's sha256 as an interpreter sees it that finds imgkit at `path`."""
    process = subprocess.run(
        [sys.executable, "-c", CUT],
        env={**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    file, sha256 = process.stdout.split()
    assert file.startswith(str(path))
    return sha256


def test_same_bytes_from_site_packages(tmp_path):
    site = tmp_path / "site"
    for package in sources():
        shutil.copytree(package, site / package.name)
    for stray in ("__pycache__/x.cpython-310.pyc", "tests/test_x.py"):
        (site / "imgkit_entrypoints" / stray).parent.mkdir(exist_ok=True)
        (site / "imgkit_entrypoints" / stray).write_bytes(b"stale")
    for path in site.rglob("*"):
        path.chmod(0o700)
    assert cut(site) == hashlib.sha256(make_wheel()).hexdigest()


def test_record_names_every_member():
    archive = zipfile.ZipFile(io.BytesIO(make_wheel()))
    names = archive.namelist()
    rows = []
    for name in names[:-1]:
        data = archive.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append([name, f"sha256={digest}", str(len(data))])
    record = archive.read(names[-1]).decode()
    assert names[-1].endswith("/RECORD")
    assert list(csv.reader(record.splitlines())) == [*rows, [names[-1], "", ""]]


def test_no_times_tests_or_caches():
    archive = zipfile.ZipFile(io.BytesIO(make_wheel()))
    assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert not re.search("__pycache__|/tests/", " ".join(archive.namelist()))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty virtual environment with pip."""
    folder = tmp_path_factory.mktemp("venv") / "v"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    return folder


def install(environment: Path, wheel: Path) -> None:
    pip = (environment / "bin/python", "-m", "pip", "install", "-q", "--no-cache-dir")
    subprocess.run([*pip, "--no-index", "--no-deps", "--force-reinstall", wheel], check=True)


def test_pip_installs_running_commands(environment, tmp_path):
    (tmp_path / wheel_name()).write_bytes(make_wheel())
    install(environment, tmp_path / wheel_name())
    for command in COMMANDS:
        assert os.access(environment / "bin" / command.name, os.X_OK)
    checked = subprocess.run(
        [environment / "bin/python", "-m", "pip", "check"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    # A json.py in the current folder and on PYTHONPATH must not reach the command.
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    report = subprocess.run(
        [environment / "bin/dist-env", "--json"],
        cwd=tmp_path,
        env={"PATH": f"{environment}/bin:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith("{")


def test_changed_wheel_replaces_its_equal(environment, tmp_path, monkeypatch):
    path = tmp_path / wheel_name()
    path.write_bytes(make_wheel())
    install(environment, path)
    contents = dict(wheels.entrypoints_files())
    contents["imgkit_entrypoints/__init__.py"] += b"CHANGED = True\n"
    monkeypatch.setattr(wheels, "entrypoints_files", contents.items)
    path.write_bytes(make_wheel())
    install(environment, path)
    code = "import imgkit_entrypoints; assert imgkit_entrypoints.CHANGED"
    subprocess.run([environment / "bin/python", "-I", "-c", code], check=True)
