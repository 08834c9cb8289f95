"""Locks that a real base resolves, from an index that wants a password: versions, sources, Ctrl-C."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import io
import os
import signal
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import IMGKIT, docker, host_address, imgkit, imgkit_json, until

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import LockedPlatform

pytestmark = pytest.mark.docker

NAME = f"imgkit-test-lock-{os.getpid()}"
WORD = "word-of-imgkit"
WHEELS = {
    "imgkit-test-one": {"1.0": (), "2.0": ("imgkit-test-two",)},
    "imgkit-test-two": {"1.0": (), "1.5": ()},
}


class GuardedHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files to who knows the password, and logs nothing."""

    def do_GET(self) -> None:
        """Serve a file, or ask for the password."""
        if self.headers.get("Authorization") == f"Basic {base64.b64encode(f'me:{WORD}'.encode()).decode()}":
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Ignore."""


def wheel(folder: Path, name: str, version: str, needs: tuple[str, ...]) -> Path:
    module = name.replace("-", "_")
    file, about = folder / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members = {
        f"{module}.py": "",
        f"{about}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in needs),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return file


def source(folder: Path, name: str) -> Path:
    """A source distribution, whose wheel must be built."""
    file = folder / f"{name}-3.0.tar.gz"
    members = {
        "setup.py": f"from setuptools import setup\nsetup(name={name!r}, version='3.0', py_modules=[])\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n",
    }
    with tarfile.open(file, "w:gz") as archive:
        for member, text in members.items():
            about = tarfile.TarInfo(f"{name}-3.0/{member}")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text.encode()))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A package index, as containers see it."""

    address: str
    folder: Path

    @property
    def options(self) -> str:
        """The options of a pip step that uses it alone."""
        url = f"http://me:{WORD}@{self.address}/"
        host = self.address.partition(":")[0]
        return f"[--index-url, {url!r}, --trusted-host, {host}, --retries, '0', --no-build-isolation]"

    def add(self, name: str, *files: Path, hashed: bool = True) -> None:
        """List `files` as those of the package `name`."""
        links = ""
        for file in files:
            digest = f"#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}" if hashed else ""
            links += f'<a href="{file.name}{digest}">{file.name}</a>\n'
        (self.folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    gateway = host_address()
    folder = tmp_path_factory.mktemp("index")
    handler = functools.partial(GuardedHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer((gateway, 0), handler)
    made = Index(address=f"{gateway}:{server.server_port}", folder=folder)
    for name, versions in WHEELS.items():
        (folder / name).mkdir()
        files = [wheel(folder / name, name, version, needs) for version, needs in versions.items()]
        # The index states no sha256 of the second package.
        made.add(name, *files, hashed=name.endswith("one"))
    (folder / "imgkit-test-built").mkdir()
    made.add("imgkit-test-built", source(folder / "imgkit-test-built", "imgkit-test-built"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()


def recipe(folder: Path, index: Index, *steps: str) -> Path:
    file = folder / f"{NAME}.yaml"
    pip = "".join(f"    - packages: [{step}]\n      options: {index.options}\n" for step in steps)
    file.write_text(f"image:\n  base: registry.invalid/base:1\n  pip:\n{pip}")
    return file


def locked(file: Path) -> LockedPlatform:
    (part,) = lock_file.read(file.with_suffix(".lock")).platforms
    return part


def containers() -> list[str]:
    lines = docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Command}}").splitlines()
    return [line.split()[0] for line in lines if "imgkit-test-slow" in line]


def test_base_resolves_a_lock_that_holds_no_password(
    index: Index, standin_notorch: str, tmp_path: Path
) -> None:
    file = recipe(tmp_path, index, "imgkit-test-two<1.5", "imgkit-test-one")
    done = imgkit_json("lock", file, "--base", standin_notorch)
    part = locked(file)
    assert [(one.step, one.name, one.version) for one in part.pip] == [
        (0, "imgkit-test-two", "1.0"),
        (1, "imgkit-test-one", "2.0"),
    ]
    two = index.folder / "imgkit-test-two/imgkit_test_two-1.0-py3-none-any.whl"
    assert part.pip[0].sha256 == hashlib.sha256(two.read_bytes()).hexdigest()
    assert part.pip[1].url.startswith(f"http://{index.address}/imgkit-test-one/")
    assert WORD not in file.with_suffix(".lock").read_text()
    assert [one["new"] for one in done["changes"] if one["kind"] == "pip"] == ["1.0", "2.0"]
    assert docker("images", "--quiet", "imgkit-lock") == ""


@pytest.mark.soak
def test_versions_stay_until_an_upgrade(index: Index, standin_notorch: str, tmp_path: Path) -> None:
    file = recipe(tmp_path, index, "imgkit-test-one==1.0, imgkit-test-two<1.5")
    imgkit_json("lock", file, "--base", standin_notorch)
    recipe(tmp_path, index, "imgkit-test-one, imgkit-test-two")
    assert imgkit_json("lock", file, "--base", standin_notorch)["changes"] == []
    before = file.with_suffix(".lock").read_bytes()
    done = imgkit_json("lock", file, "--base", standin_notorch, "--upgrade", "Imgkit.Test_One", "--dry-run")
    changed = {one["name"]: (one["old"], one["new"]) for one in done["changes"] if one["kind"] == "pip"}
    assert changed == {"imgkit-test-one": ("1.0", "2.0")}
    assert file.with_suffix(".lock").read_bytes() == before
    recipe(tmp_path, index, "imgkit-test-one, imgkit-test-two>=1.5")
    imgkit_json("lock", file, "--base", standin_notorch)
    assert [one.version for one in locked(file).pip] == ["1.0", "1.5"]


@pytest.mark.soak
def test_source_is_refused_and_its_wheel_kept(index: Index, standin_notorch: str, tmp_path: Path) -> None:
    file = recipe(tmp_path, index, "imgkit-test-built", "imgkit-test-one")
    refused = imgkit("lock", file, "--base", standin_notorch)
    assert refused.returncode == 2
    assert f"{file.name}:4" in refused.stderr
    assert "no index has a wheel of imgkit-test-built" in refused.stderr
    assert "--keep-files" in refused.stderr
    assert not file.with_suffix(".lock").exists()
    imgkit_json("lock", file, "--base", standin_notorch, "--keep-files")
    built, one, two = locked(file).pip
    assert (built.kept, built.url, one.kept) == (True, "", False)
    folder = tmp_path / f"{NAME}.lock.files"
    assert sorted(path.name for path in folder.iterdir()) == sorted((built.file, one.file, two.file))
    # The wheel that was built stays; building it again would change its bytes.
    assert imgkit_json("lock", file, "--base", standin_notorch)["changes"] == []
    index.add("imgkit-test-one")
    index.add("imgkit-test-two")
    index.add("imgkit-test-built")
    try:
        imgkit_json("build", file, "--base", standin_notorch, "--locked", "--no-test")
        listed = docker("run", "--rm", f"{NAME}:latest", "python3", "-m", "pip", "list")
        assert "imgkit-test-built 3.0" in " ".join(listed.split())
    finally:
        subprocess.run(["docker", "rmi", "--force", f"{NAME}:latest"], capture_output=True, check=False)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_lock_leaves_nothing(
    index: Index, standin_notorch: str, tmp_path: Path, number: signal.Signals
) -> None:
    file = recipe(tmp_path, index, "imgkit-test-slow")
    asked = threading.Event()
    ended = threading.Event()

    class Handler(GuardedHandler):
        def do_GET(self) -> None:
            asked.set()
            ended.wait(60)

    server = http.server.ThreadingHTTPServer((index.address.partition(":")[0], 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file.write_text(
        file.read_text().replace(index.address, f"{server.server_address[0]}:{server.server_port}")
    )
    with subprocess.Popen([*IMGKIT, "lock", file, "--base", standin_notorch], stderr=subprocess.PIPE) as run:
        assert asked.wait(60)
        assert containers()
        run.send_signal(number)
        assert run.wait(30) == 130
    ended.set()
    server.shutdown()
    until(lambda: not containers(), within_s=30)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.soak
def test_unknown_package_is_named_with_the_words_of_pip(
    index: Index, standin_notorch: str, tmp_path: Path
) -> None:
    file = recipe(tmp_path, index, "imgkit-test-one", "imgkit-test-nine")
    done = imgkit("lock", file, "--base", standin_notorch)
    assert done.returncode == 2
    assert f"{file.name}:6" in done.stderr
    assert "No matching distribution found for imgkit-test-nine" in done.stderr
    assert WORD not in done.stderr
