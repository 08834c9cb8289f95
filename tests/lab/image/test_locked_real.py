"""Locked builds on a real engine: packages from servers, from the snapshot service, and without a network."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import http.server
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import docker, host_address, imgkit, imgkit_json

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedDeb, LockedPlatform, LockedWheel

pytestmark = pytest.mark.docker

NAME = f"imgkit-test-locked-{os.getpid()}"
TAG = f"{NAME}:latest"
BASE = f"{NAME}-base:1"
EPOCH = 1700000000
SNAPSHOT = "archive/debian/20231115T221320Z"
"""The place in the snapshot service a day after the lock."""
NOWHERE = "http://127.0.0.1:9"
"""A port that nobody serves."""
RECIPE = """
image:
  base: registry.invalid/base:1
  apt: [imgkit-test-user]
  pip:
    - packages: [imgkit-test-wheel]
"""
DEBS = {
    "imgkit-test-user": "Depends: imgkit-test-needed\n",
    "imgkit-test-needed": "",
}


class StillHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Ignore."""


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def deb(folder: Path, name: str, more: str) -> Path:
    """A package whose script makes a user."""
    tree = folder / f"{name}-tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: 1.5\nArchitecture: all\nMaintainer: x <x@example.org>\n{more}"
        "Description: a test\n"
    )
    script = tree / "DEBIAN" / "postinst"
    script.write_text(f"#!/bin/sh\nset -e\nuseradd --system --no-create-home {name}\n")
    script.chmod(0o755)
    file = folder / f"{name}_1.5_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True, capture_output=True)
    return file


def wheel(folder: Path) -> Path:
    about = "imgkit_test_wheel-1.5.dist-info"
    members = {
        "imgkit_test_wheel.py": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: imgkit-test-wheel\nVersion: 1.5\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"imgkit_test_wheel.py,,\n{about}/METADATA,,\n",
    }
    file = folder / "imgkit_test_wheel-1.5-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A folder that a server shows to containers."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One Debian package in the archive, one in the snapshot service only, and an index of wheels."""
    address = host_address()
    folder = tmp_path_factory.mktemp("site")
    for place in ("debian/pool/main/i", f"{SNAPSHOT}/pool/main/i", "simple/imgkit-test-wheel"):
        (folder / place).mkdir(parents=True)
    user, needed = (deb(folder, name, more) for name, more in DEBS.items())
    user.rename(folder / "debian/pool/main/i" / user.name)
    needed.rename(folder / SNAPSHOT / "pool/main/i" / needed.name)
    file = wheel(folder / "simple/imgkit-test-wheel")
    (folder / "simple/imgkit-test-wheel/index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    handler = functools.partial(StillHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer((address, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Site(folder=folder, url=f"http://{address}:{server.server_port}")
    server.shutdown()


@pytest.fixture(scope="module")
def base(site: Site, standin_notorch: str) -> Iterator[str]:
    """A base whose pip knows the index, and whose snapshot service is the server's."""
    host = site.url.rpartition(":")[0].removeprefix("http://")
    index = f"PIP_INDEX_URL={site.url}/simple PIP_TRUSTED_HOST={host}"
    text = f"FROM {standin_notorch}\nENV IMGKIT_SNAPSHOT={site.url} {index}\n"
    docker("build", "--quiet", "--tag", BASE, "-", given=text)
    yield BASE
    docker("image", "rm", "--force", BASE)


@pytest.fixture
def recipe(site: Site, base: str, tmp_path: Path) -> Iterator[Path]:
    """A recipe with its lock."""
    file = tmp_path / f"{NAME}.yaml"
    file.write_text(RECIPE)
    write(file, locked(file, site, base))
    yield file
    docker("image", "rm", "--force", TAG)


def locked(file: Path, site: Site, base: str) -> LockedPlatform:
    found = {path.name: path for path in site.folder.rglob("*_1.5_all.deb")}
    debs = []
    for name in sorted(DEBS):
        path = found[f"{name}_1.5_all.deb"]
        debs.append(
            LockedDeb(
                name=name,
                version="1.5",
                architecture="all",
                file=path.name,
                url=f"{site.url}/debian/pool/main/i/{path.name}",
                sha256=sha256(path),
                size_bytes=path.stat().st_size,
            )
        )
    (path,) = site.folder.rglob("*.whl")
    return LockedPlatform(
        platform=docker("image", "inspect", base, "--format", "{{.Os}}/{{.Architecture}}"),
        source_date_epoch=EPOCH,
        request=lock_file.request_of(load(file), base=base),
        base=LockedBase(name=base, id=docker("image", "inspect", base, "--format", "{{.Id}}")),
        apt=tuple(debs),
        pip=(
            LockedWheel(
                step=0,
                name="imgkit-test-wheel",
                version="1.5",
                file=path.name,
                url=f"{site.url}/simple/imgkit-test-wheel/{path.name}",
                sha256=sha256(path),
            ),
        ),
    )


