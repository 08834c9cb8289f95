from __future__ import annotations

import pytest
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.inventory import packages
from imgkit_builder.inventory.collector import SPDX_PATH, InventoryCollector
from imgkit_builder.inventory.packages import Inventory
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import Lock

STATUS = """\
Package: curl
Status: install ok installed
Architecture: amd64
Version: 1:7.88.1-10+deb12u8
Description: a tool
 for URLs: of every kind

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: adduser
Status: install ok installed
Architecture: all
Version: 3.134
"""
WHERE = "usr/lib/python3/dist-packages"


def collected(files: dict[str, str | bytes | None]) -> Inventory:
    """What the collector says about an image with `files`; None is one that is too large."""
    collector = InventoryCollector()
    for path, data in files.items():
        assert collector.is_relevant(path), path
        collector.add(path, data.encode() if isinstance(data, str) else data)
    return collector.inventory(arch="amd64", created_s=7)


def test_only_installed_debian_packages_count():
    inventory = collected({"var/lib/dpkg/status": STATUS})
    versions = [(package.name, package.version) for package in inventory.packages]
    assert versions == [("adduser", "3.134"), ("curl", "1:7.88.1-10+deb12u8")]


@pytest.mark.parametrize(
    "entry",
    [
        "Package: Bad Name\nVersion: 1\n",
        "Package: a-b\nVersion: 1 2\n",
        "Package: a-b\nVersion: 1\nArchitecture: \x1b[31m\n",
        f"Package: {'a' * 200}\nVersion: 1\n",
    ],
)
def test_impossible_debian_package_refused(entry):
    assert list(packages.debian_packages(entry)) == ["entry 1 is not a package"]


@pytest.mark.parametrize(
    "path",
    [
        f"{WHERE}/a-1.dist-info/METADATA",
        f"{WHERE}/a-1.egg-info/PKG-INFO",
        f"{WHERE}/a-1.egg-info",
        f"{WHERE}/a-1.egg/EGG-INFO/PKG-INFO",
        "opt/env/lib/python3.12/site-packages/a-1.dist-info/METADATA",
    ],
)
def test_every_form_of_python_package_found(path):
    (package,) = collected({path: "Name: A.b_c\nVersion: 1!2.0+cpu\n"}).packages
    assert (package.name, package.version) == ("A.b_c", "1!2.0+cpu")
    assert f"/{path}".startswith(f"{package.folder}/")


def test_name_of_file_stands_in_for_damaged_metadata():
    files = {f"{WHERE}/a_b-1.5.dist-info/METADATA": b"\xff\xfe\0\0", f"{WHERE}/c-2.dist-info/METADATA": None}
    inventory = collected(files)
    assert [(package.name, package.version) for package in inventory.packages] == [("a_b", "1.5"), ("c", "2")]
    assert inventory.left_out == (f"/{WHERE}/c-2.dist-info/METADATA: too large",)


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        (f"{WHERE}/setuptools/_vendor/wheel-1.dist-info/METADATA", "Name: wheel\nVersion: 1\n", []),
        (f"{WHERE}/..-\x1b.dist-info/METADATA", "Name: ;rm\nVersion: 1\n", []),
        (
            "var/lib/dpkg/status.d/tzdata",
            "Package: tzdata\nVersion: 2024a-0\nArchitecture: all\n",
            ["tzdata"],
        ),
    ],
    ids=["vendored", "no name", "distroless"],
)
def test_only_installed_packages_with_a_name_count(path, text, names):
    assert [package.name for package in collected({path: text}).packages] == names


@pytest.mark.parametrize(
    ("path", "text", "distribution", "release"),
    [
        ("usr/lib/os-release", 'NAME="Debian"\nID=debian\nVERSION_ID="12"\n', "debian", "12"),
        ("etc/os-release", 'ID="\x1b[31m"\nVERSION_ID=../../12\n', "", ""),  # escapes are not repeated
    ],
)
def test_image_says_its_distribution(path, text, distribution, release):
    inventory = collected({path: text})
    assert (inventory.distribution, inventory.release) == (distribution, release)


LOCK = Lock(
    recipe="mine",
    imgkit="1",
    platforms=(
        locked_platform(
            apt=(
                locked_deb(
                    "curl", "1:7.88.1-10+deb12u8", url="https://deb.example.org/curl.deb", sha256="ab" * 32
                ),
            ),
            pip=(locked_wheel("a-b-c", "1", url="", sha256="cd" * 32),),
        ),
    ),
)


def test_locked_files_have_digest_and_place():
    inventory = collected(
        {
            "opt/imgkit/lock.toml": lock_file.render_lock(LOCK),
            "var/lib/dpkg/status": STATUS,
            f"{WHERE}/a-1.dist-info/METADATA": "Name: A.b_c\nVersion: 1\n",
            f"{WHERE}/d-1.dist-info/METADATA": "Name: d\nVersion: 1\n",
        }
    )
    origins = {package.name: (package.sha256, package.url) for package in inventory.packages}
    assert origins == {
        "curl": ("ab" * 32, "https://deb.example.org/curl.deb"),
        "adduser": ("", ""),
        "A.b_c": ("cd" * 32, ""),
        "d": ("", ""),
    }


@pytest.mark.parametrize(
    ("part", "damage", "field"),
    [
        ("ab" * 32, "xy" * 32, "sha256"),
        ('"curl"', '"curl', "sha256"),
        ("[[platforms.apt]]", "[[other.apt]]", "sha256"),
        ("https://deb", "file://deb", "url"),
    ],
)
def test_damaged_value_of_a_lock_is_not_repeated(part, damage, field):
    text = lock_file.render_lock(LOCK).replace(part, damage)
    inventory = collected({"opt/imgkit/lock.toml": text, "var/lib/dpkg/status": STATUS})
    assert {getattr(package, field) for package in inventory.packages} == {""}


def test_foreign_manifest_is_named_and_left_out():
    inventory = collected({"opt/imgkit/manifest.json": "[" * 100_000})
    assert inventory.left_out == ("/opt/imgkit/manifest.json: not a manifest of imgkit",)
    assert inventory.recipe == inventory.base == ""


@pytest.mark.parametrize(
    "path",
    [
        SPDX_PATH,
        "opt/imgkit/a/b",
        "etc/passwd",
        "usr/share/doc/a/copyright",
        "var/lib/dpkg/status-old",
        "var/lib/dpkg/status.d/tzdata.md5sums",
        "root/METADATA",
    ],
)
def test_other_files_are_not_read(path):
    assert not InventoryCollector().is_relevant(path)
