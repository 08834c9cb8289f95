"""Locks that a real base resolves, from an index that wants a password: versions, sources, Ctrl-C."""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import IMGKIT, docker, expect_failure, host_address, imgkit, imgkit_json, until
from package_index import QuietHandler, file_sha256, serve_folder, write_links, write_wheel

from imgkit_builder.recipe import lock_file

pytestmark = pytest.mark.docker

NAME = f"imgkit-test-lock-{os.getpid()}"
WORD = "word-of-imgkit"
WHEELS = {
    "imgkit-test-one": {"1.0": (), "2.0": ("imgkit-test-two",)},
    "imgkit-test-two": {"1.0": (), "1.5": ()},
}


class GuardedHandler(QuietHandler):
    """Serves files to clients that send the password."""

    def do_GET(self):
        """Serve a file, or ask for the password."""
        if self.headers.get("Authorization") == f"Basic {base64.b64encode(f'me:{WORD}'.encode()).decode()}":
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()


def source(folder, name):
    """A source distribution, whose wheel must be built."""
    file = folder / f"{name}-3.0.tar.gz"
    members = {
        "setup.py": f"from setuptools import setup\nsetup(name={name!r}, version='3.0', py_modules=[])\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n",
    }
    with tarfile.open(file, "w:gz") as archive:
        for member, text in members.items():
            info = tarfile.TarInfo(f"{name}-3.0/{member}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A package index, as containers see it."""

    address: str
    folder: Path

    @property
    def options(self):
        """The options of a pip step that uses it alone."""
        url = f"http://me:{WORD}@{self.address}/"
        host = self.address.partition(":")[0]
        return f"[--index-url, {url!r}, --trusted-host, {host}, --retries, '0', --no-build-isolation]"

    def add(self, name, *files, hashed=True):
        """List `files` as those of the package `name`."""
        write_links(self.folder / name, files, hashed=hashed)


@pytest.fixture
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    with serve_folder(folder, host_address(), handler=GuardedHandler) as address:
        index = Index(address=address, folder=folder)
        for name, versions in WHEELS.items():
            (folder / name).mkdir()
            files = [
                write_wheel(folder / name, name, version, requires=requires)
                for version, requires in versions.items()
            ]
            # The index states no sha256 of the second package.
            index.add(name, *files, hashed=name.endswith("one"))
        (folder / "imgkit-test-built").mkdir()
        index.add("imgkit-test-built", source(folder / "imgkit-test-built", "imgkit-test-built"))
        yield index


def recipe(folder, index, *steps):
    file = folder / f"{NAME}.yaml"
    pip = "".join(f"    - packages: [{step}]\n      options: {index.options}\n" for step in steps)
    file.write_text(f"image:\n  base: registry.invalid/base:1\n  pip:\n{pip}")
    return file


def locked(file):
    (part,) = lock_file.read_lock(file.with_suffix(".lock")).platforms
    return part


def pip_changes(answer):
    """Return the old and the new version of each changed pip package; a new one has no old version."""
    changes = [change for change in answer["changes"] if change["kind"] == "pip"]
    return {change["name"]: (change["old"], change["new"]) for change in changes}


def containers():
    lines = docker("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Command}}").splitlines()
    return [line.split()[0] for line in lines if "imgkit-test-slow" in line]


def test_base_resolves_a_lock_that_holds_no_password(index, standin_notorch, tmp_path):
    file = recipe(tmp_path, index, "imgkit-test-two<1.5", "imgkit-test-one")
    answer = imgkit_json("lock", file, "--base", standin_notorch)
    part = locked(file)
    assert [(wheel.step, wheel.name, wheel.version) for wheel in part.pip] == [
        (0, "imgkit-test-two", "1.0"),
        (1, "imgkit-test-one", "2.0"),
    ]
    two = index.folder / "imgkit-test-two/imgkit_test_two-1.0-py3-none-any.whl"
    assert part.pip[0].sha256 == file_sha256(two)
    assert part.pip[1].url.startswith(f"http://{index.address}/imgkit-test-one/")
    assert WORD not in file.with_suffix(".lock").read_text()
    assert list(pip_changes(answer).values()) == [("", "1.0"), ("", "2.0")]
    assert docker("images", "--quiet", "imgkit-lock") == ""


@pytest.mark.soak
def test_versions_stay_until_an_upgrade(index, standin_notorch, tmp_path):
    file = recipe(tmp_path, index, "imgkit-test-one==1.0, imgkit-test-two<1.5")
    imgkit_json("lock", file, "--base", standin_notorch)
    recipe(tmp_path, index, "imgkit-test-one, imgkit-test-two")
    assert imgkit_json("lock", file, "--base", standin_notorch)["changes"] == []
    before = file.with_suffix(".lock").read_bytes()
    answer = imgkit_json("lock", file, "--base", standin_notorch, "--upgrade", "Imgkit.Test_One", "--dry-run")
    assert pip_changes(answer) == {"imgkit-test-one": ("1.0", "2.0")}
    assert file.with_suffix(".lock").read_bytes() == before
    recipe(tmp_path, index, "imgkit-test-one, imgkit-test-two>=1.5")
    imgkit_json("lock", file, "--base", standin_notorch)
    assert [wheel.version for wheel in locked(file).pip] == ["1.0", "1.5"]


@pytest.mark.soak
def test_source_is_refused_and_its_wheel_kept(index, standin_notorch, tmp_path):
    file = recipe(tmp_path, index, "imgkit-test-built", "imgkit-test-one")
    expect_failure(
        imgkit("lock", file, "--base", standin_notorch),
        2,
        f"{file.name}:4",
        "no index has a wheel of imgkit-test-built",
        "--keep-files",
    )
    assert not file.with_suffix(".lock").exists()
    imgkit_json("lock", file, "--base", standin_notorch, "--keep-files")
    built, first, second = locked(file).pip
    assert (built.kept, built.url, first.kept) == (True, "", False)
    folder = tmp_path / f"{NAME}.lock.files"
    assert sorted(path.name for path in folder.iterdir()) == sorted((built.file, first.file, second.file))
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
def test_interrupted_lock_leaves_nothing(index, standin_notorch, tmp_path, number):
    file = recipe(tmp_path, index, "imgkit-test-slow")
    requested = threading.Event()
    released = threading.Event()

    class Handler(GuardedHandler):
        def do_GET(self):
            requested.set()
            released.wait(60)

    with serve_folder(index.folder, host_address(), handler=Handler) as address:
        file.write_text(file.read_text().replace(index.address, address))
        argv = [*IMGKIT, "lock", file, "--base", standin_notorch]
        with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
            assert requested.wait(60)
            assert containers()
            process.send_signal(number)
            assert process.wait(30) == 130
        released.set()
    until(lambda: not containers(), within_s=30)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.soak
def test_unknown_package_is_named_with_the_words_of_pip(index, standin_notorch, tmp_path):
    file = recipe(tmp_path, index, "imgkit-test-one", "imgkit-test-nine")
    result = expect_failure(
        imgkit("lock", file, "--base", standin_notorch),
        2,
        f"{file.name}:6",
        "No matching distribution found for imgkit-test-nine",
    )
    assert WORD not in result.stderr
