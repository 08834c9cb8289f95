"""Locked builds on a real engine: packages from servers, from the snapshot service, and without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from labkit import docker, expect_failure, expect_success, host_address, imgkit, imgkit_json
from package_index import file_sha256, serve_folder, write_links, write_wheel

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


def deb(folder, name, fields):
    """A package whose script makes a user."""
    tree = folder / f"{name}-tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: 1.5\nArchitecture: all\nMaintainer: x <x@example.org>\n{fields}"
        "Description: a test\n"
    )
    script = tree / "DEBIAN" / "postinst"
    script.write_text(f"#!/bin/sh\nset -e\nuseradd --system --no-create-home {name}\n")
    script.chmod(0o755)
    file = folder / f"{name}_1.5_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True, capture_output=True)
    return file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A folder that a server shows to containers."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """One Debian package in the archive, one in the snapshot service only, and an index of wheels."""
    folder = tmp_path_factory.mktemp("site")
    for path in ("debian/pool/main/i", f"{SNAPSHOT}/pool/main/i", "simple/imgkit-test-wheel"):
        (folder / path).mkdir(parents=True)
    user, needed = (deb(folder, name, fields) for name, fields in DEBS.items())
    user.rename(folder / "debian/pool/main/i" / user.name)
    needed.rename(folder / SNAPSHOT / "pool/main/i" / needed.name)
    package = folder / "simple/imgkit-test-wheel"
    write_links(package, [write_wheel(package, package.name, "1.5")], hashed=False)
    with serve_folder(folder, host_address()) as address:
        yield Site(folder=folder, url=f"http://{address}")


@pytest.fixture(scope="module")
def base(site, standin_notorch):
    """A base whose pip knows the index, and whose snapshot service is the server's."""
    host = site.url.rpartition(":")[0].removeprefix("http://")
    index = f"PIP_INDEX_URL={site.url}/simple PIP_TRUSTED_HOST={host}"
    text = f"FROM {standin_notorch}\nENV IMGKIT_SNAPSHOT={site.url} {index}\n"
    docker("build", "--quiet", "--tag", BASE, "-", stdin=text)
    yield BASE
    docker("image", "rm", "--force", BASE)


@pytest.fixture
def recipe(site, base, tmp_path):
    """A recipe with its lock."""
    file = tmp_path / f"{NAME}.yaml"
    file.write_text(RECIPE)
    write(file, locked(file, site, base))
    yield file
    docker("image", "rm", "--force", TAG)


def locked(file, site, base):
    debs = []
    for name in sorted(DEBS):
        (path,) = site.folder.rglob(f"{name}_1.5_all.deb")
        debs.append(
            LockedDeb(
                name=name,
                version="1.5",
                architecture="all",
                file=path.name,
                url=f"{site.url}/debian/pool/main/i/{path.name}",
                sha256=file_sha256(path),
                size_bytes=path.stat().st_size,
            )
        )
    (path,) = site.folder.rglob("*.whl")
    return LockedPlatform(
        platform=docker("image", "inspect", base, "--format", "{{.Os}}/{{.Architecture}}"),
        source_date_epoch=EPOCH,
        request=lock_file.make_request(load(file), base=base),
        base=LockedBase(name=base, id=docker("image", "inspect", base, "--format", "{{.Id}}")),
        apt=tuple(debs),
        pip=(
            LockedWheel(
                step=0,
                name="imgkit-test-wheel",
                version="1.5",
                file=path.name,
                url=f"{site.url}/simple/imgkit-test-wheel/{path.name}",
                sha256=file_sha256(path),
            ),
        ),
    )


def write(recipe, part):
    recipe.with_suffix(".lock").write_text(
        lock_file.render_lock(Lock(recipe=recipe.stem, imgkit="0.3.0", platforms=(part,)))
    )


def in_image(script):
    return docker("run", "--rm", "--entrypoint", "sh", TAG, "-c", script).splitlines()


def test_locked_packages_and_nothing_else_are_in_the_image(recipe, base):
    answer = imgkit_json("build", recipe, "--base", base, "--no-test", "--locked")
    assert answer["locked"]
    script = (
        "id -nu imgkit-test-user; apt-mark showauto | grep imgkit; apt-mark showmanual | grep imgkit;"
        "python3 -c 'import imgkit_test_wheel'; ls /opt/imgkit /var/lib/apt/lists /var/cache/apt/archives"
    )
    lines = in_image(f"cd /; {script}")
    assert lines[:3] == ["imgkit-test-user", "imgkit-test-needed", "imgkit-test-user"]
    assert "lock.toml" in lines
    assert not [line for line in lines if "locked" in line or line.endswith(".deb") or "wheel" in line]
    lock_text = "\n".join(in_image("cat /opt/imgkit/lock.toml")) + "\n"
    assert hashlib.sha256(lock_text.encode()).hexdigest() == answer["labels"]["imgkit.lock.sha256"]


def test_kept_files_need_no_network(recipe, site, base):
    cut = f"{NAME}-cut:1"
    proxies = " ".join(f"{name}={NOWHERE}" for name in ("http_proxy", "https_proxy", "PIP_INDEX_URL"))
    docker("build", "--quiet", "--tag", cut, "-", stdin=f"FROM {base}\nENV {proxies}\n")
    try:
        part = locked(recipe, site, cut)
        write(recipe, part)
        lock_files = recipe.with_suffix(".lock.files")
        lock_files.mkdir()
        for file in (*site.folder.rglob("*_1.5_all.deb"), *site.folder.rglob("*.whl")):
            (lock_files / file.name).write_bytes(file.read_bytes())
        result = expect_success(imgkit("build", recipe, "--base", cut, "--no-test"))
        assert "3 of them kept here" in result.stderr
        assert in_image("id -nu imgkit-test-needed; ls /opt/imgkit | grep locked || :") == [
            "imgkit-test-needed"
        ]
        with next(lock_files.glob("*.whl")).open("ab") as file:
            file.write(b"x")
        expect_failure(
            imgkit("build", recipe, "--base", cut, "--no-test", "--no-cache"),
            1,
            "imgkit_test_wheel-1.5-py3-none-any.whl: its sha256 is",
        )
    finally:
        docker("image", "rm", "--force", cut)


@pytest.mark.soak
def test_vanished_or_other_package_is_named_with_its_line(recipe, site, base):
    part = locked(recipe, site, base)
    first, second = part.apt
    write(recipe, dataclasses.replace(part, apt=(first, dataclasses.replace(second, sha256="0" * 64))))
    expect_failure(
        imgkit("build", recipe, "--base", base, "--no-test"),
        4,
        f"{NAME}.yaml:4: step ",
        "snapshot service: imgkit-test-user_1.5_all.deb",
        f"imgkit lock {NAME}.yaml --keep-files",
        f"imgkit lock {NAME}.yaml --upgrade",
    )
    write(recipe, dataclasses.replace(part, pip=(dataclasses.replace(part.pip[0], sha256="0" * 64),)))
    expect_failure(
        imgkit("build", recipe, "--base", base, "--no-test"),
        4,
        f"{NAME}.yaml:6: step ",
        "DO NOT MATCH THE HASHES",
    )
    assert docker("image", "ls", "--quiet", TAG) == ""
