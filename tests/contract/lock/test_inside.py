"""The program that resolves a step in a base: with a real pip and an index, and with a stand-in for apt."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program
from package_index import serve_folder, write_links, write_wheel

from imgkit_builder.lock import inside

WHEELS = {"imgkit-test-one": ["1.0", "2.0"], "imgkit-test-two": ["1.5"]}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve an index of `WHEELS` that states no sha256."""
    folder = tmp_path_factory.mktemp("index")
    for name, versions in WHEELS.items():
        (folder / name).mkdir()
        wheels = [write_wheel(folder / name, name, version) for version in versions]
        write_links(folder / name, wheels, hashed=False)
    with serve_folder(folder) as address:
        yield f"http://{address}"


def write_settings(folder: Path, keep_files: bool, steps: Any, *debs: tuple[str, str]) -> None:
    settings = {"keep_files": keep_files, "debs": debs, "steps": steps}
    (folder / "settings.json").write_text(json.dumps(settings))


def resolve(folder: Path, index: str, *packages: str, keep_files: bool = False, **pins: str) -> Path:
    """Run the program for a last pip step in `folder`, and return the folder of its answers."""
    options = ["--index-url", index, "--no-build-isolation"]
    steps = {"0": {"options": options, "pins": {f"imgkit-test-{name}": pin for name, pin in pins.items()}}}
    shutil.copy(inside.__file__, folder / "inside.py")
    write_settings(folder, keep_files, steps)
    env = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    argv = [sys.executable, str(folder / "inside.py"), "0", "install", "--no-cache-dir", *options, *packages]
    subprocess.run(argv, env=env, check=True, timeout=120)
    return folder / "out"


def report(out: Path) -> dict[str, Any]:
    return {item["name"]: item for item in json.loads((out / "pip-0.json").read_text())}


def test_report_has_the_sha256_that_the_index_lacks(index, tmp_path):
    out = resolve(tmp_path, index, "imgkit-test-one", "imgkit-test-two", one="1.0", two="0.9")
    items = report(out)
    one = items["imgkit-test-one"]
    # The pin that fits stays; the other one is dropped.
    assert len(items) == 2
    assert (one["version"], items["imgkit-test-two"]["version"]) == ("1.0", "1.5")
    assert one["url"].startswith(f"{index}/imgkit-test-one/")
    assert len(one["sha256"]) == 64
    assert not one["direct"]
    assert not list((out / "files").iterdir())


def test_kept_files_are_those_of_the_report(index, tmp_path):
    out = resolve(tmp_path, index, "imgkit-test-one", keep_files=True)
    (file,) = (out / "files").iterdir()
    assert file.name == "imgkit_test_one-2.0-py3-none-any.whl"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == report(out)["imgkit-test-one"]["sha256"]


def test_failure_has_its_step_and_the_output_of_pip(index, tmp_path):
    out = resolve(tmp_path, index, "imgkit-test-one==9")
    step, _, output = (out / "failed.txt").read_text().partition("\n")
    assert step == "0"
    assert "No matching distribution found for imgkit-test-one==9" in output
    # A later step does not run.
    assert "9" in (resolve(tmp_path, index, "imgkit-test-two") / "failed.txt").read_text()
    assert not (out / "pip-0.json").exists()


APT_GET = """
echo "$@" >> "$LOG"
case "$*" in
*--print-uris*ForceHash=SHA256*) echo "'http://a.example/x.deb' x_1_all.deb 5 SHA256:00" ;;
*no-such*) echo "E: Unable to locate package no-such" >&2; exit 100 ;;
esac
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which the program has a stand-in for apt-get, whose calls are in ``log``."""
    write_program(tmp_path / "apt-get", APT_GET)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    for name in ("DEBIAN_FRONTEND", "LC_ALL"):
        monkeypatch.setenv(name, "")
    out = tmp_path / "out"
    paths = {"FOLDER": tmp_path, "OUT": out, "FILES": out / "files", "FAILED": out / "failed.txt"}
    paths |= {"ARCHIVES": tmp_path / "archives", "PREFERENCES": tmp_path / "pins"}
    for name, path in paths.items():
        monkeypatch.setattr(inside, name, path)
    return tmp_path


def test_apt_states_sha256_and_keeps_locked_versions(base):
    write_settings(base, False, {}, ("jq", "1.6"))
    inside.main("apt", ["jq", "x"])
    assert (base / "out/apt.txt").read_text() == "'http://a.example/x.deb' x_1_all.deb 5 SHA256:00\n"
    assert (base / "pins").read_text() == "Package: jq\nPin: version 1.6\nPin-Priority: 1001\n\n"
    # Nothing is installed where no pip step follows.
    assert len((base / "log").read_text().splitlines()) == 2


@pytest.mark.parametrize(("keep_files", "steps"), [(True, {}), (False, {"0": {}})])
def test_apt_installs_for_a_later_step_only(base, keep_files, steps):
    write_settings(base, keep_files, steps)
    inside.main("apt", ["jq"])
    assert ("--download-only" in (base / "log").read_text().splitlines()[2]) == keep_files


def test_failure_of_apt_is_written(base):
    write_settings(base, True, {})
    inside.main("apt", ["no-such"])
    assert (base / "out/failed.txt").read_text() == "apt\nE: Unable to locate package no-such\n"
