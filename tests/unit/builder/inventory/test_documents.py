from __future__ import annotations

import dataclasses
import json

import pytest
from packageurl import PackageURL
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.packages import BakedFile, Inventory, Package
from imgkit_builder.inventory.spdx import package_url

CURL = Package(
    kind="deb",
    name="libstdc++6",
    version="1:12.2.0-14+deb12u1~bpo",
    architecture="amd64",
    sha256="ab" * 32,
    url="https://deb.example.org/pool/a.deb",
)
TORCH = Package(
    kind="pypi",
    name="Torch_X.y",
    version="2.13.0+cpu",
    folder="/usr/lib/python3/dist-packages",
)
FULL = Inventory(
    recipe="mine",
    base="nvcr.example.org/pytorch:24.03",
    base_digest=f"sha256:{'cd' * 32}",
    distribution="debian",
    release="12",
    arch="amd64",
    created_s=1710892800,
    packages=(CURL, TORCH, dataclasses.replace(TORCH, folder="/opt/env/site-packages")),
    baked=(BakedFile(path="/opt/imgkit/system.json", sha1="1" * 40, sha256="2" * 64),),
    left_out=("/var/lib/dpkg/status: too large",),
)
EMPTY = dataclasses.replace(
    FULL, recipe="", base="", base_digest="", distribution="", release="", packages=(), baked=(), left_out=()
)


@pytest.mark.parametrize("inventory", [FULL, EMPTY], ids=["full", "empty"])
def test_spdx_library_accepts_the_document(inventory, tmp_path):
    path = tmp_path / "x.spdx.json"
    path.write_text(spdx.spdx_document(inventory))
    assert validate_full_spdx_document(parse_file(str(path)), "SPDX-2.3") == []


def test_only_the_content_decides_the_bytes(monkeypatch):
    first = spdx.spdx_document(FULL)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("USER", "somebody")
    assert spdx.spdx_document(dataclasses.replace(FULL)) == first
    for changes in ({"arch": "arm64"}, {"created_s": 1}):
        changed = spdx.spdx_document(dataclasses.replace(FULL, **changes))
        assert json.loads(changed)["documentNamespace"] != json.loads(first)["documentNamespace"]
    assert "dpkg/status: too large" in json.loads(first)["comment"]


def test_package_urls_are_those_of_the_library():
    deb, wheel = (PackageURL.from_string(package_url(package, FULL)) for package in (CURL, TORCH))
    assert (deb.type, deb.namespace, deb.name, deb.version) == ("deb", "debian", CURL.name, CURL.version)
    assert deb.qualifiers == {"arch": "amd64", "distro": "debian-12"}
    assert (wheel.name, wheel.version) == ("torch-x.y", TORCH.version)
    assert package_url(TORCH, FULL) == wheel.to_string()