def write(recipe: Path, part: LockedPlatform) -> None:
    recipe.with_suffix(".lock").write_text(
        lock_file.text(Lock(recipe=recipe.stem, imgkit="0.3.0", platforms=(part,)))
    )


def in_image(script: str) -> list[str]:
    return docker("run", "--rm", "--entrypoint", "sh", TAG, "-c", script).splitlines()


def test_locked_packages_and_nothing_else_are_in_the_image(recipe: Path, base: str) -> None:
    answer = imgkit_json("build", recipe, "--base", base, "--no-test", "--locked")
    assert answer["locked"]
    script = (
        "id -nu imgkit-test-user; apt-mark showauto | grep imgkit; apt-mark showmanual | grep imgkit;"
        "python3 -c 'import imgkit_test_wheel'; ls /opt/imgkit /var/lib/apt/lists /var/cache/apt/archives"
    )
    found = in_image(f"cd /; {script}")
    assert found[:3] == ["imgkit-test-user", "imgkit-test-needed", "imgkit-test-user"]
    assert "lock.toml" in found
    assert not [line for line in found if "locked" in line or line.endswith(".deb") or "wheel" in line]
    shown = "\n".join(in_image("cat /opt/imgkit/lock.toml")) + "\n"
    assert hashlib.sha256(shown.encode()).hexdigest() == answer["labels"]["imgkit.lock.sha256"]


def test_kept_files_need_no_network(recipe: Path, site: Site, base: str) -> None:
    cut = f"{NAME}-cut:1"
    proxies = " ".join(f"{name}={NOWHERE}" for name in ("http_proxy", "https_proxy", "PIP_INDEX_URL"))
    docker("build", "--quiet", "--tag", cut, "-", given=f"FROM {base}\nENV {proxies}\n")
    try:
        part = locked(recipe, site, cut)
        write(recipe, part)
        kept = recipe.with_suffix(".lock.files")
        kept.mkdir()
        for file in (*site.folder.rglob("*_1.5_all.deb"), *site.folder.rglob("*.whl")):
            (kept / file.name).write_bytes(file.read_bytes())
        done = imgkit("build", recipe, "--base", cut, "--no-test")
        assert done.returncode == 0, done.stderr
        assert "3 of them kept here" in done.stderr
        assert in_image("id -nu imgkit-test-needed; ls /opt/imgkit | grep locked || :") == [
            "imgkit-test-needed"
        ]
        with next(kept.glob("*.whl")).open("ab") as file:
            file.write(b"x")
        done = imgkit("build", recipe, "--base", cut, "--no-test", "--no-cache")
        assert done.returncode == 1
        assert "imgkit_test_wheel-1.5-py3-none-any.whl: its sha256 is" in done.stderr
    finally:
        docker("image", "rm", "--force", cut)


@pytest.mark.soak
def test_vanished_or_other_package_is_named_with_its_line(recipe: Path, site: Site, base: str) -> None:
    part = locked(recipe, site, base)
    first, second = part.apt
    write(recipe, dataclasses.replace(part, apt=(first, dataclasses.replace(second, sha256="0" * 64))))
    done = imgkit("build", recipe, "--base", base, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:4: step " in done.stderr
    assert "snapshot service: imgkit-test-user_1.5_all.deb" in done.stderr
    assert f"imgkit lock {NAME}.yaml --keep-files" in done.stderr
    assert f"imgkit lock {NAME}.yaml --upgrade" in done.stderr
    write(recipe, dataclasses.replace(part, pip=(dataclasses.replace(part.pip[0], sha256="0" * 64),)))
    done = imgkit("build", recipe, "--base", base, "--no-test")
    assert done.returncode == 4
    assert f"{NAME}.yaml:6: step " in done.stderr
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert docker("image", "ls", "--quiet", TAG) == ""
